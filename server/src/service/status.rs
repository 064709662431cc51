//! The error table of the contract: the one place that makes a `Status`.
//!
//! A caller gets a constant message and machine-readable details; the cause
//! goes to the log, here, once. Every `match` is exhaustive, so that a new
//! error does not compile until somebody has chosen its answer.

#![expect(clippy::disallowed_methods, reason = "their one home")]
#![deny(clippy::wildcard_enum_match_arm)]

use std::{collections::HashMap, time::Duration};

use fencepost_proto::v1::{ERROR_DOMAIN, reason};
use tonic::{Code, Status, metadata::MetadataValue};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

use crate::{
    keep_alive::End,
    lock::{AcquireError, GetError, Loss, Outage, ReleaseError, RenewError, Resource},
    telemetry::{Chain, Seldom},
};

/// A row of the error table.
struct Answer {
    code: Code,
    reason: &'static str,
    message: &'static str,
    retry: Retry,
}

enum Retry {
    /// Repeating the same call gives the same answer.
    No,
    /// The same call may be repeated, after about this long.
    After(Duration),
}

const SOON: Retry = Retry::After(Duration::from_millis(200));
const LATER: Retry = Retry::After(Duration::from_secs(1));

const INVALID: Answer = Answer {
    code: Code::InvalidArgument,
    reason: reason::INVALID_REQUEST,
    message: "the request is not valid",
    retry: Retry::No,
};
const UNAVAILABLE: Answer = Answer {
    code: Code::Unavailable,
    reason: reason::STORE_UNAVAILABLE,
    message: "the store is unavailable; the call may have happened, repeat it",
    retry: SOON,
};
const DRAINING: Answer = Answer {
    code: Code::Unavailable,
    reason: reason::DRAINING,
    message: "this server is stopping, repeat the call elsewhere",
    retry: SOON,
};
const REOPEN: Answer = Answer {
    code: Code::Unavailable,
    reason: reason::REOPEN,
    message: "the stream's time is over, open the next one",
    retry: SOON,
};
const OVERLOADED: Answer = Answer {
    code: Code::ResourceExhausted,
    reason: reason::OVERLOADED,
    message: "too much is in flight, back off",
    retry: LATER,
};
const DEADLINE: Answer = Answer {
    code: Code::DeadlineExceeded,
    reason: reason::DEADLINE,
    message: "the call took too long; it may have happened, repeat it",
    retry: SOON,
};
const INTERNAL: Answer = Answer {
    code: Code::Internal,
    reason: reason::INTERNAL,
    message: "internal error",
    retry: Retry::No,
};
const NOT_FOUND: Answer = Answer {
    code: Code::NotFound,
    reason: reason::LOCK_NOT_FOUND,
    message: "the lock is not held",
    retry: Retry::No,
};
const EXPIRED: Answer = Answer {
    code: Code::Aborted,
    reason: reason::LOCK_EXPIRED,
    message: "the lease has expired",
    retry: Retry::No,
};
const NOT_OWNER: Answer = Answer {
    code: Code::Aborted,
    reason: reason::NOT_OWNER,
    message: "the lock is held by another owner",
    retry: Retry::No,
};
const SUPERSEDED: Answer = Answer {
    code: Code::Aborted,
    reason: reason::TOKEN_SUPERSEDED,
    message: "a newer lease of the same owner holds the lock",
    retry: Retry::No,
};
const TOKEN_UNKNOWN: Answer = Answer {
    code: Code::Aborted,
    reason: reason::TOKEN_UNKNOWN,
    message: "the token is larger than any that the store has given",
    retry: Retry::No,
};
const REQUEST_SPENT: Answer = Answer {
    code: Code::Aborted,
    reason: reason::REQUEST_SPENT,
    message: "the lease of this request_id was renewed, released or has expired; use a new id",
    retry: Retry::No,
};

impl Answer {
    fn details(&self, resource: Option<&Resource>) -> ErrorDetails {
        let metadata =
            resource.map(|resource| ("resource".to_owned(), resource.as_str().to_owned()));
        let mut details = ErrorDetails::with_error_info(
            self.reason,
            ERROR_DOMAIN,
            metadata.into_iter().collect::<HashMap<_, _>>(),
        );
        if let Retry::After(wait) = self.retry {
            details.set_retry_info(Some(wait));
        }
        details
    }

    fn status(&self, resource: Option<&Resource>) -> Status {
        self.with(self.details(resource))
    }

    fn with(&self, details: ErrorDetails) -> Status {
        let mut status = Status::with_error_details(self.code, self.message, details);
        if let Retry::After(wait) = self.retry {
            // Spread, so that callers who failed together do not return together.
            let spread = wait.mul_f64(rand::random_range(0.5..1.5));
            let millis = u64::try_from(spread.as_millis()).unwrap_or(u64::MAX);
            status
                .metadata_mut()
                .insert("grpc-retry-pushback-ms", MetadataValue::from(millis));
        }
        status
    }
}

/// Fields that are not valid; each violation names its field.
pub(super) fn invalid(violations: Vec<FieldViolation>) -> Status {
    let mut details = INVALID.details(None);
    details.set_bad_request(violations);
    INVALID.with(details)
}

pub(super) fn acquire(error: AcquireError, resource: &Resource) -> Status {
    match error {
        AcquireError::RequestSpent => REQUEST_SPENT.status(Some(resource)),
        AcquireError::Outage(outage) => self::outage(&outage, resource),
    }
}

pub(super) fn release(error: ReleaseError, resource: &Resource) -> Status {
    match error {
        ReleaseError::NotFound => NOT_FOUND.status(Some(resource)),
        // The one place where the code says more than ABORTED: it exists, and
        // you do not hold it.
        ReleaseError::NotOwner => Answer {
            code: Code::PermissionDenied,
            ..NOT_OWNER
        }
        .status(Some(resource)),
        ReleaseError::Superseded => SUPERSEDED.status(Some(resource)),
        ReleaseError::TokenUnknown => token_unknown(resource),
        ReleaseError::Outage(outage) => self::outage(&outage, resource),
    }
}

pub(super) fn renew(error: RenewError, resource: &Resource) -> Status {
    match error {
        RenewError::Lost(loss) => lost(loss, resource),
        RenewError::Outage(outage) => self::outage(&outage, resource),
    }
}

fn lost(loss: Loss, resource: &Resource) -> Status {
    match loss {
        Loss::NotFound => NOT_FOUND.status(Some(resource)),
        Loss::Expired => EXPIRED.status(Some(resource)),
        Loss::NotOwner => NOT_OWNER.status(Some(resource)),
        Loss::Superseded => SUPERSEDED.status(Some(resource)),
        Loss::TokenUnknown => token_unknown(resource),
    }
}

/// A stream that could not be opened.
pub(super) fn keep_alive(outage: Outage, resource: &Resource) -> Status {
    self::outage(&outage, resource)
}

/// The end of a stream: never OK.
pub(super) fn end(end: End, resource: &Resource) -> Status {
    match end {
        End::Lost(loss) => lost(loss, resource),
        End::Unavailable => UNAVAILABLE.status(Some(resource)),
        End::Reopen => REOPEN.status(Some(resource)),
        End::Deadline => DEADLINE.status(Some(resource)),
        End::Draining => DRAINING.status(Some(resource)),
    }
}

pub(super) fn get(error: GetError, resource: &Resource) -> Status {
    match error {
        GetError::NotFound => NOT_FOUND.status(Some(resource)),
        GetError::Outage(outage) => self::outage(&outage, resource),
    }
}

fn token_unknown(resource: &Resource) -> Status {
    const FORGOTTEN: &str = "a caller showed a token larger than any that was given: a failover or a restore forgot its lease";
    // Callers can make tokens up, and the queue of the log is bounded. All are counted.
    static SELDOM: Seldom = Seldom::new();
    let resource_name = resource.as_str();
    if SELDOM.passes() {
        tracing::error!(resource = resource_name, "{FORGOTTEN}");
    } else {
        tracing::debug!(resource = resource_name, "{FORGOTTEN}");
    }
    TOKEN_UNKNOWN.status(Some(resource))
}

fn outage(outage: &Outage, resource: &Resource) -> Status {
    let answer = match outage {
        Outage::Unavailable(cause) => {
            // Health is logged when it changes; this is one call of many.
            static SELDOM: Seldom = Seldom::new();
            if SELDOM.passes() {
                tracing::warn!(error = %Chain(cause.as_ref()), "a call met an unavailable store");
            } else {
                tracing::debug!(error = %Chain(cause.as_ref()), "a call met an unavailable store");
            }
            UNAVAILABLE
        }
        Outage::Deadline => DEADLINE,
        Outage::Overloaded => OVERLOADED,
        Outage::Draining => DRAINING,
        Outage::Internal(cause) => {
            tracing::error!(error = %Chain(cause.as_ref()), "internal error");
            INTERNAL
        }
    };
    answer.status(Some(resource))
}

/// The call's time is over.
pub(super) fn deadline() -> Status {
    DEADLINE.status(None)
}

/// The connection has too many calls open.
pub(super) fn overloaded() -> Status {
    OVERLOADED.status(None)
}

/// A health check names a service that this server does not have.
pub(super) fn unknown_service() -> Status {
    Status::not_found("unknown service")
}

/// What tonic answered by itself, without our details, as the contract has it.
/// None when its own answer stands.
pub(super) fn rewrite(code: Code) -> Option<Status> {
    match code {
        // A message that does not decode (invalid UTF-8), or is too large.
        Code::Internal | Code::OutOfRange | Code::ResourceExhausted => Some(INVALID.status(None)),
        // tonic's own timer on `grpc-timeout`.
        Code::Cancelled => Some(DEADLINE.status(None)),
        Code::Ok
        | Code::Unknown
        | Code::InvalidArgument
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::Unimplemented
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => None,
    }
}
