//! Get never shows a lease that had certainly ended: at once after its Release or after
//! a newer token was shown to anybody, one `slack` after its time. Nor one that its owner
//! had not asked for.

use super::Violation;
use crate::{
    history::Call,
    leases::{Could, Facts},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let (Call::Get, Some(shown)) = (&op.call, op.shown()) else {
            continue;
        };
        let lease = &resource.leases[&shown.token];
        let over = match resource.could_hold(&shown.owner, op) {
            Could::NotYet => {
                violations.push(Violation::new("nobody had asked for this lease", &[op]));
                continue;
            }
            Could::NoMore(over) => over.min(lease.over),
            Could::Hold => lease.over,
        };
        if over < op.sent {
            let what = format!("{} of {} was over at {over}", lease.token, lease.owner);
            violations.push(Violation::new(what, &[lease.answers[0], op]));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::Call::Get;

    #[test]
    fn a_lease_that_may_live_is_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("", Get, 1509..1515, shown("a", 5)),
            ],
        );
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, unknown()),
                op("", Get, 20..30, shown("a", 5)),
            ],
        );
    }

    #[test]
    fn a_lease_that_has_ended_is_bad() {
        let granted = op("a", acquire("1"), 0..10, lock(5));
        bad(
            super::check,
            [granted.clone(), op("", Get, 1511..1515, shown("a", 5))],
        );
        bad(
            super::check,
            [
                granted.clone(),
                op("a", release(5), 20..30, done()),
                op("", Get, 31..40, shown("a", 5)),
            ],
        );
        bad(
            super::check,
            [
                granted,
                op("a", acquire("2"), 20..30, lock(6)),
                op("", Get, 31..40, shown("a", 5)),
            ],
        );
    }

    #[test]
    fn a_token_that_goes_back_is_bad() {
        let (first, second) = (
            op("a", acquire("1"), 0..100, lock(5)),
            op("a", acquire("2"), 0..100, lock(6)),
        );
        let look = |at, token| op("", Get, at..at + 5, shown("a", token));
        let back = [first.clone(), second.clone(), look(20, 6), look(26, 5)];
        bad(super::check, back.clone());
        good_with(super::check, [forgotten(15..22)], back);
        good(super::check, [first, second, look(20, 6), look(24, 5)]);
    }

    #[test]
    fn a_clock_that_is_set_back_revives_what_had_expired() {
        let three = [
            op("a", acquire("1"), 0..10, lock(5)),
            op("a", renew(5), 1020..1030, no("LOCK_EXPIRED")),
            op("", Get, 1050..1060, shown("a", 5)),
        ];
        bad(super::check, three.clone());
        good_with(super::check, [stepped(1040..1041, -500)], three);
    }

    #[test]
    fn a_lease_that_nobody_asked_for_is_bad() {
        bad(super::check, [op("", Get, 0..10, shown("a", 5))]);
    }
}
