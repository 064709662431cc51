//! All that is printed.
//!
//! JSON has the names of the contract, durations and times as protobuf writes
//! them ("29.900s", RFC 3339), tokens as numbers (they stay below 2^53). Text
//! is one `key: value` a line, with the same names; those of a lease stand at
//! the top level, those of somebody else's behind `holder.`. Lines may be added
//! later, so look for keys and not for line numbers.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, Write as _},
    time::{Duration, SystemTime},
};

use clap::ValueEnum;
use fencepost_client::{Acquisition, Error, Holder, Lock, Renewal};
use serde_json::{Map, Value, json};

use crate::exit::{Exit, Failure};

/// How answers are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One `key: value` a line.
    Text,
    /// One JSON object, on one line.
    Json,
}

/// Prints answers to stdout.
#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
}

impl Output {
    pub(crate) fn new(format: Format) -> Self {
        Self { format }
    }

    /// The answer to an acquire.
    pub(crate) fn acquisition(&self, acquisition: &Acquisition) -> Result<(), Failure> {
        let (acquired, key, prefix, fields) = match acquisition {
            Acquisition::Acquired(lock) => (true, "lock", "", lock_fields(lock)),
            Acquisition::Refused(holder) => (false, "holder", "holder.", holder_fields(holder)),
        };
        print(&match self.format {
            Format::Text => format!("acquired: {acquired}\n") + &text(prefix, &fields),
            Format::Json => line(&json!({ "acquired": acquired, key: object(fields) })),
        })
    }

    /// A live lease.
    pub(crate) fn lock(&self, lock: &Lock) -> Result<(), Failure> {
        let fields = lock_fields(lock);
        print(&match self.format {
            Format::Text => text("", &fields),
            Format::Json => line(&json!({ "lock": object(fields) })),
        })
    }

    /// One renewal of a stream: one line in either format.
    pub(crate) fn renewal(&self, renewal: &Renewal) -> Result<(), Failure> {
        let fields = vec![
            ("remaining", json!(seconds(renewal.lock.remaining))),
            ("slack", json!(seconds(renewal.slack))),
            ("stream_remaining", json!(seconds(renewal.stream_remaining))),
        ];
        print(&match self.format {
            Format::Text => {
                let words: Vec<String> = fields
                    .iter()
                    .map(|(key, value)| format!("{key}: {}", value.as_str().unwrap_or_default()))
                    .collect();
                format!("renewed: true  {}\n", words.join("  "))
            }
            Format::Json => {
                let mut object = object(fields);
                object["lock"] = self::object(lock_fields(&renewal.lock));
                line(&object)
            }
        })
    }

    /// A stream failed, and the next one is tried.
    pub(crate) fn retry(&self, failure: &Error) {
        error(&format!("{failure}; trying again"));
    }

    /// There is no lease. Text has nothing to say on stdout.
    pub(crate) fn free(&self) -> Result<(), Failure> {
        match self.format {
            Format::Text => Ok(()),
            Format::Json => print(&line(&json!({ "lock": null }))),
        }
    }

    /// The lock was given back.
    pub(crate) fn released(&self) -> Result<(), Failure> {
        print(&match self.format {
            Format::Text => "released: true\n".to_owned(),
            Format::Json => line(&json!({})),
        })
    }
}

/// What a database has seen of a resource.
#[derive(Debug)]
pub(crate) struct Seen {
    /// 0: none yet.
    pub(crate) highest_token: i64,
    /// None also after a reset: nobody has shown the token that it set.
    pub(crate) admitted_at: Option<SystemTime>,
    pub(crate) rejected_total: i64,
}

impl Output {
    /// As it is, in either format.
    pub(crate) fn raw(&self, text: &str) -> Result<(), Failure> {
        print(text)
    }

    /// The fencing kit is in place.
    pub(crate) fn installed(&self) -> Result<(), Failure> {
        self.fields(vec![("installed", json!(true))])
    }

    /// What a database has seen of a resource, and whether a token would pass.
    pub(crate) fn seen(
        &self,
        resource: &str,
        seen: &Seen,
        admitted: Option<bool>,
    ) -> Result<(), Failure> {
        let mut fields = vec![
            ("resource", json!(resource)),
            ("highest_token", json!(seen.highest_token)),
        ];
        fields.extend(seen.admitted_at.map(|at| ("admitted_at", timestamp(at))));
        fields.push(("rejected_total", json!(seen.rejected_total)));
        fields.extend(admitted.map(|admitted| ("would_be_admitted", json!(admitted))));
        self.fields(fields)
    }

    /// A resource was reset; 0 stands for no token at all.
    pub(crate) fn reset(
        &self,
        resource: &str,
        to: Option<i64>,
        before: i64,
    ) -> Result<(), Failure> {
        self.fields(vec![
            ("resource", json!(resource)),
            ("highest_token", json!(to.unwrap_or(0))),
            ("previous_token", json!(before)),
        ])
    }

    fn fields(&self, fields: Fields) -> Result<(), Failure> {
        print(&match self.format {
            Format::Text => text("", &fields),
            Format::Json => line(&object(fields)),
        })
    }
}

/// One line to stderr. Where that fails, there is nobody left to tell.
pub(crate) fn error(message: &str) {
    let _ = writeln!(io::stderr(), "fencepost: {}", escape(message));
}

/// What clap has to say: help and version, or what is wrong with the usage.
pub(crate) fn usage(message: &clap::Error) -> Exit {
    let printed = message.print();
    match (message.use_stderr(), printed) {
        (true, _) => Exit::Usage,
        (false, Ok(())) => Exit::Done,
        (false, Err(_)) => Exit::Bug,
    }
}

/// Whoever has a lock, as JSON.
pub(crate) fn holder(holder: &Holder) -> Value {
    object(holder_fields(holder))
}

/// With the precision of protobuf's JSON: none, or three digits. Cut, not
/// rounded: what is left of a lease must not grow by being printed.
pub(crate) fn seconds(duration: Duration) -> String {
    match duration.subsec_millis() {
        0 => format!("{}s", duration.as_secs()),
        millis => format!("{}.{millis:03}s", duration.as_secs()),
    }
}

/// Written out rather than through `print!`, which panics on a closed pipe.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(Failure::Output)
}

/// In the order in which text shows them.
type Fields = Vec<(&'static str, Value)>;

fn lock_fields(lock: &Lock) -> Fields {
    vec![
        ("resource", json!(lock.resource)),
        ("owner", json!(lock.owner)),
        ("fencing_token", json!(lock.fencing_token)),
        ("acquired_at", timestamp(lock.acquired_at)),
        ("expires_at", timestamp(lock.expires_at)),
        ("remaining", json!(seconds(lock.remaining))),
        ("ttl", json!(seconds(lock.ttl))),
        ("labels", labels(&lock.labels)),
    ]
}

fn holder_fields(holder: &Holder) -> Fields {
    vec![
        ("owner", json!(holder.owner)),
        ("acquired_at", timestamp(holder.acquired_at)),
        ("remaining", json!(seconds(holder.remaining))),
        ("labels", labels(&holder.labels)),
    ]
}

fn timestamp(time: SystemTime) -> Value {
    json!(prost_types::Timestamp::from(time).to_string())
}

fn labels(labels: &BTreeMap<String, String>) -> Value {
    json!(labels)
}

fn object(fields: Fields) -> Value {
    let fields = fields
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value));
    Value::Object(fields.collect::<Map<_, _>>())
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}

fn text(prefix: &str, fields: &Fields) -> String {
    let mut lines = String::new();
    for (key, value) in fields {
        match value {
            Value::Object(entries) => {
                for (name, value) in entries {
                    push_line(&mut lines, &format!("{prefix}{key}.{name}"), value);
                }
            }
            value => push_line(&mut lines, &format!("{prefix}{key}"), value),
        }
    }
    lines
}

fn push_line(lines: &mut String, key: &str, value: &Value) {
    let value = match value {
        Value::String(text) => escape(text),
        other => other.to_string(),
    };
    lines.push_str(&escape(key));
    lines.push_str(": ");
    lines.push_str(&value);
    lines.push('\n');
}

/// Makes harmless what could break the line or fool the eye: control
/// characters, line separators, and marks that turn the direction of writing.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(escaped, "{}", c.escape_unicode());
            }
            c if c.is_control() => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_cut_not_rounded() {
        assert_eq!(seconds(Duration::from_secs(30)), "30s");
        assert_eq!(seconds(Duration::from_nanos(29_999_999_999)), "29.999s");
        assert_eq!(seconds(Duration::from_millis(500)), "0.500s");
        assert_eq!(seconds(Duration::from_nanos(999_999)), "0s");
    }

    #[test]
    fn nothing_breaks_a_line_or_fools_the_eye() {
        assert_eq!(escape("a\nb\u{1b}[2J\u{9b}"), "a\\nb\\u{1b}[2J\\u{9b}");
        assert_eq!(escape("a\u{202e}b\u{2028}"), "a\\u{202e}b\\u{2028}");
        assert_eq!(escape("Käse/🧀 \\"), "Käse/🧀 \\");
    }

    #[test]
    fn labels_have_a_line_each() {
        let fields = vec![("labels", json!({ "a\nb": "c\nd", "host": "web1" }))];
        assert_eq!(
            text("holder.", &fields),
            "holder.labels.a\\nb: c\\nd\nholder.labels.host: web1\n"
        );
    }
}
