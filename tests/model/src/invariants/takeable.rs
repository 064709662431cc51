//! Released and expired leases are takeable: no Acquire is refused in the name of
//! an owner whose leases were all over when it was sent: at once after a Release, one
//! `slack` after their time.
//!
//! What an owner may have had is counted with every call of it whose answer was
//! lost. So a grant that nobody was told of blocks its name for one TTL after the
//! call has settled, and not longer.

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
        let Outcome::Held { owner, .. } = &op.outcome else {
            continue;
        };
        if let Could::NoMore(over) = resource.could_hold(owner, op)
            && over < op.sent
        {
            let what = format!("refused because of {owner}, whose leases were all over at {over}");
            let last = resource.calls_of(owner).last().copied();
            let ops: Vec<_> = last.into_iter().chain([op]).collect();
            violations.push(Violation::new(what, &ops));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;

    #[test]
    fn a_refusal_while_the_holder_may_hold_is_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 1509..1600, held("a")),
            ],
        );
    }

    #[test]
    fn an_expired_lease_is_takeable() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 1511..1600, held("a")),
            ],
        );
    }

    #[test]
    fn a_renewal_without_an_answer_may_have_been_done() {
        let renewed = op("a", renew(5), 100..200, unknown());
        let refused = |at| op("b", acquire("2"), at..at + 1, held("a"));
        let granted = op("a", acquire("1"), 0..10, lock(5));
        good(
            super::check,
            [granted.clone(), renewed.clone(), refused(7700)],
        );
        bad(super::check, [granted, renewed, refused(7701)]);
    }

    #[test]
    fn a_released_lease_is_takeable_unless_a_failover_forgot_the_release() {
        let three = [
            op("a", acquire("1"), 0..10, lock(5)),
            op("a", release(5), 100..110, done()),
            op("b", acquire("2"), 111..120, held("a")),
        ];
        bad(super::check, three.clone());
        good_with(super::check, [forgotten(50..200)], three);
    }

    #[test]
    fn a_lost_grant_blocks_for_one_ttl() {
        let lost = op("a", acquire("1"), 0..10, unknown());
        let refused = |at| op("b", acquire("2"), at..at + 1, held("a"));
        good(super::check, [lost.clone(), refused(7510)]);
        bad(super::check, [lost.clone(), refused(7511)]);
        // A fault keeps it under way.
        good_with(super::check, [fault(5000..9000)], [lost, refused(16_500)]);
    }

    #[test]
    fn a_clock_that_is_set_back_makes_it_longer() {
        good_with(
            super::check,
            [stepped(500..500, -5000)],
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 6500..6600, held("a")),
            ],
        );
    }
}
