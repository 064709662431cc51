//! What the logs could not hold.

use tracing_appender::non_blocking::ErrorCounter;

use super::registry::{Counter, Registered};
use crate::telemetry::LostLines;

#[derive(Clone)]
pub(crate) struct LogMetrics {
    log: Counter,
    audit: Counter,
}

impl LogMetrics {
    pub(super) fn new(registered: &mut Registered) -> Self {
        let lost = registered.family(
            "fencepost_log_lines_lost",
            "Lines of a log that were dropped because nobody took them in time",
            ["log"],
            Counter::default,
        );
        let [log, audit] = ["log", "audit"].map(|name| lost([name]));
        Self { log, audit }
    }

    /// So many were, by now.
    pub(crate) fn lost(&self, lines: &LostLines) {
        let bring = |counter: &Counter, lines: &ErrorCounter| {
            let lines = u64::try_from(lines.dropped_lines()).unwrap_or(u64::MAX);
            counter
                .inner()
                .fetch_max(lines, std::sync::atomic::Ordering::Relaxed);
        };
        bring(&self.log, &lines.log);
        bring(&self.audit, &lines.audit);
    }
}
