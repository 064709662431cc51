//! A call ends with a code and a reason that the contract has for it:
//!
//! | call | code | reason |
//! |---|---|---|
//! | Acquire | `ABORTED` | `REQUEST_SPENT` |
//! | Release | `NOT_FOUND` | `LOCK_NOT_FOUND` |
//! | | `PERMISSION_DENIED` | `NOT_OWNER` |
//! | | `ABORTED` | `TOKEN_SUPERSEDED`, `TOKEN_UNKNOWN` |
//! | Renew, KeepAlive | `ABORTED` | `LOCK_EXPIRED`, `NOT_OWNER`, `TOKEN_SUPERSEDED`, `TOKEN_UNKNOWN` |
//! | | `NOT_FOUND` | `LOCK_NOT_FOUND` |
//! | Get | `NOT_FOUND` | `LOCK_NOT_FOUND` |
//! | any | `UNAVAILABLE` | `STORE_UNAVAILABLE` |
//! | | `DEADLINE_EXCEEDED` | `DEADLINE` |
//! | KeepAlive | `UNAVAILABLE` | `REOPEN` |
//! | any, during a fault | `UNAVAILABLE` | `DRAINING` |
//! | | `RESOURCE_EXHAUSTED` | `OVERLOADED` |
//!
//! Nothing else, whatever is at fault: `INTERNAL` is a bug, `INVALID_REQUEST` too, since
//! nobody asks for what is not valid, and so is OK without an answer, or at the end of a
//! stream. A code without a reason comes from no server, but from the stub, when the
//! caller's deadline has passed or, during a fault, its connection broke.
//!
//! Two reasons say more:
//!
//! - `REQUEST_SPENT`: the request was sent before, and that may have been granted;
//! - `TOKEN_UNKNOWN`: a failover may have forgotten that token.

use super::Violation;
use crate::{
    history::{Call, Op, Outcome, Status},
    leases::{Facts, Resource},
};

type Row = (&'static str, &'static str);

const ACQUIRE: &[Row] = &[("Aborted", "REQUEST_SPENT")];
const RELEASE: &[Row] = &[
    ("NotFound", "LOCK_NOT_FOUND"),
    ("PermissionDenied", "NOT_OWNER"),
    ("Aborted", "TOKEN_SUPERSEDED"),
    ("Aborted", "TOKEN_UNKNOWN"),
];
const RENEW: &[Row] = &[
    ("Aborted", "LOCK_EXPIRED"),
    ("Aborted", "NOT_OWNER"),
    ("Aborted", "TOKEN_SUPERSEDED"),
    ("Aborted", "TOKEN_UNKNOWN"),
    ("NotFound", "LOCK_NOT_FOUND"),
];
const GET: &[Row] = &[("NotFound", "LOCK_NOT_FOUND")];

/// A row may be locked, and a caller impatient.
const ALWAYS: &[Row] = &[
    ("Unavailable", "STORE_UNAVAILABLE"),
    ("DeadlineExceeded", "DEADLINE"),
];
const OF_STREAMS: &[Row] = &[("Unavailable", "REOPEN")];
const IN_FAULTS: &[Row] = &[
    ("Unavailable", "DRAINING"),
    ("ResourceExhausted", "OVERLOADED"),
];

/// What a stub says when its caller's deadline has passed.
const BARE: &[&str] = &["Cancelled", "DeadlineExceeded"];
/// What a stub makes of a connection that breaks, by how it breaks.
const BARE_IN_FAULTS: &[&str] = &["Unavailable", "Unknown", "Internal", "ResourceExhausted"];

/// See the module.
#[must_use]
pub fn check(facts: &Facts<'_>) -> Vec<Violation> {
    let wrong = |(resource, op): (&Resource<'_>, &Op)| {
        let what = match &op.outcome {
            _ if !is_in_table(facts, op) => format!("no answer to {}", op.call.kind()),
            Outcome::No(reason) if reason == "REQUEST_SPENT" && !may_be_spent(resource, op) => {
                "spent by nobody".to_owned()
            }
            Outcome::No(reason) if reason == "TOKEN_UNKNOWN" && !may_be_unknown(facts, op) => {
                "forgotten, and there was no failover".to_owned()
            }
            _ => return None,
        };
        Some(Violation::new(what, &[op]))
    };
    facts.ops().filter_map(wrong).collect()
}

fn is_in_table(facts: &Facts<'_>, op: &Op) -> bool {
    let own = match op.call {
        Call::Acquire { .. } => ACQUIRE,
        Call::Release { .. } => RELEASE,
        Call::Renew { .. } | Call::KeepAlive { .. } => RENEW,
        Call::Get => GET,
        Call::Write { .. } => return true,
    };
    let Some(Status { code, reason }) = &op.status else {
        // The client library has errors of its own, and keeps the reason.
        return match &op.outcome {
            Outcome::No(reason) => own.iter().any(|row| row.1 == reason),
            _ => true,
        };
    };
    let faulty = || facts.history.faulty(op.sent, op.answered);
    match reason {
        None => BARE.contains(&&**code) || (BARE_IN_FAULTS.contains(&&**code) && faulty()),
        Some(reason) => {
            let is_it = |rows: &[Row]| rows.contains(&(&**code, &**reason));
            let stream = matches!(op.call, Call::KeepAlive { .. });
            is_it(own)
                || is_it(ALWAYS)
                || (stream && is_it(OF_STREAMS))
                || (is_it(IN_FAULTS) && faulty())
        }
    }
}

/// Whether the same request may have been granted something before. A call of the client
/// library may be its own second request, and so may one that took longer than its TTL.
fn may_be_spent(resource: &Resource<'_>, op: &Op) -> bool {
    let may_be_granted = |op: &Op| op.granted().is_some() || op.is_unknown() || op.may_be_several();
    op.may_be_several()
        || resource.calls_of(&op.owner).iter().any(|other| {
            !std::ptr::eq(*other, op)
                && other.request() == op.request()
                && op.request().is_some_and(|(_, id)| !id.is_empty())
                && other.sent <= op.answered
                && may_be_granted(other)
        })
}

/// Whether a failover may have forgotten the token since it was asked for.
fn may_be_unknown(facts: &Facts<'_>, op: &Op) -> bool {
    let lease = op.call.token().and_then(|token| facts.lease(op, token));
    let since = lease.map(|lease| lease.asked).unwrap_or_default();
    facts.history.forgotten(since, op.answered)
}

#[cfg(test)]
mod tests {
    use super::super::hand::*;
    use crate::history::{
        Call::{self, Get},
        Op, Outcome, Status,
    };

    /// A call that ended with this status.
    fn ended(call: Call, code: &str, reason: &str) -> Op {
        let last = !["Unavailable", "DeadlineExceeded", "ResourceExhausted"].contains(&code);
        let outcome = match reason {
            "" | "INTERNAL" => unknown(),
            reason if last => no(reason),
            _ => unknown(),
        };
        with_status(op("a", call, 20..30, outcome), code, reason)
    }

    fn with_status(op: Op, code: &str, reason: &str) -> Op {
        Op {
            status: Some(Status {
                code: code.to_owned(),
                reason: (!reason.is_empty()).then(|| reason.to_owned()),
            }),
            ..op
        }
    }

    fn granted() -> Op {
        op("a", acquire("1"), 0..10, lock(5))
    }

    #[test]
    fn what_the_table_has_is_good() {
        for (call, code, reason) in [
            (acquire("1"), "Aborted", "REQUEST_SPENT"),
            (release(5), "PermissionDenied", "NOT_OWNER"),
            (release(5), "NotFound", "LOCK_NOT_FOUND"),
            (renew(5), "Aborted", "NOT_OWNER"),
            (renew(5), "Aborted", "LOCK_EXPIRED"),
            (keep_alive(5), "Aborted", "TOKEN_SUPERSEDED"),
            (keep_alive(5), "Unavailable", "REOPEN"),
            (Get, "NotFound", "LOCK_NOT_FOUND"),
            (Get, "Unavailable", "STORE_UNAVAILABLE"),
            (acquire("2"), "DeadlineExceeded", "DEADLINE"),
            (acquire("2"), "Cancelled", ""),
        ] {
            good(super::check, [granted(), ended(call, code, reason)]);
        }
    }

    #[test]
    fn what_is_not_in_it_is_bad_whatever_is_at_fault() {
        for (call, code, reason) in [
            (renew(5), "Internal", "INTERNAL"),
            (renew(5), "Unknown", "INTERNAL"),
            (acquire("2"), "InvalidArgument", "INVALID_REQUEST"),
            (acquire("2"), "Aborted", "NOT_OWNER"),
            (acquire("1"), "NotFound", "REQUEST_SPENT"),
            (release(5), "Aborted", "NOT_OWNER"),
            (release(5), "Aborted", "LOCK_EXPIRED"),
            (renew(5), "PermissionDenied", "NOT_OWNER"),
            (renew(5), "Unavailable", "REOPEN"),
            (Get, "NotFound", "LOCK_EXPIRED"),
            (Get, "Ok", ""),
            (keep_alive(5), "Ok", ""),
            (Get, "NotFound", ""),
            (Get, "Unavailable", "LOCK_NOT_FOUND"),
        ] {
            bad_with(
                super::check,
                [fault(0..100)],
                [granted(), ended(call, code, reason)],
            );
        }
    }

    #[test]
    fn what_is_due_to_a_fault_is_bad_without_one() {
        for (code, reason) in [
            ("Unavailable", "DRAINING"),
            ("ResourceExhausted", "OVERLOADED"),
            ("Unavailable", ""),
            ("Unknown", ""),
        ] {
            let ended = ended(Get, code, reason);
            bad(super::check, [ended.clone()]);
            good_with(super::check, [fault(0..100)], [ended]);
        }
    }

    #[test]
    fn the_library_keeps_the_reason_alone() {
        let call = |reason| by_library(op("a", release(5), 20..30, no(reason)));
        good(super::check, [granted(), call("NOT_OWNER")]);
        bad(super::check, [granted(), call("LOCK_EXPIRED")]);
    }

    #[test]
    fn a_request_is_spent_by_one_before_it() {
        let spent = |id| op("a", acquire(id), 20..30, no("REQUEST_SPENT"));
        let before = |id, outcome: Outcome| op("a", acquire(id), 0..10, outcome);
        good(super::check, [before("1", lock(5)), spent("1")]);
        good(super::check, [before("1", unknown()), spent("1")]);
        // Never sent, by another name, without effect, or without an id.
        bad(super::check, [spent("1")]);
        bad(super::check, [before("2", lock(5)), spent("1")]);
        bad(super::check, [before("1", held("b")), spent("1")]);
        bad(super::check, [before("", lock(5)), spent("")]);
        let other = op("b", acquire("1"), 0..10, lock(5));
        bad(super::check, [other, spent("1")]);
        // Sent later, or at the same time.
        let at = |from| op("a", acquire("1"), from..from + 10, unknown());
        good(super::check, [spent("1"), at(29)]);
        bad(super::check, [spent("1"), at(31)]);
        // Several requests.
        good(super::check, [by_library(spent("1"))]);
    }

    #[test]
    fn a_token_is_unknown_after_a_failover() {
        let told = op("a", renew(5), 20..30, no("TOKEN_UNKNOWN"));
        bad(super::check, [granted(), told.clone()]);
        good_with(super::check, [forgotten(15..16)], [granted(), told]);
    }
}
