//! Client of the Fencepost lock server.
//!
//! A lock with a time to live is a *lease*: when its time is up another worker
//! gets it. So hand [`Lock::fencing_token`] to the protected resource with
//! every write, and have it refuse the older one.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use fencepost_client::{AcquireOptions, Client, Error};
//!
//! let client = Client::connect_lazy("http://127.0.0.1:50051")?;
//! match client.acquire("nightly", AcquireOptions::default()).await {
//!     Ok(guard) => {
//!         // … write, with guard.fencing_token(), while guard.is_held() …
//!         guard.release().await?;
//!     }
//!     Err(Error::Refused { holder }) => println!("{} has it", holder.owner),
//!     Err(error) => return Err(error.into()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What this library sees to, so that its callers need not:
//!
//! - A [`Guard`] renews its lease by itself, on a thread of the client's own, and
//!   says when it is lost: [`Client::with_lock`] cancels the work then.
//! - Every call is safe to repeat, and is repeated: one `request_id` stands for
//!   all tries of an acquisition, renewing and releasing name a token. A lost
//!   answer, a draining replica or a failover costs time, not a lock.
//! - An error is read from `google.rpc.ErrorInfo`, never from its text, and not
//!   from its code alone, which any proxy may have made up.
//! - What is left of a lease is counted from just before the request was sent, on
//!   a clock that goes on while the machine sleeps.

mod acquire;
mod call;
mod calls;
mod client;
mod clock;
mod connect;
mod decode;
mod endpoints;
mod error;
mod failures;
pub mod fence;
mod guard;
mod keep;
mod keep_alive;
mod lease;
mod lock;
mod observe;
mod options;
mod owner;
mod thread;
mod tls;
mod wire;

pub use calls::Calls;
pub use client::{BuildError, Client, ClientBuilder};
pub use endpoints::{EndpointProblem, EndpointsError};
pub use error::{Error, FieldViolation, LostReason};
pub use guard::Guard;
pub use keep_alive::{KeepAlive, KeepAliveOptions, Renewal};
pub use lock::{Acquisition, Holder, Lock};
pub use observe::{Event, Observer, Via};
pub use options::AcquireOptions;
pub use owner::unique as unique_owner;
pub use tls::Tls;
// What `BuildError` tells of a file of TLS.
pub use fencepost_tls::{BadFile as TlsFileError, Problem as TlsFileProblem};
// A guard hands it out.
pub use tokio_util::sync::CancellationToken;
