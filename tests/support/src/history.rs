//! Checks a history of leases: no two holders at once, and tokens that rise.
//!
//! All times are of one monotonic clock, that of the test process. A holder
//! believes in its lease from the moment the answer is there until its own
//! deadline, which it counts from just before it sent the request, or until
//! it sends the release.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// One lease as its holder saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// What was locked.
    pub resource: String,
    /// Who held it.
    pub holder: String,
    /// When its request was sent: the token was drawn later than this.
    pub asked: Instant,
    /// When its answer was there: it held from here on.
    pub start: Instant,
    /// When it stopped to believe in it.
    pub end: Instant,
    /// The fencing token.
    pub token: i64,
}

/// What is wrong with a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Two leases of a resource at the same time.
    Overlap(Box<Held>, Box<Held>),
    /// The second was asked for after the first was granted, and its token is
    /// not larger.
    TokenFell(Box<Held>, Box<Held>),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap(a, b) => write!(f, "two holders at once:\n  {a:?}\n  {b:?}"),
            Self::TokenFell(a, b) => write!(f, "the token did not rise:\n  {a:?}\n  {b:?}"),
        }
    }
}

/// Collects leases from many tasks.
#[derive(Debug, Default)]
pub struct History {
    held: Mutex<Vec<Held>>,
}

impl History {
    /// An empty history.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a lease that is over.
    pub fn record(&self, held: Held) {
        self.lock().push(held);
    }

    /// How many leases were recorded.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first fault of the history.
    ///
    /// # Errors
    ///
    /// When there is one.
    pub fn check(&self) -> Result<(), Fault> {
        let mut resources = BTreeMap::<String, Vec<Held>>::new();
        for held in self.lock().iter() {
            let leases = resources.entry(held.resource.clone()).or_default();
            leases.push(held.clone());
        }
        resources.into_values().try_for_each(check_one)
    }

    /// Panics when there is a fault.
    #[track_caller]
    pub fn assert_sound(&self) {
        if let Err(fault) = self.check() {
            panic!("{fault}");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks the leases of one resource.
fn check_one(mut leases: Vec<Held>) -> Result<(), Fault> {
    // A lease whose answer came after its own deadline was never held.
    let mut held: Vec<&Held> = leases.iter().filter(|held| held.start < held.end).collect();
    held.sort_by_key(|held| held.start);
    let mut latest: Option<&Held> = None;
    for next in held {
        if let Some(before) = latest
            && next.start < before.end
        {
            return Err(Fault::Overlap(before.clone().into(), next.clone().into()));
        }
        if latest.is_none_or(|before| before.end < next.end) {
            latest = Some(next);
        }
    }

    // For each lease, by when it was asked for: the largest token among those
    // whose answers were there before that moment.
    let mut answered = leases.clone();
    answered.sort_by_key(|held| held.start);
    leases.sort_by_key(|held| held.asked);
    let mut answered = answered.into_iter().peekable();
    let mut largest: Option<Held> = None;
    for next in leases {
        while let Some(before) = answered.next_if(|before| before.start < next.asked) {
            if largest
                .as_ref()
                .is_none_or(|held| held.token < before.token)
            {
                largest = Some(before);
            }
        }
        if let Some(before) = &largest
            && next.token <= before.token
        {
            return Err(Fault::TokenFell(before.clone().into(), next.into()));
        }
    }
    Ok(())
}

/// The deadline of a holder: its TTL, counted from just before it asked.
pub fn deadline(asked: Instant, remaining: Duration) -> Instant {
    asked + remaining
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times in milliseconds after some start: asked, held from, held until.
    fn history(leases: &[(&str, u64, u64, u64, i64)]) -> History {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let history = History::new();
        for &(resource, asked, start, end, token) in leases {
            history.record(Held {
                resource: resource.to_owned(),
                holder: format!("holder of {token}"),
                asked: at(asked),
                start: at(start),
                end: at(end),
                token,
            });
        }
        history
    }

    #[test]
    fn one_after_the_other_is_sound() {
        history(&[
            ("a", 0, 1, 10, 5),
            ("a", 2, 10, 20, 7),
            ("a", 20, 21, 30, 8),
        ])
        .assert_sound();
        history(&[]).assert_sound();
    }

    #[test]
    fn two_resources_do_not_meet() {
        history(&[("a", 0, 1, 10, 5), ("b", 0, 1, 10, 4), ("b", 9, 11, 20, 5)]).assert_sound();
    }

    #[test]
    fn two_holders_at_once_are_found() {
        let fault = history(&[("a", 0, 1, 10, 5), ("a", 2, 9, 20, 7)]).check();
        assert!(matches!(fault, Err(Fault::Overlap(..))));
    }

    #[test]
    fn a_short_lease_inside_a_long_one_does_not_hide_the_next() {
        let fault = history(&[
            ("a", 0, 1, 100, 5),
            ("a", 101, 102, 103, 7),
            ("a", 40, 50, 60, 6),
        ]);
        assert!(matches!(fault.check(), Err(Fault::Overlap(..))));
    }

    #[test]
    fn a_token_that_falls_is_found() {
        let fault = history(&[("a", 0, 1, 10, 7), ("a", 11, 12, 20, 5)]).check();
        assert!(matches!(fault, Err(Fault::TokenFell(..))));
    }

    #[test]
    fn a_token_that_comes_again_is_found() {
        let fault = history(&[("a", 0, 1, 10, 7), ("a", 11, 12, 20, 7)]).check();
        assert!(matches!(fault, Err(Fault::TokenFell(..))));
    }

    #[test]
    fn a_token_is_compared_with_all_before_it() {
        let fault = history(&[("a", 0, 1, 2, 9), ("a", 3, 4, 5, 10), ("a", 6, 7, 8, 9)]).check();
        assert!(matches!(fault, Err(Fault::TokenFell(..))));
    }

    #[test]
    fn calls_that_overlap_may_be_granted_in_either_order() {
        // The first was released before its answer was read by a slow caller.
        history(&[("a", 0, 10, 11, 5), ("a", 1, 8, 9, 7)]).assert_sound();
    }

    #[test]
    fn a_lease_that_was_over_when_its_answer_came_was_never_held() {
        history(&[("a", 0, 50, 10, 5), ("a", 40, 45, 60, 7)]).assert_sound();
    }
}
