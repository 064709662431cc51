//! What becomes of leases: those that are asked for, renewed and lost.

use std::time::Duration;

use fencepost_proto::v1::reason;

use super::{
    prefixes::PrefixMetrics,
    registry::{Counter, Gauge, Histogram, Registered, spans},
    shed::{NoRoomMetric, ShedMetrics},
};
use crate::lock::Loss;

/// Acquires by what came of them.
#[derive(Clone)]
pub(crate) struct AcquireMetrics {
    pub(crate) granted: Counter,
    pub(crate) taken_over: Counter,
    pub(crate) replayed: Counter,
    pub(crate) held: Counter,
    pub(crate) spent: Counter,
    pub(crate) prefixes: PrefixMetrics,
}

impl AcquireMetrics {
    pub(super) fn new(registered: &mut Registered, prefixes: PrefixMetrics) -> Self {
        let outcome = registered.family(
            "fencepost_acquires",
            "Acquires that were answered, by what came of them",
            ["outcome"],
            Counter::default,
        );
        let [granted, taken_over, replayed, held, spent] =
            ["granted", "taken_over", "replayed", "held", "spent"].map(|name| outcome([name]));
        Self {
            granted,
            taken_over,
            replayed,
            held,
            spent,
            prefixes,
        }
    }
}

/// A counter for each way to lose a lease, by its reason in an answer.
#[derive(Clone)]
struct Losses {
    not_found: Counter,
    expired: Counter,
    not_owner: Counter,
    superseded: Counter,
    token_unknown: Counter,
}

impl Losses {
    fn new(by_reason: impl Fn(&'static str) -> Counter) -> Self {
        Self {
            not_found: by_reason(reason::LOCK_NOT_FOUND),
            expired: by_reason(reason::LOCK_EXPIRED),
            not_owner: by_reason(reason::NOT_OWNER),
            superseded: by_reason(reason::TOKEN_SUPERSEDED),
            token_unknown: by_reason(reason::TOKEN_UNKNOWN),
        }
    }

    fn of(&self, loss: Loss) -> &Counter {
        match loss {
            Loss::NotFound => &self.not_found,
            Loss::Expired => &self.expired,
            Loss::NotOwner => &self.not_owner,
            Loss::Superseded => &self.superseded,
            Loss::TokenUnknown => &self.token_unknown,
        }
    }
}

/// Renewals, of calls or of streams.
#[derive(Clone)]
pub(crate) struct RenewalMetrics {
    slack: Histogram,
    lost: Losses,
}

impl RenewalMetrics {
    /// And what counts the releases of leases that were forgotten.
    pub(super) fn by<const N: usize>(
        via: [&'static str; N],
        registered: &mut Registered,
    ) -> ([Self; N], Counter) {
        let slack = registered.family(
            "fencepost_renewal_slack_seconds",
            "What was left of a lease when its renewal landed",
            ["via"],
            spans,
        );
        let lost = registered.family(
            "fencepost_leases_lost",
            "Renewals that heard that their lease is gone, and releases of a lease that was forgotten",
            ["reason", "via"],
            Counter::default,
        );
        let of = |via| Self {
            slack: slack([via]),
            lost: Losses::new(|reason| lost([reason, via])),
        };
        (via.map(of), lost([reason::TOKEN_UNKNOWN, "release"]))
    }

    /// A renewal landed when this was left of the lease.
    pub(crate) fn landed(&self, slack: Duration) {
        self.slack.observe(slack.as_secs_f64());
    }

    pub(crate) fn lost(&self, loss: Loss) {
        self.lost.of(loss).inc();
    }
}

/// KeepAlive streams.
#[derive(Clone)]
pub(crate) struct StreamMetrics {
    pub(crate) open: Gauge,
    pub(crate) renewals: RenewalMetrics,
    pub(crate) ended: StreamEnds,
    /// Those that there was no room for.
    pub(crate) shed: NoRoomMetric,
}

/// Streams that have ended, by the reason in their last message.
#[derive(Clone)]
pub(crate) struct StreamEnds {
    lost: Losses,
    pub(crate) unavailable: Counter,
    pub(crate) reopen: Counter,
    pub(crate) deadline: Counter,
    pub(crate) draining: Counter,
    /// Nobody listened any more.
    pub(crate) gone: Counter,
}

impl StreamMetrics {
    pub(super) fn new(
        registered: &mut Registered,
        renewals: RenewalMetrics,
        shed: &ShedMetrics,
    ) -> Self {
        let open = registered.one(
            "fencepost_streams",
            "KeepAlive streams that are open",
            Gauge::default(),
        );
        let ended = registered.family(
            "fencepost_streams_ended",
            "KeepAlive streams that have ended, by the reason that was told",
            ["reason"],
            Counter::default,
        );
        let ended = |reason| ended([reason]);
        Self {
            open,
            renewals,
            shed: shed.keep_alive.clone(),
            ended: StreamEnds {
                lost: Losses::new(ended),
                unavailable: ended(reason::STORE_UNAVAILABLE),
                reopen: ended(reason::REOPEN),
                deadline: ended(reason::DEADLINE),
                draining: ended(reason::DRAINING),
                gone: ended("CANCELLED"),
            },
        }
    }
}

impl StreamEnds {
    pub(crate) fn lost(&self, loss: Loss) -> &Counter {
        self.lost.of(loss)
    }
}
