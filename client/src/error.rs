//! What can go wrong, by what it means for the caller.

use std::fmt;

use fencepost_proto::v1::reason;

use crate::Holder;

/// Why a call did not succeed. Each displays as one line.
///
/// A lease is over only when it is [`Lost`](Self::Lost). After every other
/// error it stands until its own deadline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another owner has the lock. Not a failure, and said at once; the calls of
    /// [`Calls`](crate::Calls) have a value for it instead.
    #[error("{} has the lock, for another {:.3?} unless it renews or releases", .holder.owner, .holder.remaining)]
    Refused {
        /// Who has it, and for how long.
        holder: Holder,
    },

    /// The lease is over, or never was the caller's: stop working. Repeating
    /// the call does not help.
    #[error("{reason}")]
    Lost {
        /// In which way it is over.
        reason: LostReason,
    },

    /// The `request_id` was used before, and the lease it got has since been
    /// renewed, released or has expired. A caller that still wants the lock
    /// uses a new id.
    #[error(
        "this request id was used before, and its lease was renewed, released or has expired: \
         use a new one (REQUEST_SPENT)"
    )]
    RequestSpent,

    /// The server refused the request as malformed or out of range. Repeating
    /// the call does not help.
    #[error("invalid request{}", list(.violations))]
    Invalid {
        /// Which fields, and why. May be empty.
        violations: Vec<FieldViolation>,
    },

    /// No server could do it now: unreachable, draining, overloaded, or its
    /// database is away. The call **may have happened**: repeat the same call.
    #[error("not available now: {detail}")]
    Unavailable {
        /// The server's reason or the network's error, for people.
        detail: String,
    },

    /// No answer within the time given. The call **may have happened**: repeat
    /// the same call.
    #[error("no answer in time")]
    TimedOut,

    /// Whatever answered does not offer this call to this caller: not a
    /// Fencepost server, an older one, or something in between that wants
    /// credentials. Repeating the call does not help.
    #[error("the call was rejected: {detail}")]
    Rejected {
        /// The gRPC code and message, for people.
        detail: String,
    },

    /// A bug, in the server or in this library. The call may have happened.
    #[error("internal error: {detail}")]
    Internal {
        /// What was seen, for the report.
        detail: String,
    },
}

impl Error {
    /// Whether the same call may succeed when it is repeated.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::TimedOut => true,
            Self::Refused { .. }
            | Self::Lost { .. }
            | Self::RequestSpent
            | Self::Invalid { .. }
            | Self::Rejected { .. }
            | Self::Internal { .. } => false,
        }
    }

    /// Whether the call may have had its effect all the same.
    #[must_use]
    pub fn may_have_happened(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::TimedOut | Self::Internal { .. } => true,
            Self::Refused { .. }
            | Self::Lost { .. }
            | Self::RequestSpent
            | Self::Invalid { .. }
            | Self::Rejected { .. } => false,
        }
    }
}

/// In which way a lease is over. Each is final: what the server said, or that it
/// said nothing for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// `LOCK_NOT_FOUND`: it was released, or has ended and the lock was taken
    /// since, or there never was one.
    NotFound,
    /// `LOCK_EXPIRED`: its time was up before it was renewed.
    Expired,
    /// `NOT_OWNER`: another owner holds the lock.
    NotOwner,
    /// `TOKEN_SUPERSEDED`: the same owner acquired it again, with a newer token.
    TokenSuperseded,
    /// `TOKEN_UNKNOWN`: the database has forgotten the lease in a failover.
    TokenUnknown,
    /// `UNCONFIRMED`: no renewal was confirmed before its deadline came near, by
    /// the holder's own clock. Somebody else may have the lock by now.
    Unconfirmed,
}

impl LostReason {
    /// All that there are.
    pub const ALL: &[Self] = &[
        Self::NotFound,
        Self::Expired,
        Self::NotOwner,
        Self::TokenSuperseded,
        Self::TokenUnknown,
        Self::Unconfirmed,
    ];

    /// The reason as the contract spells it, such as `LOCK_EXPIRED`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => reason::LOCK_NOT_FOUND,
            Self::Expired => reason::LOCK_EXPIRED,
            Self::NotOwner => reason::NOT_OWNER,
            Self::TokenSuperseded => reason::TOKEN_SUPERSEDED,
            Self::TokenUnknown => reason::TOKEN_UNKNOWN,
            Self::Unconfirmed => "UNCONFIRMED",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self {
            Self::NotFound => "the lease does not exist, or no longer",
            Self::Expired => "the lease has expired",
            Self::NotOwner => "another owner holds the lock",
            Self::TokenSuperseded => "the same owner acquired the lock again, with a newer token",
            Self::TokenUnknown => {
                "the server never gave this token, or a failover or a restore forgot its lease"
            }
            Self::Unconfirmed => {
                "no renewal was confirmed before the lease's deadline: it counts as lost"
            }
        };
        write!(f, "{meaning} ({})", self.as_str())
    }
}

/// One field of a request, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FieldViolation {
    /// The field by its name in the contract, such as `ttl`.
    pub field: String,
    /// What is wrong with it.
    pub description: String,
}

/// `: ttl: too short; owner: empty`, or nothing.
fn list(violations: &[FieldViolation]) -> String {
    let mut text = String::new();
    for FieldViolation { field, description } in violations {
        text += if text.is_empty() { ": " } else { "; " };
        text += field;
        text += ": ";
        text += description;
    }
    text
}
