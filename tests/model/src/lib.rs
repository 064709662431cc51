//! Random clients, the history of their calls, and what must hold of it.
//!
//! # What is recorded
//!
//! [`Load`] starts clients that contend for a few resources through several
//! replicas: some with generated stubs, where one call is one request, some with
//! the client library, where it may be several. They acquire (also again, as the
//! same owner; also once more with the same request id, at another replica, when
//! the answer was lost, or long after), renew, keep alive by streams, release, let
//! expire, look, drop calls under way, use leases that are over, and write to a
//! fenced register with the tokens of leases that they have or had.
//!
//! Each call becomes an [`Op`](history::Op): what was asked, when it was sent, when
//! it was answered, and what came back, on one monotonic clock. A call without an
//! answer, or with one that says "may have happened", is kept as that.
//! Somebody who breaks the system meanwhile tells of it by [`Load::event`]; what
//! that excuses is said at [`What`](history::What): never a token that falls, and
//! never the register.
//!
//! # What is certain
//!
//! A call takes effect at one moment between `sent` and `answered`; without an
//! answer at some moment after `sent`, up to a bound, or never. All that the
//! checker knows of a lease follows from that: [`leases`].
//!
//! # What must hold
//!
//! [`invariants`]: each a pure function in a file of its own, which says what it
//! assumes.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! use fencepost_model::{Load, Options, history::What, verdict};
//!
//! let mut options = Options::new(4711, vec!["http://127.0.0.1:50051".to_owned()]);
//! options.register = Some("postgres://127.0.0.1/register".to_owned());
//! let load = Load::start(options).await?;
//! let from = load.now();
//! // … break something, and mend it …
//! load.event(from, What::Fault("the database was restarted".to_owned()));
//! // … wait until it serves again …
//! let history = load.stop().await?;
//! let summary = verdict(&history, "target/model".as_ref())?;
//! # Ok(())
//! # }
//! ```

pub mod history;
pub mod invariants;
pub mod leases;
mod load;
pub mod mutants;
mod recorder;
mod report;
mod saved;
pub mod world;

pub use invariants::{Violation, check};
pub use load::{Error, Load, Options, failed};
pub use recorder::{Answer, Recorder};
pub use report::{Contradiction, Summary, default_directory, save, verdict};
