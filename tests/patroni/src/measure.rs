//! What a history says of a fault: how long nobody was served, and who lost what.

use std::{collections::BTreeSet, time::Duration};

use fencepost_model::{
    history::{Call, History, Op, Outcome, Time, What},
    invariants::kept,
    leases::Facts,
};

/// A lease: its resource and token.
pub(crate) type Lease = (String, i64);

/// Whether the database answered.
fn served(op: &Op) -> bool {
    op.succeeded() || matches!(op.outcome, Outcome::Held { .. })
}

/// The longest time between the two moments in which no call of this kind was served.
/// After a kill that is the time to the first success.
pub(crate) fn outage(history: &History, kind: &str, from: Time, to: Time) -> Duration {
    let good = |op: &&Op| op.call.kind() == kind && served(op);
    let answered = history.ops.iter().filter(good).map(|op| op.answered);
    let mut moments: Vec<_> = answered.filter(|at| (from..to).contains(at)).collect();
    moments.extend([from, to]);
    moments.sort_unstable();
    let gaps = moments.windows(2).map(|pair| pair[1].since(pair[0]));
    gaps.max().unwrap_or_default()
}

/// How long after a moment the next call of this kind was answered with success: one that
/// was sent before and waited counts, since its caller was served then.
pub(crate) fn first_success(history: &History, kind: &str, from: Time) -> Duration {
    let good = |op: &&Op| op.call.kind() == kind && served(op) && op.answered >= from;
    let first = history.ops.iter().filter(good).map(|op| op.answered).min();
    first.map_or(Duration::MAX, |first| first.since(from))
}

/// The leases that certainly lived, were nobody to forget them, and whose holders were
/// told that they do not, each with the moment of that answer.
pub(crate) fn lost(history: &History) -> Vec<(Time, Lease)> {
    let mut history = history.clone();
    // Nothing is excused; what is slow still is.
    for event in &mut history.events {
        if event.what == What::LeasesForgotten {
            event.what = What::Fault("a failover".to_owned());
        }
    }
    let violations = kept::check(&Facts::of(&history));
    let ops = violations.into_iter().filter_map(|violation| {
        let op = violation.ops.into_iter().find(Op::lost)?;
        Some((op.answered, (op.resource, op.call.token()?)))
    });
    let mut seen = BTreeSet::new();
    ops.filter(|(_, lease)| seen.insert(lease.clone()))
        .collect()
}

/// The leases that were renewed before the first moment and after the second.
pub(crate) fn kept_through(history: &History, from: Time, to: Time) -> usize {
    let renewed = |when: &dyn Fn(&Op) -> bool| -> BTreeSet<(&str, i64)> {
        let good = |op: &&Op| matches!(op.call, Call::Renew { .. }) && op.succeeded();
        let ops = history.ops.iter().filter(good).filter(|op| when(op));
        ops.filter_map(|op| Some((op.resource.as_str(), op.call.token()?)))
            .collect()
    };
    let before = renewed(&|op| op.answered < from);
    before.intersection(&renewed(&|op| op.sent > to)).count()
}

#[cfg(test)]
mod tests {
    use fencepost_model::history::{Event, Shown, Via};

    use super::*;

    const MS: u64 = 1000;

    fn op(call: Call, sent: u64, answered: u64, outcome: Outcome) -> Op {
        Op {
            id: sent,
            client: 0,
            via: Via::Stub(0),
            resource: "r".to_owned(),
            owner: "o".to_owned(),
            call,
            sent: Time(sent * MS),
            answered: Time(answered * MS),
            outcome,
            status: None,
        }
    }

    fn lock(token: i64) -> Outcome {
        Outcome::Lock(Shown {
            token,
            owner: "o".to_owned(),
            remaining: Duration::from_secs(60),
            ttl: Duration::from_secs(60),
            acquired_at: 0,
            expires_at: 60_000_000,
        })
    }

    fn history(ops: Vec<Op>, events: Vec<Event>) -> History {
        History {
            ops,
            events,
            ..History::default()
        }
    }

    #[test]
    fn the_longest_time_without_a_success_is_the_outage() {
        let renew = Call::Renew { token: 1 };
        let unknown = Outcome::Unknown(String::new());
        let ops = vec![
            op(renew.clone(), 0, 10, lock(1)),
            op(renew.clone(), 100, 120, lock(1)),
            op(renew.clone(), 130, 200, unknown),
            op(renew.clone(), 400, 420, lock(1)),
            op(renew, 430, 440, lock(1)),
        ];
        let history = history(ops, Vec::new());
        let outage = |kind, from, to| outage(&history, kind, Time(from * MS), Time(to * MS));
        assert_eq!(outage("Renew", 100, 500), Duration::from_millis(300));
        assert_eq!(outage("Renew", 150, 500), Duration::from_millis(270));
        assert_eq!(outage("Acquire", 100, 500), Duration::from_millis(400));
    }

    #[test]
    fn a_lease_that_a_failover_forgot_is_lost_and_excused() {
        let acquire = Call::Acquire {
            request_id: "1".to_owned(),
            ttl: Duration::from_secs(60),
        };
        let told = Outcome::No("TOKEN_UNKNOWN".to_owned());
        let ops = vec![
            op(acquire, 0, 10, lock(1)),
            op(Call::Renew { token: 1 }, 20, 30, told.clone()),
            op(Call::Renew { token: 1 }, 40, 50, told),
        ];
        let forgotten = Event {
            from: Time(0),
            to: Time(20 * MS),
            what: What::LeasesForgotten,
        };
        let excused = history(ops.clone(), vec![forgotten]);
        assert_eq!(fencepost_model::check(&excused), []);
        let lease = ("r".to_owned(), 1);
        assert_eq!(lost(&excused), [(Time(30 * MS), lease)]);
        let violations = fencepost_model::check(&history(ops, Vec::new()));
        let kept = violations.iter().filter(|found| found.invariant == "kept");
        assert_eq!(kept.count(), 2);
    }

    #[test]
    fn a_lease_that_is_renewed_on_both_sides_was_kept() {
        let renew = |token, at| op(Call::Renew { token }, at, at + 1, lock(token));
        let history = history(vec![renew(1, 10), renew(2, 20), renew(1, 100)], Vec::new());
        assert_eq!(kept_through(&history, Time(50 * MS), Time(60 * MS)), 1);
    }
}
