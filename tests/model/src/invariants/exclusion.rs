//! At most one live lease per resource: no two leases certainly lived at the
//! same moment.
//!
//! A holder counts its deadline from just before it sent, so no slack is needed
//! for the way of its answer. Clocks that run at different speeds would need
//! some; here the server's, the database's and ours are one machine's.

use super::Violation;
use crate::{
    history::Op,
    leases::{Facts, Lease},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for resource in facts.resources.values() {
        let mut longest: Option<&Lease<'_>> = None;
        for lease in resource.certain() {
            if let Some(before) = longest.filter(|before| lease.told < before.until) {
                let what = format!(
                    "{} holds {} until {} at least, {} holds {} from {} on",
                    before.owner, before.token, before.until, lease.owner, lease.token, lease.told
                );
                let ops: Vec<_> = longest_answer(before)
                    .into_iter()
                    .chain(lease.answers.first().copied())
                    .collect();
                violations.push(Violation::new(what, &ops));
            }
            if longest.is_none_or(|before| before.until < lease.until) {
                longest = Some(lease);
            }
        }
    }
    violations
}

/// The answer that proves the most.
fn longest_answer<'a>(lease: &Lease<'a>) -> Option<&'a Op> {
    let until = |op: &&Op| op.shown().map(|shown| op.sent.plus(shown.remaining));
    lease.answers.iter().copied().max_by_key(until)
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;

    #[test]
    fn one_after_the_other_is_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 500..1000, lock(6)),
            ],
        );
    }

    #[test]
    fn a_release_in_flight_ends_what_is_certain() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", release(5), 100..900, unknown()),
                op("b", acquire("2"), 101..110, lock(6)),
            ],
        );
    }

    #[test]
    fn an_acquire_of_the_same_owner_ends_its_lease() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", acquire("2"), 100..200, unknown()),
                op("a", release(6), 210..220, done()),
                op("b", acquire("3"), 250..260, lock(7)),
            ],
        );
    }

    #[test]
    fn an_acquire_that_was_refused_ends_nothing() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", acquire("2"), 100..110, no("REQUEST_SPENT")),
                op("b", acquire("3"), 250..260, lock(6)),
            ],
        );
    }

    #[test]
    fn a_late_acquire_of_the_same_owner_may_still_be_under_way() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..5, unknown()),
                op("a", acquire("2"), 10..20, lock(5)),
                op("b", acquire("3"), 250..260, lock(7)),
            ],
        );
    }

    #[test]
    fn two_at_once_are_bad() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 500..999, lock(6)),
            ],
        );
    }

    #[test]
    fn a_renewal_makes_a_lease_longer() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", renew(5), 900..910, lock(5)),
                op("b", acquire("2"), 1000..1899, lock(6)),
            ],
        );
    }

    #[test]
    fn a_release_of_an_older_token_ends_nothing() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", release(4), 20..30, done()),
                op("b", acquire("2"), 40..50, lock(6)),
            ],
        );
    }

    #[test]
    fn a_failover_may_forget() {
        let two = [
            op("a", acquire("1"), 100..110, lock(5)),
            op("b", acquire("2"), 400..410, lock(6)),
        ];
        good_with(super::check, [forgotten(50..300)], two.clone());
        // Granted well before, or all after.
        bad_with(super::check, [forgotten(150..300)], two.clone());
        bad_with(super::check, [forgotten(0..50)], two.clone());
        // Any other fault is no excuse.
        bad_with(super::check, [fault(0..300)], two);
    }

    #[test]
    fn a_renewal_may_be_forgotten_alone() {
        good_with(
            super::check,
            [forgotten(400..1200)],
            [
                op("a", acquire("1"), 100..110, lock(5)),
                op("a", renew(5), 500..510, lock(5)),
                op("b", acquire("2"), 1300..1310, lock(6)),
            ],
        );
    }

    #[test]
    fn a_clock_that_is_set_ahead_ends_leases() {
        let two = [
            op("a", acquire("1"), 0..10, lock(5)),
            op("b", acquire("2"), 500..510, lock(6)),
        ];
        good_with(super::check, [stepped(300..310, 5000)], two.clone());
        // Between the grant and its answer.
        good_with(super::check, [stepped(5..6, 5000)], two.clone());
        bad_with(super::check, [stepped(300..310, -5000)], two);
    }
}
