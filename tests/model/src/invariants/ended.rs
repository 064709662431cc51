//! A lease that has ended does not come back. So
//!
//! - no call of it succeeds after its Release, or after a call that heard that it
//!   is lost, nor one `slack` after all its time was up;
//! - when Get says that the resource is free, nothing that was sent later finds
//!   the lease alive; and nothing that was under way, when all its time was up
//!   one `slack` before (a renewal that was judged in time may just be being
//!   committed, and Get does not wait for that);
//! - a renewal lands, by the database's own clock, before the old end of the
//!   lease: `expires_at - ttl` of the answer is the moment of the judgement.
//!
//! A failover may bring leases back, a clock that is set back those that were over by
//! time alone, and a fault may make a commit slow.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome, Time, Via},
    leases::{Facts, Lease, Resource},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (resource, op) in facts.ops() {
        let found = match op.call {
            Call::Get if matches!(op.outcome, Outcome::No(_)) => {
                back_after_a_look(facts, resource, op)
            }
            _ if op.call.needs_live_lease() && op.succeeded() && !may_be_without(facts, op) => {
                revived(facts, resource, op)
            }
            _ => None,
        };
        violations.extend(found);
    }
    violations
}

/// Whether a success may say nothing of the lease: the library takes a Release for done that
/// finds no lease after a try whose answer was lost.
fn may_be_without(facts: &Facts<'_>, op: &Op) -> bool {
    let by_library = op.via == Via::Library && matches!(op.call, Call::Release { .. });
    by_library && facts.history.faulty(op.sent, op.answered)
}

/// A success after the end.
fn revived(facts: &Facts<'_>, resource: &Resource<'_>, op: &Op) -> Option<Violation> {
    let lease = resource.leases.get(&op.call.token()?)?;
    let ends = |end: &&&Op| {
        let released = matches!(end.call, Call::Release { .. }) && end.succeeded();
        end.call.token() == op.call.token()
            && (end.lost() || released)
            && end.answered < op.sent
            && !facts.history.forgotten(end.sent, op.answered)
            && !facts.history.revives(end, op.answered)
    };
    if let Some(end) = resource.calls_of(lease.owner).iter().find(ends) {
        let what = format!("{} had ended, and {} succeeds", lease.token, op.call.kind());
        return Some(Violation::new(what, &[end, op]));
    }
    // By the database's own clock alone, so no fault excuses it.
    if let Some(late) = landed_late(resource, lease, op) {
        return Some(late);
    }
    let others = lease
        .answers
        .iter()
        .filter(|other| !std::ptr::eq(**other, op));
    let time_up = time_up(facts, resource, lease, others.copied(), op)?;
    if time_up.plus(facts.history.limits.slack) < op.sent {
        let what = format!(
            "the time of {} was up at {time_up}, and {} succeeds",
            lease.token,
            op.call.kind()
        );
        return Some(Violation::new(what, &[lease.answers[0], op]));
    }
    None
}

/// Get says free, and the lease is alive later.
fn back_after_a_look(facts: &Facts<'_>, resource: &Resource<'_>, look: &Op) -> Option<Violation> {
    let history = facts.history;
    let lease = resource.told_last(look.sent)?;
    let proves = |op: &&&Op| {
        op.answered > look.answered
            && !history.forgotten(lease.told, op.answered)
            && !history.revives(look, op.answered)
            && (op.shown().is_some_and(|shown| shown.token == lease.token)
                || (op.call == Call::Release { token: lease.token } && op.succeeded()))
    };
    // Get asks in nobody's name; replays and renewals in the owner's.
    let later = resource.calls_of(lease.owner).iter().filter(proves);
    let later = later.min_by_key(|op| op.sent)?;
    let meanwhile =
        |op: &Op| op.sent <= look.answered && (op.is_unknown() || op.answered >= look.sent);
    let under_way = later.sent <= look.answered
        || resource
            .calls_of(lease.owner)
            .iter()
            .any(|op| lease.may_renew(op) && meanwhile(op));
    if under_way {
        let before = lease
            .answers
            .iter()
            .filter(|op| op.answered <= look.answered);
        let up = time_up(facts, resource, lease, before.copied(), look)?;
        if up.plus(history.limits.slack) >= look.sent || history.faulty(lease.asked, later.answered)
        {
            return None;
        }
    }
    let what = format!(
        "the resource was free, and {} of {} lives later",
        lease.token, lease.owner
    );
    Some(Violation::new(what, &[lease.answers[0], look, later]))
}

/// When all the time was up that these answers, and the calls without an answer,
/// gave a lease before `op`.
fn time_up<'a>(
    facts: &Facts<'_>,
    resource: &Resource<'_>,
    lease: &Lease<'_>,
    answers: impl Iterator<Item = &'a Op>,
    op: &Op,
) -> Option<Time> {
    let by_library = |op: &Op| op.via == Via::Library;
    let open = resource
        .calls_of(lease.owner)
        .iter()
        .any(|other| (other.is_unknown() || by_library(other)) && other.sent <= op.answered);
    let moved = answers.filter(|other| other.call != Call::Get && other.sent <= op.answered);
    let up = moved
        .filter_map(|other| Some(other.answered.plus(other.shown()?.ttl)))
        .max();
    let stepped = facts.history.faulty(lease.asked, op.answered);
    up.filter(|_| !open && !stepped)
}

/// A renewal that landed after the end, by the database's clock, when no other was
/// under way. A call of the library may be several.
fn landed_late(resource: &Resource<'_>, lease: &Lease<'_>, op: &Op) -> Option<Violation> {
    let (Call::Renew { .. }, Via::Stub(_), Some(shown)) = (&op.call, op.via, op.shown()) else {
        return None;
    };
    let others = resource.calls_of(lease.owner).iter().filter(|other| {
        !std::ptr::eq(**other, op)
            && other.sent <= op.answered
            && (lease.may_renew(other) || other.request().is_some())
    });
    let mut before: Option<(i64, &Op)> = None;
    for other in others {
        let may_be_several = other.is_unknown() || other.via == Via::Library;
        if may_be_several || other.answered >= op.sent {
            return None;
        }
        let shown = other
            .shown()
            .filter(|old| old.token == lease.token && other.answered < op.sent);
        if let Some(old) = shown.filter(|old| before.is_none_or(|(end, _)| end < old.expires_at)) {
            before = Some((old.expires_at, other));
        }
    }
    let (end, old) = before?;
    let landed = shown.expires_at - i64::try_from(shown.ttl.as_micros()).ok()?;
    (landed > end).then(|| {
        let what = format!(
            "{} was renewed {} us after its end",
            lease.token,
            landed - end
        );
        Violation::new(what, &[old, op])
    })
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::{Call::Get, Op};

    fn granted() -> Op {
        op("a", acquire("1"), 0..10, lock(5))
    }

    #[test]
    fn a_lease_that_lives_is_good() {
        good(
            super::check,
            [
                granted(),
                op("a", renew(5), 900..910, lock(5)),
                op("a", release(5), 1000..1010, done()),
            ],
        );
    }

    #[test]
    fn success_after_the_end_is_bad() {
        let again = [
            op("a", renew(5), 40..50, lock(5)),
            op("a", release(5), 40..50, done()),
        ];
        for again in again {
            bad(
                super::check,
                [
                    granted(),
                    op("a", release(5), 20..30, done()),
                    again.clone(),
                ],
            );
            bad(
                super::check,
                [
                    granted(),
                    op("a", renew(5), 20..30, no("LOCK_EXPIRED")),
                    again,
                ],
            );
        }
    }

    /// Gone after a try whose answer was lost: for the library that try did it.
    #[test]
    fn the_library_releases_what_is_gone_while_answers_are_lost() {
        let history = || {
            [
                granted(),
                op("a", renew(5), 1020..1030, no("LOCK_EXPIRED")),
                by_library(op("a", release(5), 1040..1200, done())),
            ]
        };
        bad(super::check, history());
        good_with(super::check, [fault(1050..1100)], history());
    }

    #[test]
    fn success_after_its_time_is_bad() {
        good(
            super::check,
            [granted(), op("a", release(5), 1510..1520, done())],
        );
        bad(
            super::check,
            [granted(), op("a", release(5), 1511..1520, done())],
        );
        let renewed = op("a", renew(5), 500..510, unknown());
        good(
            super::check,
            [granted(), renewed, op("a", release(5), 1511..1520, done())],
        );
    }

    #[test]
    fn a_free_resource_does_not_become_the_old_lease() {
        let free = op("", Get, 1020..1030, no("LOCK_NOT_FOUND"));
        bad(
            super::check,
            [
                granted(),
                free.clone(),
                op("a", release(5), 1031..1040, done()),
            ],
        );
        // Under way, and perhaps just being committed.
        good(
            super::check,
            [
                granted(),
                free.clone(),
                op("a", renew(5), 990..1040, lock(5)),
            ],
        );
        // Of two, the first one's.
        let first = op("a", renew(5), 990..1025, lock(5));
        let second = op("a", renew(5), 1031..1040, lock(5));
        good(
            super::check,
            [granted(), free.clone(), first, second.clone()],
        );
        bad(super::check, [granted(), free.clone(), second.clone()]);
        // What comes later excuses nothing.
        let lost = |at| op("a", renew(5), at, unknown());
        let histories = |at| [granted(), free.clone(), second.clone(), lost(at)];
        good(super::check, histories(1020..1500));
        bad(super::check, histories(1041..1500));
        let late = op("", Get, 1511..1520, no("LOCK_NOT_FOUND"));
        let renewed = op("a", renew(5), 990..1600, lock(5));
        bad(super::check, [granted(), late.clone(), renewed.clone()]);
        good_with(
            super::check,
            [fault(1000..1100)],
            [granted(), late.clone(), renewed],
        );
        good(
            super::check,
            [
                granted(),
                late,
                op("a", renew(5), 1515..1530, no("LOCK_EXPIRED")),
            ],
        );
    }

    #[test]
    fn a_failover_may_bring_it_back() {
        good_with(
            super::check,
            [forgotten(15..100)],
            [
                granted(),
                op("a", release(5), 20..30, done()),
                op("", Get, 40..50, no("LOCK_NOT_FOUND")),
                op("a", renew(5), 200..210, lock(5)),
            ],
        );
    }

    #[test]
    fn a_clock_that_is_set_back_may_bring_it_back() {
        let renewed = || op("a", renew(5), 1060..1070, lock(5));
        let ends = [
            op("a", renew(5), 1020..1030, no("LOCK_EXPIRED")),
            op("", Get, 1020..1030, no("LOCK_NOT_FOUND")),
        ];
        for end in ends {
            bad(super::check, [granted(), end.clone(), renewed()]);
            good_with(
                super::check,
                [stepped(1040..1041, -500)],
                [granted(), end, renewed()],
            );
        }
        // A Release stands.
        bad_with(
            super::check,
            [stepped(1040..1041, -500)],
            [granted(), op("a", release(5), 20..30, done()), renewed()],
        );
    }

    #[test]
    fn a_renewal_lands_before_the_end() {
        let mut renewed = op("a", renew(5), 900..1100, lock(5));
        let crate::history::Outcome::Lock(shown) = &mut renewed.outcome else {
            unreachable!()
        };
        shown.expires_at = 5 + 1_000_000 + 1_000_000;
        good(super::check, [granted(), renewed.clone()]);
        let crate::history::Outcome::Lock(shown) = &mut renewed.outcome else {
            unreachable!()
        };
        shown.expires_at += 1;
        bad(super::check, [granted(), renewed.clone()]);
        let lost = |at| op("a", renew(5), at, unknown());
        good(super::check, [granted(), renewed.clone(), lost(50..60)]);
        bad(super::check, [granted(), renewed.clone(), lost(1101..1110)]);
        bad_with(super::check, [fault(0..2000)], [granted(), renewed]);
    }
}
