//! All answers that show a lease tell of the same one: the same owner and the same
//! moment of the grant; a fresh one ends one TTL after that moment exactly; its end
//! never moves to an earlier time; and no more is left than its TTL, or nothing. (The
//! client library counts from the sending what the server says is left on its answer:
//! of a grant that came late it may say that nothing is.)
//!
//! A failover may forget that an end was moved, and a database's clock that is set
//! back leaves more by so much. And no answer is `INTERNAL`: that is
//! a bug, whatever is at fault.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome, Shown, Time, Via},
    leases::{Facts, Lease},
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let leases = facts
        .resources
        .values()
        .flat_map(|resource| resource.leases.values());
    let bugs = facts.ops().filter_map(|(_, op)| is_bug(op).then_some(op));
    leases
        .filter_map(|lease| check_one(facts, lease))
        .chain(bugs.map(|op| Violation::new("a bug", &[op])))
        .collect()
}

fn is_bug(op: &Op) -> bool {
    matches!(&op.outcome, Outcome::Unknown(why) if why.ends_with(" INTERNAL"))
}

fn check_one(facts: &Facts<'_>, lease: &Lease<'_>) -> Option<Violation> {
    let mut answers = lease
        .answers
        .iter()
        .filter_map(|op| Some((*op, op.shown()?)));
    let (first_op, first) = answers.clone().next()?;
    let wrong = |what: &str, op: &Op| {
        Some(Violation::new(
            format!("{}: {what}", lease.token),
            &[first_op, op],
        ))
    };
    for (op, shown) in answers.clone() {
        if shown.owner != first.owner || (op.request().is_some() && shown.owner != op.owner) {
            return wrong("another owner", op);
        }
        if shown.acquired_at != first.acquired_at {
            return wrong("granted at two moments", op);
        }
        let ttl = i64::try_from(shown.ttl.as_micros()).unwrap_or(i64::MAX);
        if op.granted().is_some() && shown.expires_at - shown.acquired_at != ttl {
            return wrong("its end is not one TTL after the grant", op);
        }
        let longest = shown.ttl + facts.history.set_back_by(lease.asked, op.answered);
        // A word of a stream counts from its opening.
        let longest = match op.call {
            Call::KeepAlive { .. } => longest + op.answered.since(op.sent),
            _ => longest,
        };
        let nothing = shown.remaining.is_zero() && op.granted().is_some() && op.via != Via::Library;
        if nothing || shown.remaining > longest {
            return wrong("more or less is left than can be", op);
        }
    }
    let fell = answers.find_map(|(op, shown)| {
        let before = latest_end_before(lease, op.sent)?;
        (shown.expires_at < before.1.expires_at
            && !facts.history.forgotten(before.0.sent, op.answered))
        .then_some((before.0, op))
    });
    let (before, after) = fell?;
    Some(Violation::new(
        format!("{}: its end moved to an earlier time", lease.token),
        &[before, after],
    ))
}

/// The latest end that was answered before a moment.
fn latest_end_before<'a>(lease: &Lease<'a>, at: Time) -> Option<(&'a Op, &'a Shown)> {
    let before = lease.answers.iter().filter(|op| op.answered < at);
    before
        .filter_map(|op| Some((*op, op.shown()?)))
        .max_by_key(|(_, shown)| shown.expires_at)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::hand::*;
    use crate::history::{Call::Get, Op, Outcome, Shown, Via};

    fn granted() -> Op {
        op("a", acquire("1"), 0..10, lock(5))
    }

    fn with(mut op: Op, change: impl FnOnce(&mut Shown)) -> Op {
        let Outcome::Lock(shown) = &mut op.outcome else {
            unreachable!()
        };
        change(shown);
        op
    }

    #[test]
    fn answers_that_agree_are_good() {
        good(
            super::check,
            [
                granted(),
                with(op("a", renew(5), 20..30, lock(5)), |shown| {
                    shown.expires_at += 20_000
                }),
                with(op("", Get, 40..50, shown("a", 5)), |shown| {
                    shown.expires_at += 20_000
                }),
            ],
        );
    }

    #[test]
    fn the_library_may_say_that_nothing_is_left() {
        let nothing = with(granted(), |shown| shown.remaining = Duration::ZERO);
        bad(super::check, [nothing.clone()]);
        let via = Via::Library;
        good(super::check, [Op { via, ..nothing }]);
    }

    #[test]
    fn a_clock_that_is_set_back_leaves_more() {
        let more = with(op("", Get, 40..50, shown("a", 5)), |shown| {
            shown.remaining += Duration::from_millis(300);
        });
        let back = |at| [stepped(at..at, -300)];
        good_with(super::check, back(20), [granted(), more.clone()]);
        bad_with(super::check, back(60), [granted(), more]);
    }

    #[test]
    fn a_bug_is_bad() {
        let answer = |why: &str| op("", Get, 0..10, Outcome::Unknown(why.to_owned()));
        good(super::check, [answer("Unavailable STORE_UNAVAILABLE")]);
        bad(super::check, [answer("Internal INTERNAL")]);
    }

    #[test]
    fn answers_that_differ_are_bad() {
        let look = || op("", Get, 40..50, shown("a", 5));
        bad(
            super::check,
            [granted(), op("", Get, 40..50, shown("b", 5))],
        );
        bad(
            super::check,
            [granted(), with(look(), |shown| shown.acquired_at += 1)],
        );
        bad(
            super::check,
            [with(granted(), |shown| shown.expires_at += 1)],
        );
        bad(
            super::check,
            [with(granted(), |shown| {
                shown.remaining += Duration::from_micros(1)
            })],
        );
        bad(
            super::check,
            [with(granted(), |shown| shown.remaining = Duration::ZERO)],
        );
        let renewed = with(op("a", renew(5), 20..30, lock(5)), |shown| {
            shown.expires_at += 20_000
        });
        bad(super::check, [granted(), renewed.clone(), look()]);
        good_with(
            super::check,
            [forgotten(15..35)],
            [granted(), renewed, look()],
        );
    }
}
