//! Calls that were turned away, or not begun, so that the others have their time.

use super::{
    registry::{Counter, Registered},
    rpcs::OTHER,
};
use crate::room::NoRoom;

pub(crate) struct ShedMetrics {
    pub(crate) acquire: ShedMetric,
    pub(crate) release: ShedMetric,
    pub(crate) renew: ShedMetric,
    pub(crate) get: ShedMetric,
    /// Of each method that is bounded, by its name.
    pub(super) open: [(&'static str, Counter); 5],
    /// Streams wait for no turn.
    pub(crate) keep_alive: NoRoomMetric,
}

/// The calls of one method.
pub(crate) struct ShedMetric {
    pub(crate) no_room: NoRoomMetric,
    pub(crate) late: Counter,
}

/// Those that were not let in.
#[derive(Clone)]
pub(crate) struct NoRoomMetric {
    full: Counter,
    share: Counter,
}

impl NoRoomMetric {
    pub(crate) fn count(&self, why: NoRoom) {
        match why {
            NoRoom::Full => self.full.inc(),
            NoRoom::Share => self.share.inc(),
        };
    }
}

impl ShedMetrics {
    pub(super) fn new(registered: &mut Registered) -> Self {
        let shed = registered.family(
            "fencepost_shed",
            "Calls that were refused as overload, or whose time was over before their turn",
            ["method", "why"],
            Counter::default,
        );
        let no_room = |method| NoRoomMetric {
            full: shed([method, "full"]),
            share: shed([method, "share"]),
        };
        let method = |method| ShedMetric {
            no_room: no_room(method),
            late: shed([method, "late"]),
        };
        Self {
            acquire: method("Acquire"),
            release: method("Release"),
            renew: method("Renew"),
            get: method("Get"),
            open: ["Acquire", "Release", "Renew", "Get", OTHER]
                .map(|method| (method, shed([method, "open"]))),
            keep_alive: no_room("KeepAlive"),
        }
    }
}
