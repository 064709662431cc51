//! What a holder says of itself, for whoever is refused.

use std::collections::BTreeMap;

use super::Invalid;

/// At most 16 entries and 4 KiB of keys and values together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Labels(BTreeMap<String, String>);

impl Labels {
    const MAX_ENTRIES: usize = 16;
    const MAX_BYTES: usize = 4096;

    pub(crate) fn new(
        entries: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Invalid> {
        let entries: BTreeMap<_, _> = entries.into_iter().collect();
        if entries.len() > Self::MAX_ENTRIES {
            return Err(Invalid::new(format!(
                "must have at most {} entries",
                Self::MAX_ENTRIES
            )));
        }
        let bytes: usize = entries.iter().map(|(k, v)| k.len() + v.len()).sum();
        if bytes > Self::MAX_BYTES {
            return Err(Invalid::new(format!(
                "must have at most {} bytes of keys and values together",
                Self::MAX_BYTES
            )));
        }
        if entries.keys().any(|key| key.chars().any(char::is_control)) {
            return Err(Invalid::new("must not contain control characters in keys"));
        }
        // Postgres can store every other character of a value.
        if entries.values().any(|value| value.contains('\0')) {
            return Err(Invalid::new("must not contain U+0000 in values"));
        }
        Ok(Self(entries))
    }

    /// Labels as the store gave them back, which were checked on their way in.
    pub(crate) fn stored(entries: BTreeMap<String, String>) -> Self {
        Self(entries)
    }

    pub(crate) fn entries(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    pub(crate) fn into_entries(self) -> BTreeMap<String, String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Labels;

    fn labels(entries: &[(&str, &str)]) -> Result<Labels, super::Invalid> {
        Labels::new(entries.iter().map(|&(k, v)| (k.into(), v.into())))
    }

    #[test]
    fn limits_are_inclusive() {
        let many = |n: usize| Labels::new((0..n).map(|i| (format!("k{i}"), String::new())));
        assert!(many(16).is_ok());
        assert!(many(17).is_err());
        assert!(labels(&[("k", &"v".repeat(4095))]).is_ok());
        assert!(labels(&[("k", &"v".repeat(4096))]).is_err());
    }

    #[test]
    fn keys_have_no_control_characters_and_values_no_nul() {
        assert!(labels(&[("a\nb", "v")]).is_err());
        assert!(labels(&[("k", "two\nlines")]).is_ok());
        assert!(labels(&[("k", "a\0b")]).is_err());
    }
}
