//! Tokens rise in real time: a grant that was asked for after a token was shown
//! to anybody has a larger one, unless it is the answer to the same request once
//! more. And two acquisitions never share a token.
//!
//! No fault relaxes this: not a crash, a failover, a restore or a clock.

use super::Violation;
use crate::{
    history::Op,
    leases::{Facts, Lease},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let Some(granted) = op.granted() else {
            continue;
        };
        let Some(before) = resource.newest_before(op.sent, false) else {
            continue;
        };
        let known = before.shown().map_or(0, |shown| shown.token);
        if granted.token < known {
            let what = format!("{} was granted after {known} had been shown", granted.token);
            violations.push(Violation::new(what, &[before, op]));
        }
    }
    for resource in facts.resources.values() {
        violations.extend(resource.leases.values().filter_map(shared));
    }
    violations
}

/// Two grants of one token that do not belong to one request.
fn shared(lease: &Lease<'_>) -> Option<Violation> {
    let mut grants = lease.answers.iter().filter(|op| op.granted().is_some());
    let first: &Op = grants.next()?;
    let is_replay = |op: &Op| {
        op.request() == first.request() && op.request().is_some_and(|(_, id)| !id.is_empty())
    };
    let other = grants.find(|op| !is_replay(op))?;
    let what = format!("{} was granted twice", lease.token);
    Some(Violation::new(what, &[first, other]))
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;

    #[test]
    fn tokens_that_rise_are_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("b", acquire("2"), 2000..2010, lock(7)),
            ],
        );
    }

    #[test]
    fn calls_that_overlap_may_be_granted_in_either_order() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(7)),
                op("b", acquire("2"), 5..20, lock(5)),
            ],
        );
    }

    #[test]
    fn a_replay_has_its_own_token() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", acquire("1"), 20..30, lock(5)),
            ],
        );
    }

    #[test]
    fn a_token_that_falls_is_bad_whatever_happened() {
        let two = [
            op("a", acquire("1"), 0..10, lock(7)),
            op("b", acquire("2"), 11..20, lock(5)),
        ];
        bad(super::check, two.clone());
        bad_with(
            super::check,
            [forgotten(0..1000), stepped(0..1, -9000)],
            two,
        );
    }

    #[test]
    fn a_token_that_was_shown_to_anybody_counts() {
        bad(
            super::check,
            [
                op("", crate::history::Call::Get, 0..10, shown("x", 7)),
                op("b", acquire("2"), 11..20, lock(6)),
            ],
        );
    }

    #[test]
    fn a_token_that_comes_again_is_bad() {
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(7)),
                op("b", acquire("2"), 11..20, lock(7)),
            ],
        );
        // Also without order.
        bad(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(7)),
                op("b", acquire("2"), 0..10, lock(7)),
            ],
        );
        bad(
            super::check,
            [
                op("a", acquire(""), 0..10, lock(7)),
                op("a", acquire(""), 11..20, lock(7)),
            ],
        );
    }
}
