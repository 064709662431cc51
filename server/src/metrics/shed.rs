//! Calls that were turned away, or not begun, so that the others have their time.

use super::{
    registry::{Counter, Registered},
    rpcs::OTHER,
};

pub(crate) struct ShedMetrics {
    pub(crate) acquire: ShedMetric,
    pub(crate) release: ShedMetric,
    pub(crate) renew: ShedMetric,
    pub(crate) get: ShedMetric,
    /// Of each method that is bounded, by its name.
    pub(super) open: [(&'static str, Counter); 5],
    /// Streams have no share and no turn.
    pub(crate) keep_alive: Counter,
}

/// The calls of one method.
pub(crate) struct ShedMetric {
    pub(crate) full: Counter,
    pub(crate) share: Counter,
    pub(crate) late: Counter,
}

impl ShedMetrics {
    pub(super) fn new(registered: &mut Registered) -> Self {
        let shed = registered.family(
            "fencepost_shed",
            "Calls that were refused as overload, or whose time was over before their turn",
            ["method", "why"],
            Counter::default,
        );
        let method = |method| ShedMetric {
            full: shed([method, "full"]),
            share: shed([method, "share"]),
            late: shed([method, "late"]),
        };
        Self {
            acquire: method("Acquire"),
            release: method("Release"),
            renew: method("Renew"),
            get: method("Get"),
            open: ["Acquire", "Release", "Renew", "Get", OTHER]
                .map(|method| (method, shed([method, "open"]))),
            keep_alive: shed(["KeepAlive", "full"]),
        }
    }
}
