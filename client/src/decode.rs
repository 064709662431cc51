//! From a gRPC status to its meaning.
//!
//! Our own answers carry an `ErrorInfo` with our domain, whose reason decides.
//! Anything else comes from the network, a proxy or a library on the way, and
//! its code decides: a few codes mean that repeating is pointless, all others
//! are transient. A proxy's `PERMISSION_DENIED` ends no lease.

use std::error::Error as _;

use fencepost_proto::v1::{ERROR_DOMAIN, reason};
use tonic::{Code, ConnectError, Status, TimeoutExpired};
use tonic_types::StatusExt as _;

use crate::{
    Error::{self, Internal, Invalid, Lost, Rejected, RequestSpent, TimedOut, Unavailable},
    FieldViolation, LostReason,
};

/// What the status means for the caller.
pub(crate) fn decode(status: &Status) -> Error {
    let reason = status
        .get_details_error_info()
        .filter(|info| info.domain == ERROR_DOMAIN)
        .map(|info| info.reason);
    let lost = |reason| Lost { reason };
    match reason.as_deref() {
        Some(reason::LOCK_NOT_FOUND) => lost(LostReason::NotFound),
        Some(reason::LOCK_EXPIRED) => lost(LostReason::Expired),
        Some(reason::NOT_OWNER) => lost(LostReason::NotOwner),
        Some(reason::TOKEN_SUPERSEDED) => lost(LostReason::TokenSuperseded),
        Some(reason::TOKEN_UNKNOWN) => lost(LostReason::TokenUnknown),
        Some(reason::REQUEST_SPENT) => RequestSpent,
        Some(reason::INVALID_REQUEST) => Invalid {
            violations: violations(status),
        },
        Some(reason::DEADLINE) => TimedOut,
        Some(reason::INTERNAL) => Internal {
            detail: detail(status),
        },
        // Also every reason that a newer server may have: what ends a lease is
        // the five above.
        Some(_) | None => by_code(status),
    }
}

/// Whether the request certainly never left, because there was no connection.
pub(crate) fn never_sent(status: &Status) -> bool {
    sources(status).any(|error| error.is::<ConnectError>())
}

/// Whether nobody has answered in the time that tonic counts as well.
pub(crate) fn timed_out(status: &Status) -> bool {
    sources(status).any(|error| error.is::<TimeoutExpired>())
}

/// Where a status comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This side: there was no connection, or it failed.
    Connection,
    /// Something that answered, and is none of our servers.
    Stranger,
    /// A server of ours.
    Server,
}

pub(crate) fn origin(status: &Status) -> Origin {
    let info = status.get_details_error_info();
    if status.source().is_some() {
        Origin::Connection
    } else if info.is_some_and(|info| info.domain == ERROR_DOMAIN) {
        Origin::Server
    } else {
        Origin::Stranger
    }
}

fn by_code(status: &Status) -> Error {
    let detail = detail(status);
    match status.code() {
        Code::Unimplemented | Code::Unauthenticated | Code::InvalidArgument => Rejected { detail },
        Code::DeadlineExceeded => TimedOut,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss => Unavailable { detail },
    }
}

fn violations(status: &Status) -> Vec<FieldViolation> {
    let details = status.get_details_bad_request();
    let violations = details.into_iter().flat_map(|bad| bad.field_violations);
    violations
        .map(|violation| FieldViolation {
            field: violation.field,
            description: violation.description,
        })
        .collect()
}

/// For people: the deepest cause where there is one ("Connection refused"),
/// else what the server said.
fn detail(status: &Status) -> String {
    match sources(status).last() {
        Some(cause) => cause.to_string(),
        None => format!("{:?}: {}", status.code(), status.message()),
    }
}

fn sources(status: &Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(status.source(), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::ErrorDetails;

    use super::*;

    fn status(code: Code, domain: &str, reason: &str) -> Status {
        let details = ErrorDetails::with_error_info(reason, domain, HashMap::new());
        Status::with_error_details(code, "constant", details)
    }

    #[test]
    fn the_reason_decides_whatever_the_code() {
        for (reason, lost) in [
            ("LOCK_NOT_FOUND", LostReason::NotFound),
            ("LOCK_EXPIRED", LostReason::Expired),
            ("NOT_OWNER", LostReason::NotOwner),
            ("TOKEN_SUPERSEDED", LostReason::TokenSuperseded),
            ("TOKEN_UNKNOWN", LostReason::TokenUnknown),
        ] {
            for code in [
                Code::NotFound,
                Code::Aborted,
                Code::PermissionDenied,
                Code::Unknown,
            ] {
                let error = decode(&status(code, ERROR_DOMAIN, reason));
                assert_eq!(error, Lost { reason: lost });
                assert!(!error.is_transient() && !error.may_have_happened());
            }
        }
        let spent = decode(&status(Code::Aborted, ERROR_DOMAIN, "REQUEST_SPENT"));
        assert_eq!(spent, RequestSpent);
        assert_eq!(
            decode(&status(Code::DeadlineExceeded, ERROR_DOMAIN, "DEADLINE")),
            TimedOut
        );
    }

    #[test]
    fn a_terminal_code_that_is_not_ours_is_transient() {
        for code in [
            Code::NotFound,
            Code::Aborted,
            Code::PermissionDenied,
            Code::Internal,
        ] {
            assert!(
                decode(&Status::new(code, "proxy")).is_transient(),
                "{code:?}"
            );
            let foreign = status(code, "example.com", "LOCK_NOT_FOUND");
            assert!(decode(&foreign).is_transient(), "{code:?}");
            let newer = status(code, ERROR_DOMAIN, "SOMETHING_NEW");
            assert!(decode(&newer).is_transient(), "{code:?}");
        }
    }

    #[test]
    fn what_need_not_be_repeated() {
        for code in [
            Code::Unimplemented,
            Code::Unauthenticated,
            Code::InvalidArgument,
        ] {
            let error = decode(&Status::new(code, "no"));
            assert!(matches!(&error, Rejected { .. }) && !error.is_transient());
        }
        let bug = decode(&status(Code::Internal, ERROR_DOMAIN, "INTERNAL"));
        assert!(matches!(&bug, Internal { .. }) && bug.may_have_happened());
    }

    #[test]
    fn what_may_be_repeated() {
        for reason in ["STORE_UNAVAILABLE", "DRAINING", "REOPEN"] {
            assert!(decode(&status(Code::Unavailable, ERROR_DOMAIN, reason)).is_transient());
        }
        assert!(
            decode(&status(Code::ResourceExhausted, ERROR_DOMAIN, "OVERLOADED")).is_transient()
        );
    }

    #[test]
    fn field_violations_are_named() {
        let mut details =
            ErrorDetails::with_error_info("INVALID_REQUEST", ERROR_DOMAIN, HashMap::new());
        details.add_bad_request_violation("ttl", "too short");
        details.add_bad_request_violation("owner", "empty");
        let status = Status::with_error_details(Code::InvalidArgument, "constant", details);
        let error = decode(&status);
        assert_eq!(
            error.to_string(),
            "invalid request: ttl: too short; owner: empty"
        );
    }
}
