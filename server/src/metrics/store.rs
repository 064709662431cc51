//! The way of calls to the database, and what is known of the database itself.

use std::{sync::Arc, time::Duration};

use super::{
    prefixes::PrefixMetrics,
    registry::{Counter, Fraction, Gauge, Histogram, Registered, latencies, sizes, spans},
    shed::ShedMetrics,
};

type Family<const N: usize, M> = Arc<dyn Fn([&'static str; N]) -> M + Send + Sync>;

#[derive(Clone)]
pub(crate) struct StoreMetrics {
    pub(crate) lanes: LaneMetrics,
    pub(crate) in_flight: InFlight,
    pub(crate) shed: Arc<ShedMetrics>,
    held: Histogram,
    prefixes: PrefixMetrics,
    pub(crate) live: Gauge,
    pub(crate) purged: Counter,
    pub(crate) orphans: OrphanMetrics,
    pub(crate) leaps: LeapMetrics,
    pub(crate) clock: ClockMetrics,
    durations: Family<1, Histogram>,
    failures: Family<2, Counter>,
    connections: Family<2, Gauge>,
    no_connection: Family<2, Counter>,
}

/// Calls at work or waiting, by their room.
#[derive(Clone)]
pub(crate) struct InFlight {
    pub(crate) asking: Gauge,
    pub(crate) holding: Gauge,
}

/// The calls that go to the database together, and those that wait to.
#[derive(Clone)]
pub(crate) struct LaneMetrics {
    pub(crate) calls: LaneMetric,
    pub(crate) gets: LaneMetric,
    pub(crate) renewals: LaneMetric,
    /// The renewals of streams, which have no queue of calls.
    pub(crate) streams: Histogram,
}

#[derive(Clone)]
pub(crate) struct LaneMetric {
    pub(crate) together: Histogram,
    pub(crate) waiting: Gauge,
    pub(crate) shed: Arc<ShedMetrics>,
}

/// Leases that nobody was told of.
#[derive(Clone)]
pub(crate) struct OrphanMetrics {
    pub(crate) known: Gauge,
    pub(crate) perhaps: Gauge,
}

#[derive(Clone)]
pub(crate) struct LeapMetrics {
    pub(crate) absolute: Counter,
    pub(crate) relative: Counter,
    pub(crate) start: Counter,
}

/// Steps of the database's clock.
#[derive(Clone)]
pub(crate) struct ClockMetrics {
    pub(crate) steps: Counter,
    pub(crate) last: Fraction,
}

/// One statement.
pub(crate) struct StatementMetrics {
    name: &'static str,
    duration: Histogram,
    failures: Family<2, Counter>,
}

/// One pool of connections.
pub(crate) struct PoolMetrics {
    name: &'static str,
    pub(crate) in_use: Gauge,
    pub(crate) idle: Gauge,
    pub(crate) overdue: Gauge,
    no_connection: Family<2, Counter>,
}

impl StoreMetrics {
    pub(super) fn new(
        registered: &mut Registered,
        prefixes: PrefixMetrics,
        shed: Arc<ShedMetrics>,
    ) -> Self {
        Self {
            prefixes,
            lanes: LaneMetrics::new(registered, &shed),
            in_flight: InFlight::new(registered),
            shed,
            held: registered.one(
                "fencepost_lease_held_seconds",
                "From the grant of a lease to its release",
                spans(),
            ),
            live: registered.one(
                "fencepost_live_leases",
                "Leases that had not ended, as last counted",
                Gauge::default(),
            ),
            purged: registered.one(
                "fencepost_purged_rows",
                "Idle names that were removed",
                Counter::default(),
            ),
            orphans: OrphanMetrics::new(registered),
            leaps: LeapMetrics::new(registered),
            clock: ClockMetrics {
                steps: registered.one(
                    "fencepost_clock_steps",
                    "Steps of the database's clock",
                    Counter::default(),
                ),
                last: registered.one(
                    "fencepost_clock_step_seconds",
                    "The last step of the database's clock, below zero when backward",
                    Fraction::default(),
                ),
            },
            durations: Arc::new(registered.family(
                "fencepost_statement_duration_seconds",
                "From sending a statement to its outcome, commit included",
                ["statement"],
                latencies,
            )),
            failures: Arc::new(registered.family(
                "fencepost_statement_failures",
                "Statements that were sent and came to nothing, or whose outcome is unknown",
                ["statement", "failure"],
                Counter::default,
            )),
            connections: Arc::new(registered.family(
                "fencepost_pool_connections",
                "Connections to the database",
                ["pool", "state"],
                Gauge::default,
            )),
            no_connection: Arc::new(registered.family(
                "fencepost_pool_failures",
                "Times that no connection was to be had",
                ["pool", "failure"],
                Counter::default,
            )),
        }
    }

    /// A lease was released after so long.
    pub(crate) fn held(&self, resource: &str, held: Duration) {
        self.held.observe(held.as_secs_f64());
        self.prefixes.held(resource, held);
    }

    pub(crate) fn statement(&self, name: &'static str) -> StatementMetrics {
        StatementMetrics {
            name,
            duration: (self.durations)([name]),
            failures: Arc::clone(&self.failures),
        }
    }

    pub(crate) fn pool(&self, name: &'static str) -> PoolMetrics {
        let [in_use, idle, overdue] =
            ["in_use", "idle", "overdue"].map(|state| (self.connections)([name, state]));
        PoolMetrics {
            name,
            in_use,
            idle,
            overdue,
            no_connection: Arc::clone(&self.no_connection),
        }
    }
}

impl InFlight {
    fn new(registered: &mut Registered) -> Self {
        let room = registered.family(
            "fencepost_calls_in_flight",
            "Calls that are at work in the store, or wait there",
            ["room"],
            Gauge::default,
        );
        let [asking, holding] = ["asking", "holding"].map(|name| room([name]));
        Self { asking, holding }
    }
}

impl LaneMetrics {
    fn new(registered: &mut Registered, shed: &Arc<ShedMetrics>) -> Self {
        let together = registered.family(
            "fencepost_round_calls",
            "Calls that went to the database together",
            ["lane"],
            sizes,
        );
        let waiting = registered.family(
            "fencepost_calls_waiting",
            "Calls that wait for the next round",
            ["lane"],
            Gauge::default,
        );
        let [calls, gets, renewals] = ["calls", "gets", "renewals"].map(|lane| LaneMetric {
            together: together([lane]),
            waiting: waiting([lane]),
            shed: Arc::clone(shed),
        });
        Self {
            calls,
            gets,
            renewals,
            streams: together(["streams"]),
        }
    }
}

impl OrphanMetrics {
    fn new(registered: &mut Registered) -> Self {
        let known = registered.family(
            "fencepost_orphans",
            "Leases that nobody was told of, still to be given back; those that may not exist with known = false",
            ["known"],
            Gauge::default,
        );
        let [known, perhaps] = ["true", "false"].map(|value| known([value]));
        Self { known, perhaps }
    }
}

impl LeapMetrics {
    fn new(registered: &mut Registered) -> Self {
        let kind = registered.family(
            "fencepost_token_leaps",
            "Leaps of the fencing tokens that this server made",
            ["kind"],
            Counter::default,
        );
        let [absolute, relative, start] =
            ["absolute", "relative", "start"].map(|name| kind([name]));
        Self {
            absolute,
            relative,
            start,
        }
    }
}

impl StatementMetrics {
    /// It was sent and its outcome was heard, or given up on, after so long.
    pub(crate) fn ended(&self, after: Duration) {
        self.duration.observe(after.as_secs_f64());
    }

    pub(crate) fn failed(&self, failure: &'static str) {
        (self.failures)([self.name, failure]).inc();
    }
}

impl PoolMetrics {
    pub(crate) fn failed(&self, failure: &'static str) {
        (self.no_connection)([self.name, failure]).inc();
    }
}

/// How many there are, as a gauge has it.
pub(crate) fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
