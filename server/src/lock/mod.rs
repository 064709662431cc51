//! What a lock is, without a database and without a wire.
//!
//! A **resource** is a name that can be locked. A **lease** is one holding of
//! it by one **owner**, for a **TTL**; it is named by its **fencing token**,
//! which is larger than that of every earlier lease of the resource. A lease
//! is live until it is released or its time is up, and the database's clock
//! alone says when that is.
//!
//! Each value is checked once, by its constructor, and is valid from then on.

mod errors;
mod labels;
mod lease;
mod names;
mod token;
mod ttl;

pub(crate) use errors::{AcquireError, GetError, Loss, Outage, ReleaseError, RenewError};
pub(crate) use labels::Labels;
pub(crate) use lease::{Holder, Lease};
pub(crate) use names::{Owner, RequestId, Resource};
pub(crate) use token::FencingToken;
pub(crate) use ttl::{Ttl, TtlLimits};

/// Why a value was refused. The text is for the caller and never repeats the
/// value itself, which may forge a log line or hold a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Invalid(pub(crate) String);

impl Invalid {
    fn new(problem: impl Into<String>) -> Self {
        Self(problem.into())
    }
}
