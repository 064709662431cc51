//! The reason of a loss is true. Who was told of a lease, and hears that it is lost,
//!
//! - by `NOT_OWNER`: another owner could hold the lock;
//! - by `TOKEN_SUPERSEDED`: the same owner may have been granted a newer token;
//! - by `LOCK_EXPIRED`: it had not been released, and no newer token been shown;
//! - by `LOCK_NOT_FOUND`, of Renew or KeepAlive: it may have been released, or another lease
//!   have come after it. A lease that has merely run out keeps its row.
//!
//! A failover may forget all of these.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome},
    leases::{Facts, Lease, Resource},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let wrong = |(resource, op): (&Resource<'_>, &Op)| {
        let Outcome::No(reason) = &op.outcome else {
            return None;
        };
        let lease = resource.leases.get(&op.call.token()?)?;
        let judged = op.lost() && lease.owner == op.owner && lease.told <= op.sent;
        if !judged || facts.history.forgotten(lease.asked, op.answered) {
            return None;
        }
        let is_true = match (reason.as_str(), &op.call) {
            ("NOT_OWNER", _) => other_grant(resource, lease, op, |by| by.owner != op.owner),
            ("TOKEN_SUPERSEDED", _) => other_grant(resource, lease, op, |by| by.owner == op.owner),
            ("LOCK_EXPIRED", _) => !is_replaced(resource, lease, op),
            ("LOCK_NOT_FOUND", Call::Renew { .. } | Call::KeepAlive { .. }) => {
                may_be_released(resource, lease, op) || other_grant(resource, lease, op, |_| true)
            }
            _ => true,
        };
        let what = format!("{reason} of {} is not true", lease.token);
        (!is_true).then(|| Violation::new(what, &[lease.answers[0], op]))
    };
    facts.ops().filter_map(wrong).collect()
}

/// Whether a later lease, of such a call, may have been granted before the answer.
fn other_grant(
    resource: &Resource<'_>,
    lease: &Lease<'_>,
    op: &Op,
    by: impl Fn(&Op) -> bool,
) -> bool {
    let may_be = |other: &&Op| {
        matches!(other.call, Call::Acquire { .. })
            && other.sent <= op.answered
            && by(other)
            && (other.is_unknown()
                || other.may_be_several()
                || other.shown().is_some_and(|shown| shown.token > lease.token))
    };
    // Most likely shortly before.
    let (before, after) = resource.ops.split_at(
        resource
            .ops
            .partition_point(|other| other.answered <= op.answered),
    );
    before.iter().rev().chain(after).any(may_be)
}

/// Whether it had certainly been released, or made room for a newer one.
fn is_replaced(resource: &Resource<'_>, lease: &Lease<'_>, op: &Op) -> bool {
    let newest = resource.newest_before(op.sent, true);
    let newer = newest.and_then(|op| op.shown());
    let released =
        |other: &&Op| releases(lease, other) && other.succeeded() && other.answered < op.sent;
    newer.is_some_and(|newer| newer.token > lease.token)
        || resource.calls_of(lease.owner).iter().any(released)
}

fn may_be_released(resource: &Resource<'_>, lease: &Lease<'_>, op: &Op) -> bool {
    let mut own = resource.calls_of(lease.owner).iter();
    own.any(|other| releases(lease, other) && other.sent <= op.answered)
}

fn releases(lease: &Lease<'_>, op: &Op) -> bool {
    matches!(op.call, Call::Release { token } if token == lease.token)
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::Op;

    fn granted() -> Op {
        op("a", acquire("1"), 0..10, lock(5))
    }

    fn told(reason: &str) -> Op {
        op("a", renew(5), 1100..1110, no(reason))
    }

    #[test]
    fn a_lease_that_ran_out_has_expired() {
        good(super::check, [granted(), told("LOCK_EXPIRED")]);
        for reason in ["LOCK_NOT_FOUND", "NOT_OWNER", "TOKEN_SUPERSEDED"] {
            bad(super::check, [granted(), told(reason)]);
        }
        // Release says of it what it says of all that is free.
        let released = op("a", release(5), 1100..1110, no("LOCK_NOT_FOUND"));
        good(super::check, [granted(), released]);
    }

    #[test]
    fn a_lease_that_was_released_is_not_found() {
        let released = || op("a", release(5), 20..30, done());
        good(
            super::check,
            [granted(), released(), told("LOCK_NOT_FOUND")],
        );
        bad(super::check, [granted(), released(), told("LOCK_EXPIRED")]);
        let maybe = || op("a", release(5), 20..30, unknown());
        good(super::check, [granted(), maybe(), told("LOCK_NOT_FOUND")]);
        good(super::check, [granted(), maybe(), told("LOCK_EXPIRED")]);
    }

    #[test]
    fn a_lease_that_made_room_is_not_the_owners_or_superseded() {
        let taken = || op("b", acquire("2"), 1050..1060, lock(6));
        good(super::check, [granted(), taken(), told("NOT_OWNER")]);
        good(super::check, [granted(), taken(), told("LOCK_NOT_FOUND")]);
        bad(super::check, [granted(), taken(), told("LOCK_EXPIRED")]);
        bad(super::check, [granted(), taken(), told("TOKEN_SUPERSEDED")]);
        let again = || op("a", acquire("2"), 1050..1060, lock(6));
        good(super::check, [granted(), again(), told("TOKEN_SUPERSEDED")]);
        bad(super::check, [granted(), again(), told("NOT_OWNER")]);
        // Nobody knows.
        let lost = op("b", acquire("2"), 1050..1060, unknown());
        good(super::check, [granted(), lost, told("NOT_OWNER")]);
        // It came later.
        let later = op("b", acquire("2"), 1111..1120, lock(6));
        bad(super::check, [granted(), later, told("NOT_OWNER")]);
    }

    #[test]
    fn a_failover_may_forget_what_came_between() {
        good_with(
            super::check,
            [forgotten(20..30)],
            [granted(), told("LOCK_NOT_FOUND")],
        );
    }
}
