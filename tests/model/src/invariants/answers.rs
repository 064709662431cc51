//! All answers that show a lease tell of the same one: the owner, token and TTL that were
//! asked for, and the same moment of the grant; a fresh one ends one TTL after that moment
//! exactly; its end never moves to an earlier time; a new grant and a renewal leave the
//! whole TTL, but for the time of the call; and no more is left than its TTL, or nothing. (The
//! client library counts from the sending what the server says is left on its answer:
//! of a grant that came late it may say that nothing is.)
//!
//! A failover may forget that an end was moved, and a database's clock that is set
//! back leaves more by so much.

use std::time::Duration;

use super::Violation;
use crate::{
    history::{Call, Op, Shown, Via},
    leases::{Facts, Lease},
};

/// Of what is left.
const ROUNDING: Duration = Duration::from_millis(10);

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let leases = facts
        .resources
        .values()
        .flat_map(|resource| resource.leases.values());
    leases.filter_map(|lease| check_one(facts, lease)).collect()
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
        if !(1..1 << 53).contains(&shown.token) {
            return wrong("no token", op);
        }
        if shown.owner != first.owner || (op.call != Call::Get && shown.owner != op.owner) {
            return wrong("another owner", op);
        }
        if op.call.token().is_some_and(|token| token != shown.token) {
            return wrong("another token was asked for", op);
        }
        if matches!(op.call, Call::Acquire { ttl, .. } if ttl != shown.ttl) {
            return wrong("another TTL was asked for", op);
        }
        if is_short(facts, op, shown) {
            return wrong("not granted or renewed for its whole TTL", op);
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
        let before = latest_end_before(lease, op)?;
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

/// Whether a new grant or a renewal leaves less than its TTL. The call's time counts
/// twice: in what the database says, and in what the server takes off for its own wait.
fn is_short(facts: &Facts<'_>, op: &Op, shown: &Shown) -> bool {
    let again = || {
        let mut own = facts.ops().map(|(_, other)| other);
        op.request().is_some_and(|(_, id)| !id.is_empty())
            && own.any(|other| {
                !std::ptr::eq(other, op)
                    && other.resource == op.resource
                    && other.request() == op.request()
                    && other.sent <= op.answered
            })
    };
    let judged = matches!(op.call, Call::Acquire { .. } | Call::Renew { .. });
    let least = shown.remaining + op.answered.since(op.sent) * 2 + ROUNDING;
    let short = judged && op.via != Via::Library && least < shown.ttl;
    short && !facts.history.stepped(op.sent, op.answered) && !again()
}

/// The latest end that was answered before a call was sent, or that the stream of which
/// it is a word had told before.
fn latest_end_before<'a>(lease: &Lease<'a>, op: &Op) -> Option<(&'a Op, &'a Shown)> {
    let same_stream = |other: &Op| {
        let stream = |op: &Op| (op.client, op.via, op.sent);
        matches!(op.call, Call::KeepAlive { .. })
            && other.call == op.call
            && stream(other) == stream(op)
            && other.answered < op.answered
    };
    let answers = lease.answers.iter();
    answers
        .filter(|other| other.answered < op.sent || same_stream(other))
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
    fn an_answer_is_to_what_was_asked() {
        let renewed = op("a", renew(4), 20..30, lock(5));
        bad(super::check, [granted(), renewed]);
        let word = op("a", keep_alive(4), 20..30, lock(5));
        bad(super::check, [granted(), word]);
        let of_another = op("b", renew(5), 20..30, shown("a", 5));
        bad(super::check, [granted(), of_another]);
        bad(super::check, [op("a", acquire("1"), 0..10, lock(0))]);
        bad(super::check, [op("a", acquire("1"), 0..10, lock(1 << 53))]);
        let shorter = with(granted(), |shown| {
            shown.ttl /= 2;
            shown.remaining /= 2;
            shown.expires_at -= 500_000;
        });
        bad(super::check, [shorter]);
    }

    #[test]
    fn the_words_of_a_stream_do_not_go_back() {
        let word = |at, later| {
            with(op("a", keep_alive(5), 20..at, lock(5)), |shown| {
                shown.expires_at += later
            })
        };
        good(super::check, [granted(), word(30, 20), word(40, 30)]);
        bad(super::check, [granted(), word(30, 30), word(40, 20)]);
    }

    #[test]
    fn a_grant_and_a_renewal_are_for_the_whole_ttl() {
        let left = |op, ms| with(op, |shown| shown.remaining = Duration::from_millis(ms));
        let renewed = || op("a", renew(5), 20..30, lock(5));
        good(super::check, [left(granted(), 970)]);
        bad(super::check, [left(granted(), 969)]);
        bad(super::check, [granted(), left(renewed(), 969)]);
        good_with(
            super::check,
            [stepped(25..26, 100)],
            [granted(), left(renewed(), 869)],
        );
        // What is shown once more has had time to run.
        let again = op("a", acquire("1"), 500..510, lock(5));
        good(super::check, [granted(), left(again, 490)]);
        let looked = op("", Get, 500..510, shown("a", 5));
        good(super::check, [granted(), left(looked, 490)]);
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
