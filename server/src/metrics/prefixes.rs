//! The same by the first part of a resource's name, for whoever asks for it.
//!
//! Callers choose names, so the parts are few and plain: the first so many that come
//! are told apart, the rest is `other`.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use prometheus_client::metrics::family::Family;

use super::registry::{Counter, Histogram, Registered, spans};

const OTHER: &str = "other";

/// Longer parts are not told apart.
const LONGEST: usize = 64;

type Acquires = Family<[(&'static str, String); 2], Counter>;
type Held = Family<[(&'static str, String); 1], Histogram, fn() -> Histogram>;

/// Counts nothing unless it was asked for. Cheap to clone.
#[derive(Clone)]
pub(crate) struct PrefixMetrics(Option<Arc<Prefixes>>);

struct Prefixes {
    most: usize,
    known: RwLock<HashMap<String, Arc<OfPrefix>>>,
    other: Arc<OfPrefix>,
    acquires: Acquires,
    held: Held,
}

struct OfPrefix {
    granted: Counter,
    refused: Counter,
    held: Histogram,
}

impl PrefixMetrics {
    /// Tells at most so many parts apart; none for 0.
    pub(super) fn new(most: usize, registered: &mut Registered) -> Self {
        if most == 0 {
            return Self(None);
        }
        let acquires = registered.one(
            "fencepost_prefix_acquires",
            "Acquires by the first part of the resource's name",
            Family::default(),
        );
        let held = registered.one(
            "fencepost_prefix_held_seconds",
            "From the grant of a lease to its release, by the first part of the resource's name",
            Family::new_with_constructor(spans as fn() -> Histogram),
        );
        Self(Some(Arc::new(Prefixes {
            most,
            known: RwLock::default(),
            other: Arc::new(OfPrefix::new(OTHER, &acquires, &held)),
            acquires,
            held,
        })))
    }

    pub(crate) fn granted(&self, resource: &str) {
        self.count(resource, |of| _ = of.granted.inc());
    }

    pub(crate) fn refused(&self, resource: &str) {
        self.count(resource, |of| _ = of.refused.inc());
    }

    pub(crate) fn held(&self, resource: &str, held: Duration) {
        self.count(resource, |of| of.held.observe(held.as_secs_f64()));
    }

    fn count(&self, resource: &str, count: impl FnOnce(&OfPrefix)) {
        if let Some(prefixes) = &self.0 {
            count(&prefixes.of(resource));
        }
    }
}

impl Prefixes {
    fn of(&self, resource: &str) -> Arc<OfPrefix> {
        let Some(prefix) = prefix(resource) else {
            return Arc::clone(&self.other);
        };
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(of) = known.get(prefix) {
            return Arc::clone(of);
        }
        let is_full = known.len() >= self.most;
        drop(known);
        if is_full {
            return Arc::clone(&self.other);
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= self.most && !known.contains_key(prefix) {
            return Arc::clone(&self.other);
        }
        let of = known
            .entry(prefix.to_owned())
            .or_insert_with(|| Arc::new(OfPrefix::new(prefix, &self.acquires, &self.held)));
        Arc::clone(of)
    }
}

impl OfPrefix {
    fn new(prefix: &str, acquires: &Acquires, held: &Held) -> Self {
        let label = || ("prefix", prefix.to_owned());
        let acquires = |outcome: &str| {
            acquires.get_or_create_owned(&[label(), ("outcome", outcome.to_owned())])
        };
        Self {
            granted: acquires("granted"),
            refused: acquires("refused"),
            held: held.get_or_create_owned(&[label()]),
        }
    }
}

/// What comes before the first `/` or `.`, if it is plain.
fn prefix(resource: &str) -> Option<&str> {
    let (prefix, _) = resource.split_once(['/', '.'])?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b':');
    (1..=LONGEST)
        .contains(&prefix.len())
        .then_some(prefix)
        .filter(|prefix| *prefix != OTHER && prefix.bytes().all(is_plain))
}

#[cfg(test)]
mod tests {
    use super::prefix;

    #[test]
    fn a_prefix_is_short_and_plain() {
        assert_eq!(prefix("billing/eu/1"), Some("billing"));
        assert_eq!(prefix("billing.eu/1"), Some("billing"));
        let long = format!("{}/1", "a".repeat(65));
        for none in [
            "billing", "/a", "", "a b/1", "\"/1", "ü/1", "other/1", &long,
        ] {
            assert_eq!(prefix(none), None, "{none}");
        }
    }
}
