//! Logs, on standard error: text for people, or one JSON object a line. The audit log
//! beside them is always the latter.

use std::{
    error::Error as StdError,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tracing::{Level, Metadata, level_filters::LevelFilter};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{
    EnvFilter, Layer as _,
    filter::{FilterExt as _, filter_fn},
    fmt::layer,
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::clock::Moment;

/// The form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// For the flag: takes what [`init`] can work with. A word alone is a level, and not the
/// module that the library takes it for: else a typo would silence the whole log.
pub(crate) fn check_filter(filter: &str) -> Result<String, String> {
    EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
    for directive in filter.split(',').map(str::trim) {
        let level = directive
            .rsplit_once('=')
            .map_or(directive, |(_, level)| level);
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            return Err(format!(
                "{level:?} is no level: off, error, warn, info, debug or trace"
            ));
        }
    }
    Ok(filter.to_owned())
}

/// The target of the events of the audit log, which the other does not have.
pub(crate) const AUDIT: &str = "audit";

fn is_audit(of: &Metadata<'_>) -> bool {
    of.target() == AUDIT
}

/// The driver repeats every parameter below this level, request ids among them.
/// Whatever the filter asks for, that is not logged.
fn tells_too_much(of: &Metadata<'_>) -> bool {
    of.target().starts_with("tokio_postgres") && *of.level() > Level::INFO
}

/// Lines that were lost because nobody took them.
#[derive(Clone)]
pub(crate) struct LostLines {
    pub(crate) log: ErrorCounter,
    pub(crate) audit: ErrorCounter,
}

/// What a queue holds: some ten megabytes at most.
const LINES: usize = 16_384;

/// A thread of its own writes, from a bounded queue that drops lines when it is
/// full: whoever reads the log slowly, or not at all, must not stop the server.
fn writer() -> (NonBlocking, WorkerGuard) {
    NonBlockingBuilder::default()
        .buffered_lines_limit(LINES)
        .finish(std::io::stderr())
}

/// Starts logging, with a filter that was checked. The logs end with the guards.
pub(crate) fn init(
    format: LogFormat,
    filter: &str,
    with_audit: bool,
) -> ([WorkerGuard; 2], LostLines) {
    let filter = EnvFilter::new(format!("tokio_postgres=warn,{filter}"));
    let filter = filter.and(filter_fn(|of| !is_audit(of) && !tells_too_much(of)));
    let (log_writer, log_guard) = writer();
    // A queue of its own: no flood of the other log displaces it.
    let (audit_writer, audit_guard) = writer();
    let lost = LostLines {
        log: log_writer.error_counter(),
        audit: audit_writer.error_counter(),
    };
    let log = layer().log_internal_errors(false).with_writer(log_writer);
    let log = match format {
        LogFormat::Text => log
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    let audit = with_audit.then(|| {
        layer()
            .log_internal_errors(false)
            .with_writer(audit_writer)
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .with_filter(filter_fn(is_audit))
    });
    tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .with(audit)
        .init();
    ([log_guard, audit_guard], lost)
}

/// Lets one event in so often through, for what many calls meet at once.
pub(crate) struct Seldom(Mutex<Option<Moment>>);

impl Seldom {
    const PAUSE: Duration = Duration::from_secs(10);

    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether the pause since the last event is over.
    pub(crate) fn passes(&self) -> bool {
        let now = Moment::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passes = last.is_none_or(|last| now.since(last) >= Self::PAUSE);
        if passes {
            *last = Some(now);
        }
        passes
    }
}

/// An error with its causes, on one line: what a database says may have
/// several, and must not look like another log entry.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = String::new();
        let mut next = Some(self.0);
        while let Some(error) = next {
            let text = error.to_string();
            // Many errors repeat their cause in their own text.
            if !said.contains(&text) {
                if !said.is_empty() {
                    said.push_str(": ");
                }
                said.push_str(&text);
            }
            next = error.source();
        }
        f.write_str(&said.replace(char::is_control, " "))
    }
}

#[cfg(test)]
mod tests {
    use super::Chain;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("inner\nERROR forged")]
    struct Inner;

    #[test]
    fn a_chain_is_one_line() {
        assert_eq!(
            Chain(&Outer(Inner)).to_string(),
            "outer: inner ERROR forged"
        );
    }
}
