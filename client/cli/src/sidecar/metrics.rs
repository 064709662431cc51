//! What the sidecar counts of its lock, for Prometheus.

use std::time::Duration;

use fencepost_client::{Event, LostReason, Observer, Via};
use prometheus_client::{
    encoding::prometheus_text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

pub(super) use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;

type Labels = [(&'static str, &'static str); 1];
type Counters = Family<Labels, Counter>;

pub(crate) struct Metrics {
    registry: Registry,
    acquired: Histogram,
    held: Histogram,
    slack: Histogram,
    failures: Counters,
    lost: Counters,
    rejected: Counter,
    holding: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let registry = &mut Registry::default();
        let failures = register(
            registry,
            "fencepost_client_renewal_failures",
            "Attempts to renew that failed, and did not end the lease",
            Counters::default(),
        );
        let lost = register(
            registry,
            "fencepost_client_leases_lost",
            "Leases that were lost, by the reason",
            Counters::default(),
        );
        // There from the start, so that the first one shows as a rise.
        for via in [Via::Stream, Via::Call] {
            drop(failures.get_or_create(&[("via", via.as_str())]));
        }
        for reason in LostReason::ALL {
            drop(lost.get_or_create(&[("reason", reason.as_str())]));
        }
        Self {
            acquired: register(
                registry,
                "fencepost_client_acquire_seconds",
                "From when the lock was wanted to when it was taken",
                spans(),
            ),
            held: register(
                registry,
                "fencepost_client_held_seconds",
                "From the taking of the lock to its release or loss",
                spans(),
            ),
            slack: register(
                registry,
                "fencepost_client_renewal_slack_seconds",
                "For how long the lease would still have been trusted when its renewal was heard of",
                spans(),
            ),
            failures,
            lost,
            rejected: register(
                registry,
                "fence_rejected",
                "Writes that were refused for an older token, as the neighbour told",
                Counter::default(),
            ),
            holding: register(
                registry,
                "fencepost_client_held",
                "1 while the lock is held",
                Gauge::default(),
            ),
            registry: std::mem::take(registry),
        }
    }

    pub(super) fn text(&self, is_held: bool) -> String {
        self.holding.set(is_held.into());
        let mut text = String::new();
        // A String takes whatever is written to it.
        let _: Result<(), _> = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    /// A write of the neighbour's was refused.
    pub(super) fn rejected(&self) {
        self.rejected.inc();
    }
}

impl Observer for Metrics {
    fn observe(&self, event: &Event<'_>) {
        let seconds = |time: &Duration| time.as_secs_f64();
        match event {
            Event::Acquired { after } => self.acquired.observe(seconds(after)),
            Event::Renewed { slack } => self.slack.observe(seconds(slack)),
            Event::RenewalFailed { via, .. } => {
                self.failures.get_or_create(&[("via", via.as_str())]).inc();
            }
            Event::Lost { reason, held } => {
                let reason = [("reason", reason.as_str())];
                self.lost.get_or_create(&reason).inc();
                self.held.observe(seconds(held));
            }
            Event::Released { held } => self.held.observe(seconds(held)),
            _ => {}
        }
    }
}

fn register<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

/// What leases last: a tenth of a second to a day.
fn spans() -> Histogram {
    Histogram::new([
        0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0,
        86_400.0,
    ])
}
