//! Why an operation did not do what was asked: one enum for each.
//!
//! Every variant but `Outage` is a verdict on the state of the row, taken
//! under its lock. An outage is the absence of a verdict.

use std::error::Error as StdError;

/// No verdict: the operation may or may not have happened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Outage {
    /// The database is away, read-only, or kept the row locked for too long.
    #[error("the store is unavailable")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),
    /// The caller's time is over.
    #[error("the deadline has passed")]
    Deadline,
    /// Too much is in flight: it did not happen.
    #[error("too much is in flight")]
    Overloaded,
    /// The server is stopping: it did not happen.
    #[error("the server is draining")]
    Draining,
    /// A bug of ours, or a database that is not what was set up.
    #[error("internal error")]
    Internal(#[source] Box<dyn StdError + Send + Sync>),
}

/// Why Acquire gave no answer. Contention is an answer, not an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AcquireError {
    #[error("the lease of this request id was renewed, released or has expired")]
    RequestSpent,
    #[error(transparent)]
    Outage(#[from] Outage),
}

/// Why Release gave nothing back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    #[error("the lock is not held")]
    NotFound,
    #[error("the lock is held by another owner")]
    NotOwner,
    #[error("a newer lease of the same owner holds the lock")]
    Superseded,
    #[error("the token is larger than any the store has given")]
    TokenUnknown,
    #[error(transparent)]
    Outage(#[from] Outage),
}

/// How a lease ended, for one who still wanted it: there is nothing left to
/// renew, and its holder must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Loss {
    #[error("the lock is not held")]
    NotFound,
    #[error("the lease has expired")]
    Expired,
    #[error("the lock is held by another owner")]
    NotOwner,
    #[error("a newer lease of the same owner holds the lock")]
    Superseded,
    #[error("the token is larger than any the store has given")]
    TokenUnknown,
}

/// Why Renew prolonged nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RenewError {
    #[error(transparent)]
    Lost(#[from] Loss),
    #[error(transparent)]
    Outage(#[from] Outage),
}

/// Why Get found nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GetError {
    #[error("the lock is not held")]
    NotFound,
    #[error(transparent)]
    Outage(#[from] Outage),
}
