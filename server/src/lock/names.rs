//! The three names of the contract: who holds what, and for which request.
//!
//! Names compare byte by byte. They are not normalised: two spellings of one
//! character are two names, and a trailing space makes another name.

use super::Invalid;

/// A length-limited UTF-8 name without Unicode control characters (C0, DEL,
/// C1): safe in a log line and, having no U+0000, in a Postgres `text`.
fn check(value: &str, min: usize, max: usize) -> Result<(), Invalid> {
    if value.len() < min || value.len() > max {
        let range = if min == 0 {
            format!("must be at most {max} bytes")
        } else {
            format!("must be {min} to {max} bytes")
        };
        return Err(Invalid::new(range));
    }
    if value.chars().any(char::is_control) {
        return Err(Invalid::new("must not contain control characters"));
    }
    Ok(())
}

/// The name that is locked: 1 to 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Resource(String);

impl Resource {
    pub(crate) fn new(value: String) -> Result<Self, Invalid> {
        check(&value, 1, 512)?;
        Ok(Self(value))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn into_string(self) -> String {
        self.0
    }
}

/// Who holds a lock: 1 to 256 bytes, naming exactly one holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner(String);

impl Owner {
    pub(crate) fn new(value: String) -> Result<Self, Invalid> {
        check(&value, 1, 256)?;
        Ok(Self(value))
    }

    /// An owner as the store gave it back, which was checked on its way in.
    pub(crate) fn stored(value: String) -> Self {
        Self(value)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn into_string(self) -> String {
        self.0
    }
}

/// What makes a retried Acquire recognisable: at most 128 bytes. Empty means
/// that the caller gave none, and every call is an acquisition of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestId(String);

impl RequestId {
    pub(crate) fn new(value: String) -> Result<Self, Invalid> {
        check(&value, 0, 128)?;
        Ok(Self(value))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::{Owner, RequestId, Resource};

    #[test]
    fn lengths_are_counted_in_bytes_and_inclusive() {
        assert!(Resource::new(String::new()).is_err());
        assert!(Resource::new("a".repeat(512)).is_ok());
        assert!(Resource::new("a".repeat(513)).is_err());
        assert!(Resource::new("ä".repeat(256)).is_ok());
        assert!(Resource::new("ä".repeat(257)).is_err());
        assert!(Owner::new("o".repeat(256)).is_ok());
        assert!(Owner::new("o".repeat(257)).is_err());
        assert!(RequestId::new(String::new()).is_ok());
        assert!(RequestId::new("r".repeat(128)).is_ok());
        assert!(RequestId::new("r".repeat(129)).is_err());
    }

    #[test]
    fn control_characters_are_refused_and_others_kept() {
        for bad in ['\0', '\n', '\u{1b}', '\u{1f}', '\u{7f}', '\u{80}', '\u{9f}'] {
            assert!(Resource::new(format!("a{bad}b")).is_err(), "{bad:?}");
        }
        for good in [" ", "%", "_", "\\", "\u{a0}", "\u{202e}", "\u{ad}"] {
            let name = format!("a{good}");
            assert_eq!(Resource::new(name.clone()).unwrap().as_str(), name);
        }
    }
}
