//! Logs, on standard error: text for people, or one JSON object a line.

use std::{error::Error as StdError, fmt};

use tracing_subscriber::{EnvFilter, filter::ParseError};

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

/// Starts logging, with a filter that was checked.
pub(crate) fn init(format: LogFormat, filter: &str) {
    // The driver's own debug lines repeat every parameter; whoever wants them
    // names them after this.
    let filter = EnvFilter::new(format!("tokio_postgres=warn,{filter}"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
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
