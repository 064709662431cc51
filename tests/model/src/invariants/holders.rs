//! A refused Acquire names a holder that could hold: another owner, that had asked
//! for this resource by then.

use super::Violation;
use crate::{
    history::Outcome,
    leases::{Could, Facts},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let Outcome::Held { owner } = &op.outcome else {
            continue;
        };
        let what = if *owner == op.owner {
            "refused because of itself".to_owned()
        } else if resource.could_hold(owner, op) == Could::NotYet {
            format!("refused because of {owner}, who never had it")
        } else {
            continue;
        };
        violations.push(Violation::new(what, &[op]));
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;

    #[test]
    fn a_refused_acquire_may_have_held_it_when_it_took_longer_than_its_ttl() {
        let slow = |until| op("a", acquire("1"), 0..until, held("c"));
        let asked = op("c", acquire("3"), 0..5, lock(5));
        let refused = op("b", acquire("2"), 500..510, held("a"));
        good(super::check, [asked.clone(), slow(1000), refused.clone()]);
        bad(super::check, [asked, slow(999), refused]);
    }

    #[test]
    fn a_holder_that_was_or_may_have_been_granted_it_is_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..30, lock(5)),
                op("b", acquire("2"), 10..20, held("a")),
            ],
        );
        good(
            super::check,
            [
                op("a", acquire("1"), 0..30, unknown()),
                op("b", acquire("2"), 10..20, held("a")),
            ],
        );
    }

    #[test]
    fn a_holder_that_never_asked_or_asked_later_is_bad() {
        bad(super::check, [op("b", acquire("2"), 10..20, held("a"))]);
        bad(
            super::check,
            [
                op("b", acquire("2"), 10..20, held("a")),
                op("a", acquire("1"), 21..30, lock(5)),
            ],
        );
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..5, held("b")),
                op("b", acquire("2"), 10..20, held("a")),
            ],
        );
    }

    #[test]
    fn nobody_stands_in_its_own_way() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..5, lock(5)),
                op("a", acquire("2"), 10..20, held("a")),
            ],
        );
    }
}
