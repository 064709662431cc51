//! An older token never succeeds: no Renew, Release or KeepAlive of a lease is
//! done once a newer grant has been shown to anybody.
//!
//! Not counted: newer grants that a failover may have forgotten, since then the
//! older lease may be back. A word of a stream that opened earlier counts as of
//! one `slack` before it arrived, and, during a fault, as of when it opened.

use super::Violation;
use crate::{
    history::{Call, Op, Time},
    leases::Facts,
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let Some(token) = op.call.token() else {
            continue;
        };
        if !(op.call.needs_live_lease() && op.succeeded()) {
            continue;
        }
        let newest = resource.newest_before(done_after(facts, op), true);
        if let Some(newer) = newest.filter(|op| op.shown().is_some_and(|shown| shown.token > token))
        {
            let what = format!(
                "{} of {token} succeeded after a newer token was shown",
                op.call.kind()
            );
            violations.push(Violation::new(what, &[newer, op]));
        }
    }
    violations
}

/// The earliest moment at which a call can have taken effect.
fn done_after(facts: &Facts<'_>, op: &Op) -> Time {
    match op.call {
        Call::KeepAlive { .. } if !facts.history.faulty(op.sent, op.answered) => {
            op.sent.max(op.answered.minus(facts.history.limits.slack))
        }
        _ => op.sent,
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;

    #[test]
    fn success_before_or_while_a_newer_lease_begins_is_good() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", renew(5), 20..30, lock(5)),
                op("a", release(5), 40..50, done()),
                op("b", acquire("2"), 45..55, lock(6)),
                op("a", renew(5), 60..70, no("NOT_OWNER")),
            ],
        );
    }

    #[test]
    fn success_after_it_is_bad() {
        let newer = op("a", acquire("2"), 20..30, lock(6));
        for (call, outcome) in [(renew(5), lock(5)), (release(5), done())] {
            bad(
                super::check,
                [newer.clone(), op("a", call, 40..50, outcome)],
            );
        }
        // Of a stream.
        bad(
            super::check,
            [newer.clone(), op("a", keep_alive(5), 0..531, lock(5))],
        );
        good(
            super::check,
            [newer.clone(), op("a", keep_alive(5), 0..530, lock(5))],
        );
        good_with(
            super::check,
            [fault(0..500)],
            [newer, op("a", keep_alive(5), 0..531, lock(5))],
        );
    }

    #[test]
    fn a_newer_lease_may_have_been_forgotten() {
        good_with(
            super::check,
            [forgotten(15..100)],
            [
                op("b", acquire("2"), 20..30, lock(6)),
                op("a", renew(5), 200..210, lock(5)),
            ],
        );
    }
}
