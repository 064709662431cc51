//! The fenced register never goes back: the tokens of its log, in the order of the
//! commits, never fall. It loses no acknowledged write, holds none that was
//! refused, each at most once and as it was asked for, and refuses only because of a
//! newer token.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Violation;
use crate::{
    history::{Admitted, Call, Op, Outcome, Time},
    leases::Facts,
};

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let history = facts.history;
    let writes = || {
        history
            .ops
            .iter()
            .filter(|op| matches!(op.call, Call::Write { .. }))
    };
    let by_id: HashMap<u64, &Op> = writes().map(|op| (op.id, op)).collect();
    let mut violations = Vec::new();

    let mut highest = HashMap::<&str, &Admitted>::new();
    for line in &history.register {
        let before = highest.insert(&line.resource, line);
        if let Some(before) = before.filter(|before| before.token > line.token) {
            let what = format!(
                "{}: token {} wrote after {}",
                line.resource, line.token, before.token
            );
            let ops: Vec<_> = [before.op, line.op]
                .iter()
                .filter_map(|op| by_id.get(op).copied())
                .collect();
            violations.push(Violation::new(what, &ops));
        }
    }

    let mut lines = HashSet::new();
    for line in &history.register {
        let wrote = by_id.get(&line.op).copied();
        let fits = |op: &Op| op.resource == line.resource && op.call.token() == Some(line.token);
        let what = if !lines.insert(line.op) {
            "a write was done twice"
        } else if !wrote.is_some_and(fits) {
            "nobody wrote this"
        } else {
            continue;
        };
        let what = format!("{}: {what}: {line:?}", line.resource);
        violations.push(Violation::new(what, wrote.as_slice()));
    }

    let shown = shown_first(writes());
    let logged: HashSet<u64> = history.register.iter().map(|line| line.op).collect();
    for op in writes() {
        let is_there = logged.contains(&op.id);
        let what = match &op.outcome {
            Outcome::Done if !is_there => "an acknowledged write is lost",
            Outcome::No(_) if is_there => "a refused write was done",
            Outcome::No(reason) if reason == "FP409" && !newer_was_shown(&shown, op) => {
                "refused, and nobody had shown a newer token"
            }
            _ => continue,
        };
        violations.push(Violation::new(what, &[op]));
    }
    violations
}

/// For each resource and token, when a write first showed it.
type Shown<'a> = BTreeMap<(&'a str, i64), Time>;

fn shown_first<'a>(writes: impl Iterator<Item = &'a Op>) -> Shown<'a> {
    let mut shown = Shown::new();
    for op in writes {
        let first = shown.entry((&*op.resource, op.call.token().unwrap_or(0)));
        let first = first.or_insert(op.sent);
        *first = op.sent.min(*first);
    }
    shown
}

fn newer_was_shown(shown: &Shown<'_>, refused: &Op) -> bool {
    let resource = &*refused.resource;
    let newer = refused.call.token().unwrap_or(0) + 1;
    shown
        .range((resource, newer)..=(resource, i64::MAX))
        .any(|(_, sent)| *sent <= refused.answered)
}

#[cfg(test)]
mod tests {
    use super::{
        super::hand::{admitted, done, no, unknown, violations, write},
        Admitted, Op,
    };
    use crate::history::History;

    fn found<const O: usize, const R: usize>(ops: [Op; O], register: [Admitted; R]) -> usize {
        let history = History {
            ops: ops.into(),
            register: register.into(),
            ..History::default()
        };
        violations(super::check, &history).len()
    }

    #[test]
    fn a_log_that_rises_is_good() {
        let ops = [
            write(1, 5, 0..10, done()),
            write(2, 6, 20..30, done()),
            write(3, 5, 40..50, no("FP409")),
            write(4, 6, 60..70, unknown()),
            write(5, 6, 60..70, unknown()),
        ];
        assert_eq!(
            found(ops, [admitted(1, 5), admitted(2, 6), admitted(5, 6)]),
            0
        );
    }

    #[test]
    fn a_log_that_goes_back_is_bad() {
        let ops = [write(1, 5, 0..10, unknown()), write(2, 6, 0..10, unknown())];
        assert_eq!(found(ops, [admitted(2, 6), admitted(1, 5)]), 1);
    }

    #[test]
    fn a_lost_write_is_bad() {
        assert_eq!(found([write(1, 5, 0..10, done())], []), 1);
    }

    #[test]
    fn a_line_is_of_one_write() {
        let write = || [write(1, 5, 0..10, unknown())];
        assert_eq!(found(write(), [admitted(1, 5)]), 0);
        assert_eq!(found(write(), [admitted(1, 5), admitted(1, 5)]), 1);
        assert_eq!(found(write(), [admitted(1, 6)]), 1);
        assert_eq!(found(write(), [admitted(2, 5)]), 1);
    }

    #[test]
    fn a_refused_write_leaves_nothing() {
        let ops = [
            write(2, 6, 0..10, unknown()),
            write(1, 5, 0..10, no("FP409")),
        ];
        assert_eq!(found(ops, [admitted(1, 5)]), 1);
    }

    #[test]
    fn a_write_is_refused_for_a_newer_token_alone() {
        assert_eq!(found([write(1, 5, 0..10, no("FP409"))], []), 1);
    }
}
