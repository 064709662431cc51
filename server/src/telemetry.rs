//! Logs, on standard error: text for people, or one JSON object a line.

use std::{
    error::Error as StdError,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tracing_appender::non_blocking::WorkerGuard;

use tracing_subscriber::{EnvFilter, filter::ParseError};

use crate::clock::Moment;

/// The form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// For the flag: takes what [`init`] can work with.
pub(crate) fn check_filter(filter: &str) -> Result<String, ParseError> {
    EnvFilter::try_new(filter).map(|_| filter.to_owned())
}

/// Starts logging, with a filter that was checked. The log ends with the guard.
///
/// A thread of its own writes, from a bounded queue that drops lines when it is
/// full: whoever reads the log slowly, or not at all, must not stop the server.
pub(crate) fn init(format: LogFormat, filter: &str) -> WorkerGuard {
    // The driver's own debug lines repeat every parameter; whoever wants them
    // names them after this.
    let filter = EnvFilter::new(format!("tokio_postgres=warn,{filter}"));
    let (writer, guard) = tracing_appender::non_blocking(std::io::stderr());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false)
        .with_writer(writer);
    match format {
        LogFormat::Text => log
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    guard
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
