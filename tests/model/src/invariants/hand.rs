//! Histories made by hand, on one resource. Times are in milliseconds, and every
//! TTL is one second.

use std::{ops::Range, time::Duration};

use super::Violation;
use crate::{
    history::{Admitted, Call, Event, History, Op, Outcome, Shown, Time, Via, What},
    leases::Facts,
};

pub(super) const TTL: Duration = Duration::from_secs(1);

fn time(ms: u64) -> Time {
    Time(ms * 1000)
}

pub(super) fn op(owner: &str, call: Call, at: Range<u64>, outcome: Outcome) -> Op {
    let mut outcome = outcome;
    if let Outcome::Lock(shown) = &mut outcome
        && shown.owner.is_empty()
    {
        owner.clone_into(&mut shown.owner);
    }
    Op {
        id: 0,
        client: 0,
        via: Via::Stub(0),
        resource: "r".to_owned(),
        owner: owner.to_owned(),
        call,
        sent: time(at.start),
        answered: time(at.end),
        outcome,
        status: None,
    }
}

pub(super) fn by_library(mut op: Op) -> Op {
    op.via = Via::Library;
    op
}

pub(super) fn acquire(id: &str) -> Call {
    Call::Acquire {
        request_id: id.to_owned(),
        ttl: TTL,
    }
}
pub(super) fn renew(token: i64) -> Call {
    Call::Renew { token }
}
pub(super) fn release(token: i64) -> Call {
    Call::Release { token }
}
pub(super) fn keep_alive(token: i64) -> Call {
    Call::KeepAlive { token }
}
pub(super) fn write(id: u64, token: i64, at: Range<u64>, outcome: Outcome) -> Op {
    Op {
        id,
        ..op("w", Call::Write { token }, at, outcome)
    }
}

/// The caller's own lease, with all its time left.
pub(super) fn lock(token: i64) -> Outcome {
    shown("", token)
}
/// Anybody's.
pub(super) fn shown(owner: &str, token: i64) -> Outcome {
    Outcome::Lock(Shown {
        token,
        owner: owner.to_owned(),
        remaining: TTL,
        ttl: TTL,
        acquired_at: token,
        expires_at: token + 1_000_000,
    })
}
pub(super) fn held(owner: &str) -> Outcome {
    Outcome::Held {
        owner: owner.to_owned(),
        acquired_at: 5,
        remaining: TTL,
    }
}
pub(super) fn done() -> Outcome {
    Outcome::Done
}
pub(super) fn no(reason: &str) -> Outcome {
    Outcome::No(reason.to_owned())
}
pub(super) fn unknown() -> Outcome {
    Outcome::Unknown("lost".to_owned())
}

fn event(at: Range<u64>, what: What) -> Event {
    Event {
        from: time(at.start),
        to: time(at.end),
        what,
    }
}
pub(super) fn forgotten(at: Range<u64>) -> Event {
    event(at, What::LeasesForgotten)
}
pub(super) fn fault(at: Range<u64>) -> Event {
    event(at, What::Fault("something".to_owned()))
}
pub(super) fn stepped(at: Range<u64>, by_ms: i64) -> Event {
    event(at, What::ClockStepped(by_ms * 1000))
}

pub(super) fn admitted(op: u64, token: i64) -> Admitted {
    Admitted {
        resource: "r".to_owned(),
        token,
        op,
    }
}

type Check = fn(&Facts<'_>) -> Vec<Violation>;

pub(super) fn violations(check: Check, history: &History) -> Vec<Violation> {
    check(&Facts::of(history))
}

fn history<const E: usize, const N: usize>(events: [Event; E], ops: [Op; N]) -> History {
    History {
        ops: ops.into(),
        events: events.into(),
        ..History::default()
    }
}

#[track_caller]
pub(super) fn good<const N: usize>(check: Check, ops: [Op; N]) {
    good_with(check, [], ops);
}
#[track_caller]
pub(super) fn bad<const N: usize>(check: Check, ops: [Op; N]) {
    bad_with(check, [], ops);
}
#[track_caller]
pub(super) fn good_with<const E: usize, const N: usize>(
    check: Check,
    events: [Event; E],
    ops: [Op; N],
) {
    let found = violations(check, &history(events, ops));
    assert!(found.is_empty(), "{found:#?}");
}
#[track_caller]
pub(super) fn bad_with<const E: usize, const N: usize>(
    check: Check,
    events: [Event; E],
    ops: [Op; N],
) {
    let history = history(events, ops);
    assert!(
        !violations(check, &history).is_empty(),
        "nothing was found in {history:#?}"
    );
}
