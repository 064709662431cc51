//! Client of the Fencepost lock server.
//!
//! A lock with a time to live is a *lease*: when its time is up another worker
//! gets it. So hand [`Lock::fencing_token`] to the protected resource with
//! every write, and have it refuse the older one.
//!
//! Three rules this library keeps, so that its callers need not:
//!
//! - Every call is safe to repeat, and is repeated: `acquire` carries one
//!   `request_id` for all its attempts, `renew` and `release` name a token. A
//!   lost answer, a draining replica or a failover costs time, not a lock.
//! - An error is read from `google.rpc.ErrorInfo`, never from its text, and not
//!   from its code alone, which any proxy may have made up.
//! - What is left of a lease is counted from just before the request was sent.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use fencepost_client::{Acquisition, AcquireOptions, Client};
//! use std::time::Duration;
//!
//! let client = Client::connect_lazy("http://127.0.0.1:50051")?;
//! let ttl = Duration::from_secs(30);
//! match client.acquire("nightly", "worker-7f3a", ttl, AcquireOptions::default()).await? {
//!     Acquisition::Acquired(lock) => {
//!         // … write, with lock.fencing_token …
//!         client.release("nightly", "worker-7f3a", lock.fencing_token).await?;
//!     }
//!     Acquisition::Refused(holder) => println!("{} has it", holder.owner),
//! }
//! # Ok(())
//! # }
//! ```

mod call;
mod client;
mod clock;
mod decode;
mod endpoints;
mod error;
pub mod fence;
mod keep_alive;
mod lock;

pub use client::{AcquireOptions, Client};
pub use endpoints::{EndpointProblem, EndpointsError};
pub use error::{Error, FieldViolation, LostReason};
pub use keep_alive::{KeepAlive, KeepAliveOptions, Renewal};
pub use lock::{Acquisition, Holder, Lock};
