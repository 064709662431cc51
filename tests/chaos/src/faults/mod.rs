//! The faults. Each is a function that breaks something, keeps it so for the time
//! that its stage says, mends it, and returns when it is mended. Meanwhile it looks
//! for its own effect, by other means than those that broke it, and returns what it
//! saw: a fault that had no effect proves nothing.
//!
//! What is mended is what an operator would mend: a database that ended is started
//! again, a link works again. Nobody touches a replica, save the one whose end was
//! the fault itself.

mod clocks;
mod database;
mod failover;
mod network;
mod pooler;
mod replicas;
mod sessions;
mod stage;
mod upgrade;

pub(crate) use clocks::FARTHEST as FARTHEST_STEP;
pub(crate) use stage::{Ended, Seen, Stage};

use std::pin::Pin;

use crate::world::Setup;
use network::Leg::{Back, Front};

type Running<'a> = Pin<Box<dyn Future<Output = Ended> + 'a>>;

/// What is broken. Of two faults at a time, each breaks something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Replica,
    Front,
    Back,
    Database,
    Session,
    Pooler,
    Clock,
    /// The whole database: nothing else is broken at the same time.
    All,
}

/// A kind of fault.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) part: Part,
    /// Where it can be had; everywhere when empty.
    pub(crate) only: &'static [Setup],
    pub(crate) run: for<'a> fn(Stage<'a>) -> Running<'a>,
}

macro_rules! kinds {
    ($($name:literal: $part:ident, [$($setup:ident),*], $run:expr;)*) => {
        /// All of them.
        pub(crate) const KINDS: &[Kind] = &[$(Kind {
            name: $name,
            part: Part::$part,
            only: &[$(Setup::$setup),*],
            run: |stage| Box::pin(async move { Ended::from($run(stage).await) }),
        }),*];
    };
}

kinds! {
    "replica-kill": Replica, [], replicas::kill;
    "replica-freeze": Replica, [], replicas::freeze;
    "replica-restart": Replica, [], replicas::restart;
    "replicas-kill": Replica, [], replicas::kill_all;
    "migrate": Replica, [], upgrade::migrate;
    "client-delay": Front, [], |stage| network::delay(stage, Front);
    "client-cut": Front, [], |stage| network::cut(stage, Front);
    "client-refuse": Front, [], |stage| network::refuse(stage, Front);
    "client-requests-lost": Front, [], |stage| network::requests_lost(stage, Front);
    "client-answers-lost": Front, [], |stage| network::answers_lost(stage, Front);
    "client-answers-torn": Front, [], |stage| network::answers_torn(stage, Front);
    "client-stall": Front, [], |stage| network::stall(stage, Front);
    "client-drip": Front, [], |stage| network::drip(stage, Front);
    "database-delay": Back, [], |stage| network::delay(stage, Back);
    "database-cut": Back, [], |stage| network::cut(stage, Back);
    "database-refuse": Back, [], |stage| network::refuse(stage, Back);
    "database-requests-lost": Back, [], |stage| network::requests_lost(stage, Back);
    "database-answers-lost": Back, [], |stage| network::answers_lost(stage, Back);
    "database-answers-torn": Back, [], |stage| network::answers_torn(stage, Back);
    "database-stall": Back, [], |stage| network::stall(stage, Back);
    "database-drip": Back, [], |stage| network::drip(stage, Back);
    "postgres-immediate": Database, [], database::immediate;
    "postgres-kill": Database, [], database::kill;
    "postgres-freeze": Database, [], database::freeze;
    "postgres-restart": Database, [], database::restart;
    "disk-full": Database, [Plain], database::disk_full;
    "disk-full-log": Database, [Plain], database::disk_full_log;
    "rows-locked": Session, [], sessions::rows_locked;
    "pool-exhausted": Session, [], sessions::pool_exhausted;
    "terminate-storm": Session, [], sessions::terminate_storm;
    "deadlock-storm": Session, [], sessions::deadlock_storm;
    "serializable": Session, [], sessions::serializable;
    "read-only": Session, [], sessions::read_only;
    "pooler-restart": Pooler, [Pooler], pooler::restart;
    "pooler-reconnect": Pooler, [Pooler], pooler::reconnect;
    "promotion": All, [Asynchronous], failover::promotion;
    "promotion-twice": All, [Asynchronous], failover::promotion_twice;
    "standby-stalled": Database, [Synchronous], failover::standby_stalled;
    "standby-lost": Database, [Synchronous], failover::standby_lost;
    "promotion-synchronous": All, [Synchronous], failover::promotion_synchronous;
    "database-clock": Clock, [Clocks], clocks::database;
    "server-clock": Clock, [Clocks], clocks::servers;
    "client-clock": All, [Clocks], clocks::clients;
}

/// The names of all kinds of faults.
pub fn names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name)
}

impl Kind {
    /// Whether it can be had in this setup.
    pub(crate) fn fits(&self, setup: Setup) -> bool {
        self.only.is_empty() || self.only.contains(&setup)
    }

    /// Whether both can go on at one time.
    pub(crate) fn goes_with(&self, other: &Self) -> bool {
        self.part != other.part && self.part != Part::All && other.part != Part::All
    }
}
