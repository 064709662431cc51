//! One holding of a resource, and what others are told of it.

use std::time::{Duration, SystemTime};

use super::{FencingToken, Labels, Owner, Resource};
use crate::clock::Moment;

/// A live lease, as its holder sees it.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
    /// By the database's clock, for people.
    pub(crate) acquired_at: SystemTime,
    /// By the database's clock, for people.
    pub(crate) expires_at: SystemTime,
    /// When the lease is surely not over yet, on this machine's own clock:
    /// counted from just before the statement was sent.
    pub(crate) deadline: Moment,
    pub(crate) ttl: Duration,
    pub(crate) labels: Labels,
}

/// Who has a lock, for a caller that was refused it. It has no token, so that
/// it cannot be mistaken for a lease of the caller's own.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) owner: Owner,
    /// By the database's clock, for people.
    pub(crate) acquired_at: SystemTime,
    /// When the lease ends unless it is renewed or released.
    pub(crate) deadline: Moment,
    pub(crate) labels: Labels,
}
