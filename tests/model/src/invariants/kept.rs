//! No grant is lost while its holder renews in time: while a lease certainly
//! lives,
//!
//! - Renew, Release and KeepAlive with its owner and token do not hear that it is
//!   lost;
//! - Get shows it, and a refused Acquire names its owner.
//!
//! Get and a refusal read without a lock, and may be older than a renewal that
//! is just being committed: they are held only to what was answered before they
//! were sent. A Release of the client library may be its own second request, and
//! is not judged.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome, Via},
    leases::{Facts, Lease, Resource},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let found = if op.lost() {
            lost(facts, resource, op)
        } else {
            hidden(facts, resource, op)
        };
        if let Some(lease) = found {
            let what = format!(
                "{} of {} lives until {} at least, and is not there",
                lease.token, lease.owner, lease.until
            );
            let proof = lease.answers.first().copied();
            let ops: Vec<_> = proof.into_iter().chain([op]).collect();
            violations.push(Violation::new(what, &ops));
        }
    }
    violations
}

/// The lease that a call was told is lost, and that lives.
fn lost<'a>(facts: &Facts<'_>, resource: &'a Resource<'a>, op: &Op) -> Option<&'a Lease<'a>> {
    let lease = resource.leases.get(&op.call.token()?)?;
    let judged = op.via != Via::Library || !matches!(op.call, Call::Release { .. });
    let lives = lease.owner == op.owner
        && lease.told <= op.sent
        && op.answered < lease.until_but_for(facts.history, op);
    (judged && lives).then_some(lease)
}

/// The lease that lives, and that a look does not show.
fn hidden<'a>(facts: &Facts<'_>, resource: &'a Resource<'a>, op: &Op) -> Option<&'a Lease<'a>> {
    let lease = resource.certain_during(op)?;
    let shows = match (&op.call, &op.outcome) {
        (Call::Get, Outcome::Lock(shown)) => shown.token == lease.token,
        (Call::Get, Outcome::No(_)) => false,
        (Call::Acquire { .. }, Outcome::Held { owner, .. }) => owner == lease.owner,
        _ => return None,
    };
    let known = op.answered < lease.until_as_known(facts.history, op.sent);
    (!shows && known).then_some(lease)
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::Call::Get;

    fn after(at: u64, op_: crate::history::Op) -> [crate::history::Op; 2] {
        [op("a", acquire("1"), at..at + 10, lock(5)), op_]
    }

    #[test]
    fn a_lease_that_is_there_is_good() {
        good(super::check, after(0, op("a", renew(5), 20..30, lock(5))));
        good(super::check, after(0, op("", Get, 20..30, shown("a", 5))));
        good(
            super::check,
            after(0, op("b", acquire("2"), 20..30, held("a"))),
        );
    }

    #[test]
    fn a_lease_that_may_be_over_is_good() {
        good(
            super::check,
            after(0, op("a", renew(5), 990..1000, no("LOCK_EXPIRED"))),
        );
        good(
            super::check,
            after(0, op("", Get, 990..1000, no("LOCK_NOT_FOUND"))),
        );
    }

    #[test]
    fn a_lease_that_is_not_there_is_bad() {
        bad(
            super::check,
            after(0, op("a", renew(5), 20..999, no("LOCK_EXPIRED"))),
        );
        bad(
            super::check,
            after(0, op("a", release(5), 20..999, no("NOT_OWNER"))),
        );
        bad(
            super::check,
            after(0, op("a", keep_alive(5), 20..999, no("LOCK_NOT_FOUND"))),
        );
        bad(
            super::check,
            after(0, op("", Get, 20..999, no("LOCK_NOT_FOUND"))),
        );
        bad(super::check, after(0, op("", Get, 20..999, shown("b", 4))));
        bad(
            super::check,
            after(0, op("b", acquire("2"), 20..999, held("c"))),
        );
    }

    #[test]
    fn a_call_of_somebody_else_says_nothing_of_it() {
        good(
            super::check,
            after(0, op("b", renew(5), 20..30, no("NOT_OWNER"))),
        );
        good(
            super::check,
            after(0, op("a", renew(4), 20..30, no("TOKEN_SUPERSEDED"))),
        );
    }

    #[test]
    fn a_release_ends_it_also_when_its_answer_was_lost() {
        good(
            super::check,
            [
                op("a", acquire("1"), 0..10, lock(5)),
                op("a", release(5), 20..30, unknown()),
                op("a", release(5), 40..50, no("LOCK_NOT_FOUND")),
                op("", Get, 60..70, no("LOCK_NOT_FOUND")),
            ],
        );
        good(
            super::check,
            after(
                0,
                by_library(op("a", release(5), 20..30, no("LOCK_NOT_FOUND"))),
            ),
        );
    }

    #[test]
    fn a_look_is_held_to_what_was_answered_before_it() {
        let renewed = |answered| op("a", renew(5), 900..answered, lock(5));
        let look = op("", Get, 1050..1060, no("LOCK_NOT_FOUND"));
        let granted = op("a", acquire("1"), 0..10, lock(5));
        good(super::check, [granted.clone(), renewed(1055), look.clone()]);
        bad(super::check, [granted, renewed(910), look]);
    }
}
