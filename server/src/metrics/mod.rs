//! What the server tells of itself: Prometheus text, at `/metrics`.
//!
//! [`Metrics`] is made once and owns the registry; nothing here is global. Those
//! who have something to count are handed their handles when they are made, one
//! for each value of a label, so that counting looks nothing up and allocates
//! nothing. Only failures of the database look up theirs.
//!
//! Counters and histograms are counted where the thing happens. A gauge is a fact
//! that somebody keeps anyway, the length of a queue or a free place: it is read
//! when somebody asks, by the `measure` of whoever keeps it.
//!
//! No label holds what a caller has sent, so there are as many as are listed here.
//! The names are those of the README's table, which a test compares with what a
//! server exports.

mod leases;
mod logs;
mod prefixes;
mod registry;
mod rpcs;
mod shed;
mod store;
mod tls;
mod traces;

use std::sync::Arc;

pub(crate) use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;

use self::registry::Registered;
pub(crate) use self::registry::{Counter, Gauge};
pub(crate) use self::{
    leases::{AcquireMetrics, RenewalMetrics, StreamMetrics},
    logs::LogMetrics,
    prefixes::PrefixMetrics,
    rpcs::{RpcMethod, RpcMetrics},
    shed::{NoRoomMetric, ShedMetric, ShedMetrics},
    store::{
        ClockMetrics, LaneMetric, LaneMetrics, LeapMetrics, PoolMetrics, StatementMetrics,
        StoreMetrics, count,
    },
    tls::TlsMetrics,
    traces::TraceMetrics,
};

/// All of it.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) rpcs: RpcMetrics,
    pub(crate) acquires: AcquireMetrics,
    /// Those of Renew.
    pub(crate) renewals: RenewalMetrics,
    /// Releases whose token was never given, for all that the database knows. The other
    /// reasons cost a release nothing: its holder wanted the lease no longer.
    pub(crate) forgotten: Counter,
    pub(crate) streams: StreamMetrics,
    pub(crate) store: StoreMetrics,
    pub(crate) tls: TlsMetrics,
    pub(crate) traces: TraceMetrics,
    /// To the port of clients.
    pub(crate) connections: Gauge,
    pub(crate) connections_limit: Gauge,
    pub(crate) logs: LogMetrics,
    pub(crate) ready: Gauge,
    registered: Arc<Registered>,
}

impl Metrics {
    /// Tells so many prefixes of resources apart.
    pub(crate) fn new(prefixes: usize) -> Self {
        let mut registered = Registered::default();
        let prefixes = PrefixMetrics::new(prefixes, &mut registered);
        let version = registered.family(
            "fencepost_build_info",
            "1, for the version that runs",
            ["version"],
            Gauge::default,
        );
        version([env!("CARGO_PKG_VERSION")]).set(1);
        let shed = Arc::new(ShedMetrics::new(&mut registered));
        let ([by_calls, by_streams], forgotten) =
            RenewalMetrics::by(["call", "stream"], &mut registered);
        Self {
            rpcs: RpcMetrics::new(&mut registered, &shed),
            acquires: AcquireMetrics::new(&mut registered, prefixes.clone()),
            renewals: by_calls,
            forgotten,
            streams: StreamMetrics::new(&mut registered, by_streams, &shed),
            tls: TlsMetrics::new(&mut registered),
            traces: TraceMetrics::new(&mut registered),
            store: StoreMetrics::new(&mut registered, prefixes, shed),
            connections: registered.one(
                "fencepost_connections",
                "Connections of clients that are open",
                Gauge::default(),
            ),
            connections_limit: registered.one(
                "fencepost_connections_limit",
                "How many connections of clients may be open at one time",
                Gauge::default(),
            ),
            logs: LogMetrics::new(&mut registered),
            ready: registered.one(
                "fencepost_ready",
                "1 when locks can be taken here and new calls are welcome",
                Gauge::default(),
            ),
            registered: Arc::new(registered),
        }
    }

    /// The exposition, as [`CONTENT_TYPE`].
    pub(crate) fn text(&self) -> String {
        self.registered.text()
    }
}
