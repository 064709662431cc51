//! The same request is the same acquisition: an Acquire with the owner and the
//! request id of a lease
//!
//! - is answered with that lease while it certainly lives, or with
//!   `REQUEST_SPENT` when it may have been renewed;
//! - is never granted after it was renewed or has ended, unless another
//!   acquisition may have come between: only a resource's latest is remembered.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome, Via},
    leases::{Facts, Lease, Resource},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for resource in facts.resources.values() {
        for lease in resource.leases.values() {
            let Some(id) = lease.request_id.filter(|id| !id.is_empty()) else {
                continue;
            };
            let calls = resource.calls_of(lease.owner).iter();
            let again = calls
                .filter(|op| op.via != Via::Library && op.request() == Some((lease.owner, id)));
            for op in again.filter(|op| lease.told <= op.sent) {
                let what = if op.answered < lease.until && !fits(resource, lease, op) {
                    format!(
                        "a retry of the request that was granted {}, which lives",
                        lease.token
                    )
                } else if op.granted().is_some() && spent(facts, resource, lease, op) {
                    format!(
                        "a retry of the request that was granted {}, which is spent",
                        lease.token
                    )
                } else {
                    continue;
                };
                violations.push(Violation::new(what, &[lease.answers[0], op]));
            }
        }
    }
    violations
}

/// Whether this is an answer to a retry while the lease lives.
fn fits(resource: &Resource<'_>, lease: &Lease<'_>, op: &Op) -> bool {
    let maybe_renewed = resource
        .calls_of(lease.owner)
        .iter()
        .any(|other| lease.may_renew(other) && other.sent <= op.answered);
    match &op.outcome {
        Outcome::Lock(shown) => shown.token == lease.token,
        Outcome::Held { .. } => false,
        Outcome::No(reason) => reason == "REQUEST_SPENT" && maybe_renewed,
        Outcome::Done | Outcome::Unknown(_) => true,
    }
}

/// Whether the request of a lease was spent, and remembered, when a retry was sent.
fn spent(facts: &Facts<'_>, resource: &Resource<'_>, lease: &Lease<'_>, op: &Op) -> bool {
    let own = resource.calls_of(lease.owner);
    let renewed = own
        .iter()
        .any(|other| lease.may_renew(other) && other.succeeded() && other.answered < op.sent);
    let remembered = !resource.ops.iter().any(|other| {
        let may_grant = match other.outcome {
            // While the lease lived, nothing of it can have been granted.
            Outcome::Held { .. } | Outcome::No(_) => {
                other.via == Via::Library && other.answered > lease.until
            }
            _ => true,
        };
        let after = other.is_unknown() || other.answered >= lease.asked;
        let is_acquire = matches!(other.call, Call::Acquire { .. });
        is_acquire
            && other.request() != op.request()
            && may_grant
            && after
            && other.sent <= op.answered
    });
    (renewed || lease.over < op.sent)
        && remembered
        && !facts.history.forgotten(lease.told, op.answered)
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::Op;

    fn granted() -> Op {
        op("a", acquire("1"), 0..10, lock(5))
    }

    #[test]
    fn a_retry_gets_the_same_lease() {
        good(
            super::check,
            [granted(), op("a", acquire("1"), 20..30, lock(5))],
        );
        bad(
            super::check,
            [granted(), op("a", acquire("1"), 20..30, lock(6))],
        );
        bad(
            super::check,
            [granted(), op("a", acquire("1"), 20..30, held("b"))],
        );
        bad(
            super::check,
            [
                granted(),
                op("a", acquire("1"), 20..30, no("REQUEST_SPENT")),
            ],
        );
        good(
            super::check,
            [
                granted(),
                op("a", acquire("1"), 990..1010, no("REQUEST_SPENT")),
            ],
        );
    }

    #[test]
    fn a_request_whose_lease_was_renewed_is_spent() {
        let renewed = || op("a", renew(5), 20..30, lock(5));
        good(
            super::check,
            [
                granted(),
                renewed(),
                op("a", acquire("1"), 40..50, no("REQUEST_SPENT")),
            ],
        );
        bad(
            super::check,
            [granted(), renewed(), op("a", acquire("1"), 40..50, lock(5))],
        );
    }

    #[test]
    fn a_request_whose_lease_has_ended_is_spent() {
        let released = || op("a", release(5), 20..30, done());
        let again = |outcome| op("a", acquire("1"), 540..550, outcome);
        good(
            super::check,
            [granted(), released(), again(no("REQUEST_SPENT"))],
        );
        bad(super::check, [granted(), released(), again(lock(6))]);
        bad(
            super::check,
            [granted(), op("a", acquire("1"), 1600..1610, lock(6))],
        );
        // Forgotten, by another acquisition.
        good(
            super::check,
            [
                granted(),
                released(),
                op("b", acquire("2"), 40..50, lock(6)),
                op("a", acquire("1"), 2000..2010, lock(7)),
            ],
        );
        good(
            super::check,
            [
                granted(),
                released(),
                op("b", acquire("2"), 40..50, held("c")),
                op("b", acquire("3"), 50..60, unknown()),
                again(lock(7)),
            ],
        );
    }
}
