//! A bounded world for the rule, and what may be different in it.

use crate::state::Past;

/// The design in a small world, or a mutation of it.
#[derive(Clone, Debug)]
pub struct World {
    /// What is different from the design: nothing, for the design itself.
    pub mutations: &'static [Mutation],
    /// How many replicas there are, each with one call at a time.
    pub replicas: usize,
    /// How many Acquires there are in all.
    pub calls: u8,
    /// How many different request ids; those of one parity are one owner's.
    pub requests: u8,
    /// How many crashes, promotions and restores there are in all.
    pub faults: u8,
    /// Whether Postgres crashes, to recover in place or to start anew.
    pub crashes: bool,
    /// The standbys, backups and dumps that may take over, each once and in this order.
    pub pasts: &'static [Past],
    /// Whether the replicas' connections outlive the server.
    pub pooler: bool,
    /// Whether calls go in a round first (`acquire_all_v1`).
    pub rounds: bool,
    /// The least time between two leaps.
    pub apart: u8,
    /// How far the clocks of two servers disagree at most.
    pub skew: u8,
}

impl World {
    /// The design: two replicas, two calls by two owners, and nothing goes wrong.
    pub const SMALL: Self = Self {
        mutations: &[],
        replicas: 2,
        calls: 2,
        requests: 2,
        faults: 0,
        crashes: false,
        pasts: &[],
        pooler: true,
        rounds: false,
        apart: 2,
        skew: 1,
    };

    pub(crate) fn has(&self, mutation: Mutation) -> bool {
        self.mutations.contains(&mutation)
    }
}

/// A rule of the design that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// `SET fencing_token = EXCLUDED.fencing_token`.
    TokenBeforeLock,
    /// No `CHECK (fencing_token > prev_token)`.
    NoRowCheck,
    /// No look whether a token is below where the last leap went.
    NoFirstToken,
    /// A replica does not compare a grant with the highest token it has seen.
    NoHighest,
    /// Release deletes the row.
    ReleaseDeletesRow,
    /// Purge deletes a row as soon as its lease is over.
    PurgeAtOnce,
    /// The identity is compared once on each connection of a replica.
    GuardPerConnection,
    /// The leap goes so far ahead, not to where the clock says.
    RelativeLeap,
    /// A lease is given back when its token is the orphan's.
    GiveBackByToken,
    /// A replay takes the lease over, and gives it back when its caller has gone.
    GiveBackByLastAttempt,
    /// `synchronous_commit = off`.
    AnswerBeforeFlush,
    /// Not of the design but of what is asked of it: a lease is promised through a
    /// failover that loses the last commits.
    LeasesPromisedThroughFailover,
}
