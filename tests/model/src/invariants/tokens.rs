//! Tokens rise in real time: a grant that was asked for after a token was shown
//! to anybody has a larger one. Two acquisitions never share a token. No fault relaxes
//! these two: not a crash, a failover, a restore or a clock.
//!
//! A failover may bring an ended lease back, though, and the answer to its request once
//! more is then that lease, which is no new grant: it may be older than a token that the
//! same failover forgot, when the request was first sent before that token was shown.
//!
//! And tokens rise in the order of the leases: a lease that certainly lives after
//! another was granted was granted later, and has a larger token. Here a grant that a
//! failover may have forgotten does not count.

use super::Violation;
use crate::{
    history::Op,
    leases::{Facts, Lease, Resource},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let Some(granted) = op.granted() else {
            continue;
        };
        let is_replay = |before: &Op| is_replay(resource, op, before);
        let newest = resource.newest_before(op.sent, false);
        let newest = newest.filter(|before| !is_replay(before));
        let Some(before) = newest.or_else(|| resource.newest_before(op.sent, true)) else {
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
        violations.extend(
            resource
                .certain()
                .filter_map(|lease| passed(resource, lease)),
        );
    }
    violations
}

/// Whether the request of this grant was sent once before a token was shown.
fn is_replay(resource: &Resource<'_>, grant: &Op, shown: &Op) -> bool {
    let mut own = resource.calls_of(&grant.owner).iter();
    let id = grant.request().map_or("", |(_, id)| id);
    !id.is_empty() && own.any(|op| op.request() == grant.request() && op.sent <= shown.answered)
}

/// A lease that lives after one with a larger token was granted.
fn passed(resource: &Resource<'_>, lease: &Lease<'_>) -> Option<Violation> {
    let before = resource.newest_told_before(lease.until)?;
    (before.token > lease.token).then(|| {
        let what = format!(
            "{} lives until {}, and {} was granted before that",
            lease.token, lease.until, before.token
        );
        Violation::new(what, &[before.answers[0], lease.answers[0]])
    })
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
                op("b", acquire("2"), 5..20, lock(5)),
                op("b", release(5), 21..25, done()),
                op("a", acquire("1"), 0..30, lock(7)),
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
    fn a_failover_may_bring_back_the_lease_of_a_request() {
        let replayed = |id| {
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", release(5), 20..30, done()),
                op("b", acquire("2"), 40..50, lock(7)),
                op("a", acquire(id), 60..70, lock(5)),
            ]
        };
        good_with(super::check, [forgotten(15..55)], replayed("1"));
        // Nothing forgot the newer one, it is another request, or was never sent before.
        bad(super::check, replayed("1"));
        bad_with(super::check, [forgotten(15..35)], replayed("1"));
        bad_with(super::check, [forgotten(15..55)], replayed("3"));
        let [_, _, newer, first] = replayed("1");
        bad_with(super::check, [forgotten(15..55)], [newer, first]);
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
    fn a_later_lease_has_the_larger_token() {
        let two = [
            op("b", acquire("2"), 5..50, lock(7)),
            op("b", release(7), 60..70, done()),
            op("a", acquire("1"), 0..100, lock(5)),
        ];
        bad(super::check, two.clone());
        good_with(super::check, [forgotten(10..55)], two);
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
