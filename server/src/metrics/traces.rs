//! What is exported of the spans of calls.

use super::registry::{Counter, Registered};

#[derive(Clone)]
pub(crate) struct TraceMetrics {
    /// To be exported.
    pub(crate) ended: Counter,
    pub(crate) exported: Counter,
}

impl TraceMetrics {
    pub(super) fn new(registered: &mut Registered) -> Self {
        Self {
            ended: registered.one(
                "fencepost_spans",
                "Spans that were to be exported",
                Counter::default(),
            ),
            exported: registered.one(
                "fencepost_spans_exported",
                "Spans that the collector has taken",
                Counter::default(),
            ),
        }
    }
}
