//! The store: leases in Postgres, and the only code that knows SQL.
//!
//! # Who decides
//!
//! The database decides, by its own clock, on one row under its lock. This
//! server's memory decides nothing: replicas share a database and know nothing
//! of each other. What a statement says of the time left is corrected by how
//! long ago we sent it, on our own monotonic clock, so that an answer held up
//! by a stalled commit never promises time that has passed.
//!
//! # What names a lease
//!
//! The fencing token, drawn from one sequence under the row's lock, larger than
//! every earlier token of the resource. Release and expiry keep the row. A row
//! is deleted only when it has been idle for a retention far above every
//! statement limit ([`Store::purge_page`]).
//!
//! # Where a token may come from
//!
//! A sequence remembers only what its own server durably knew. Acquire and Get
//! therefore carry a guard: the running server and the sequence's storage are
//! the ones that the identity row names. Where they are not (a restart, a
//! promotion, a restore) the statement does nothing, the sequence leaps ahead
//! of every past there could have been (`leap.sql`), and the statement is
//! repeated. A replica that has just started leaps as well. Three belts: the row
//! refuses a token that is not above its last one, no token is below where the last
//! leap went, and a grant whose token is not above all that this replica knew of
//! before it asked is given back, and forces a leap ([`identity`]).
//!
//! # Callers that go away
//!
//! A call's database work, a leap that it needs included, runs in a task of the
//! store's tracker, not in the caller's future: dropping the caller cancels no statement and poisons no
//! connection. A [`Grant`](acquire::Grant) that is dropped before it was
//! claimed, because its caller had gone, is given back; so is an Acquire whose
//! outcome is unknown.
//! Only the call that created a lease gives it back, and only while no replay
//! has claimed it and no renewal was seen ([`give_back`]).
//!
//! # What is repeated
//!
//! Only what Postgres itself refused with an SQLSTATE that invites repetition,
//! and what gave its own grant back. A lost connection is an unknown outcome,
//! which only the caller can resolve, by repeating its call.

mod acquire;
mod advance;
mod audit;
mod call;
mod census;
mod config;
mod connection;
mod failure;
mod get;
mod give_back;
mod identity;
mod lane;
mod migrate;
mod pool;
mod pooled;
mod probe;
mod purge;
mod release;
mod renew;
mod rounds;
mod row;
mod statement;
mod turns;

use std::{
    sync::{Arc, Mutex, atomic::AtomicI64},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};
use tokio_util::task::TaskTracker;

pub(crate) use acquire::{Acquire, Acquired};
pub(crate) use advance::{AdvanceError, Advanced};
pub(crate) use config::{BadDatabaseUrl, DatabaseUrl, Limits, StoreConfig, SynchronousCommit};
pub(crate) use migrate::{MigrateError, Schema, migrate};
pub(crate) use probe::{Health, Unfit};
pub(crate) use release::Release;
pub(crate) use renew::{Renew, Renewal, Renewed};

use self::{
    connection::Hosts,
    failure::{Because, Failure},
    give_back::Returns,
    identity::Identity,
    pool::Pool,
    purge::Watched,
    rounds::Lanes,
    statement::Statements,
    turns::Turns,
};
use crate::{
    clock::Moment,
    lock::Outage,
    metrics::{StoreMetrics, count},
    room::Room,
};

/// A cheap handle on the lock table.
#[derive(Clone)]
pub(crate) struct Store(Arc<Inner>);

struct Inner {
    config: StoreConfig,
    metrics: StoreMetrics,
    hosts: Arc<Hosts>,
    pool: Pool,
    lanes: Lanes,
    /// One connection that asks how the database is, however busy the others are.
    probes: Pool,
    /// One connection for the renewals of all streams.
    renewals: Pool,
    /// One connection for the rounds of renewals by calls.
    renewal_calls: Pool,
    identity: Identity,
    returns: Returns,
    /// The highest token this replica knows of.
    highest: AtomicI64,
    health: watch::Sender<Health>,
    /// What purge knows of the database's clock.
    watched: Mutex<Watched>,
    /// For calls that want a lock, or look at one.
    asking: Arc<Room>,
    /// For calls of those who hold one.
    holding: Arc<Room>,
    turns: Turns,
    tracker: TaskTracker,
}

impl Store {
    /// Sets the store up; nothing is connected yet.
    pub(crate) fn new(
        url: &DatabaseUrl,
        config: StoreConfig,
        metrics: StoreMetrics,
    ) -> Result<Self, Outage> {
        let hosts = Arc::new(Hosts::new(url, &config));
        let statements = Arc::new(Statements::new(&metrics));
        let pool = |name, size| {
            Pool::new(&hosts, &config, size, &statements, metrics.pool(name))
                .map_err(|error| Outage::Internal(Box::new(error)))
        };
        let calls = pool("calls", config.pool_size)?;
        let [probes, renewals, renewal_calls] =
            ["probes", "renewals", "renewal_calls"].map(|name| pool(name, 1));
        Ok(Self(Arc::new(Inner {
            asking: Room::new(config.max_in_flight),
            holding: Room::new(config.max_in_flight),
            turns: Turns::new(config.pool_size),
            hosts,
            pool: calls,
            lanes: Lanes::new(&metrics.lanes),
            probes: probes?,
            renewals: renewals?,
            renewal_calls: renewal_calls?,
            identity: Identity::default(),
            returns: Returns::default(),
            highest: AtomicI64::new(0),
            health: watch::Sender::new(Health::Starting),
            watched: Mutex::new(Watched::new(Moment::now().after(config.purge_retention))),
            tracker: TaskTracker::new(),
            metrics,
            config,
        })))
    }

    /// Brings the gauges up to date.
    pub(crate) fn measure(&self) {
        let metrics = &self.0.metrics;
        metrics.in_flight.asking.set(count(self.0.asking.taken()));
        metrics.in_flight.holding.set(count(self.0.holding.taken()));
        self.0.lanes.measure();
        let (known, perhaps) = self.0.returns.count();
        metrics.orphans.known.set(count(known));
        metrics.orphans.perhaps.set(count(perhaps));
        self.0.pools().into_iter().for_each(Pool::measure);
    }

    /// Refuses to promise what a crash would make the database forget.
    fn check_durable(&self) -> Result<(), Outage> {
        let why = match *self.0.health.borrow() {
            Health::Unfit(Unfit::FsyncOff) => "fsync is off",
            Health::Unfit(Unfit::Unlogged) => "a table is unlogged",
            _ => return Ok(()),
        };
        Err(Outage::Unavailable(Box::new(Because(why))))
    }

    /// Takes no more work, and waits until what is under way is done, leases
    /// that nobody was told of are given back, and the pool is closed.
    pub(crate) async fn drain(&self) {
        self.0.tracker.close();
        self.0.tracker.wait().await;
        self.give_back_rest().await;
        for pool in self.0.pools() {
            pool.close().await;
        }
    }
}

impl Inner {
    fn pools(&self) -> [&Pool; 4] {
        let (streams, calls) = (&self.renewals, &self.renewal_calls);
        [&self.pool, &self.probes, streams, calls]
    }
}

/// How often a statement is tried before the call gives up.
const MAX_TRIES: usize = 10;

/// Whether a statement that came to nothing is tried again, and if so after a
/// short rest: not when the next wait for a row would end after the call's time.
async fn rest_before_retry(
    inner: &Inner,
    cause: &Failure,
    tries: usize,
    deadline: Instant,
) -> bool {
    let wait = match cause {
        Failure::Conflict(_) => inner.config.limits.lock,
        _ => Duration::ZERO,
    };
    if tries >= MAX_TRIES || Instant::now() + wait > deadline {
        return false;
    }
    tokio::time::sleep(Duration::from_millis(rand::random_range(1..=20))).await;
    true
}

/// A verdict that this version of the server does not know.
fn unknown_outcome() -> Outage {
    Outage::Internal(Box::new(Because(
        "the database gave a verdict this server does not know",
    )))
}
