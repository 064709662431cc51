//! A refused Acquire names a holder that could hold: another owner, that had asked
//! for this resource by then; the moment of a grant that this owner was told of, unless
//! there may be others; and no more is left than the time that it asked for.
//!
//! During a fault a server may grant, learn that it must not have, and give back: others see
//! a grant that nobody is told of. And a clock that is set back leaves more.

use std::time::Duration;

use super::Violation;
use crate::{
    history::{Call, Outcome, Time},
    leases::{Could, Facts, Resource},
};

const START: Time = Time(0);

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let Outcome::Held {
            owner,
            acquired_at,
            remaining,
        } = &op.outcome
        else {
            continue;
        };
        let of_owner = || {
            let leases = resource.leases.values();
            leases.filter(|lease| lease.owner == owner)
        };
        let longest = asked_for(resource, owner) + facts.history.set_back_by(START, op.answered);
        let what = if *owner == op.owner {
            "refused because of itself".to_owned()
        } else if resource.could_hold(owner, op) == Could::NotYet {
            format!("refused because of {owner}, who never had it")
        } else if *remaining > longest {
            format!("{owner} has {remaining:?} left")
        } else if !of_owner().any(|lease| lease.acquired_at() == *acquired_at)
            && !resource.may_hide(owner)
            && !facts.history.faulty(op.sent, op.answered)
        {
            format!("{owner} was granted nothing at {acquired_at}")
        } else {
            continue;
        };
        violations.push(Violation::new(what, &[op]));
    }
    violations
}

/// The longest TTL that an owner asked for.
fn asked_for(resource: &Resource<'_>, owner: &str) -> Duration {
    let ttl = |call: &Call| match call {
        Call::Acquire { ttl, .. } => Some(*ttl),
        _ => None,
    };
    let calls = resource.calls_of(owner).iter();
    calls
        .filter_map(|op| ttl(&op.call))
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::hand::*;
    use crate::history::Outcome;

    #[test]
    fn what_is_said_of_a_holder_is_true() {
        let refused = |acquired_at, ms| {
            let owner = "a".to_owned();
            let remaining = Duration::from_millis(ms);
            let held = Outcome::Held {
                owner,
                acquired_at,
                remaining,
            };
            op("b", acquire("2"), 20..30, held)
        };
        let granted = op("a", acquire("1"), 0..10, lock(5));
        good(super::check, [granted.clone(), refused(5, 990)]);
        // It ran out on the way.
        good(super::check, [granted.clone(), refused(5, 0)]);
        bad(super::check, [granted.clone(), refused(5, 1001)]);
        good_with(
            super::check,
            [stepped(15..16, -10)],
            [granted.clone(), refused(5, 1001)],
        );
        bad(super::check, [granted.clone(), refused(6, 990)]);
        let lost = op("a", acquire("3"), 0..15, unknown());
        good(super::check, [granted, lost, refused(6, 990)]);
    }

    #[test]
    fn a_refused_acquire_may_have_held_it_when_it_took_longer_than_its_ttl() {
        let slow = |until| op("a", acquire("1"), 0..until, held("c"));
        let asked = op("c", acquire("3"), 0..5, lock(5));
        let refused = op("b", acquire("2"), 500..510, held("a"));
        good(super::check, [asked.clone(), slow(1000), refused.clone()]);
        bad(super::check, [asked, slow(999), refused]);
    }

    #[test]
    fn a_refused_acquire_may_have_held_it_while_something_was_at_fault() {
        let asked = op("a", acquire("1"), 100..200, held("c"));
        let refused = op("b", acquire("2"), 110..150, held("a"));
        let holder = op("c", acquire("3"), 0..5, lock(5));
        let ops = [holder, refused, asked];
        good_with(super::check, [forgotten(0..100)], ops.clone());
        good_with(super::check, [fault(200..300)], ops.clone());
        bad_with(super::check, [fault(201..300)], ops);
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
