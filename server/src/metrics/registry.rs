//! The registry, and how what is in it is made.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::prometheus_text,
    metrics::family::Family,
    registry::{Metric, Registry},
};

/// Its name is registered without the `_total` that the text adds.
pub(crate) type Counter = prometheus_client::metrics::counter::Counter;
pub(crate) type Gauge = prometheus_client::metrics::gauge::Gauge;
/// A gauge with fractions.
pub(super) type Fraction = prometheus_client::metrics::gauge::Gauge<f64, AtomicU64>;
pub(super) use prometheus_client::metrics::histogram::Histogram;

#[derive(Default)]
pub(super) struct Registered(Registry);

impl Registered {
    /// The text of all of them.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // A String takes whatever is written to it.
        let _ = prometheus_text::encode(&mut text, &self.0);
        text
    }

    /// A metric without labels.
    pub(super) fn one<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    /// A metric for each value of its labels: it is there, as zero, from when it was
    /// first asked for, so that a first event shows as a rise.
    pub(super) fn family<const N: usize, M, F>(
        &mut self,
        name: &str,
        help: &str,
        labels: [&'static str; N],
        make: F,
    ) -> impl Fn([&'static str; N]) -> M + Clone + use<N, M, F>
    where
        M: Metric + Clone,
        F: Fn() -> M + Clone + Send + Sync + 'static,
        Family<[(&'static str, &'static str); N], M, F>: Metric,
    {
        let family = Family::new_with_constructor(make);
        self.0.register(name, help, family.clone());
        move |values: [&'static str; N]| {
            let mut labelled = labels.map(|label| (label, ""));
            for (place, value) in labelled.iter_mut().zip(values) {
                place.1 = value;
            }
            family.get_or_create_owned(&labelled)
        }
    }
}

/// What calls and statements take: half a millisecond to ten seconds.
pub(super) fn latencies() -> Histogram {
    Histogram::new([
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    ])
}

/// What leases last: a tenth of a second to a day.
pub(super) fn spans() -> Histogram {
    Histogram::new([
        0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0,
        86_400.0,
    ])
}

/// How many go together; a crowd around one name can make it more.
pub(super) fn sizes() -> Histogram {
    Histogram::new((0..=10).map(|power| f64::from(1 << power)))
}
