//! What went wrong with a statement: the one module that knows SQLSTATEs.
//!
//! The question that matters is whether it may have happened. Only an ERROR
//! that Postgres itself raised for the statement says that it did not; a lost
//! connection, a server that goes away (classes 08 and 57) and a WARNING at
//! commit (a wait for the standby that was cut short) leave it open.

use std::{error::Error as StdError, io};

use tokio_postgres::error::{Severity, SqlState};

use crate::lock::Outage;

/// Why a statement gave no rows.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// It was never sent: no connection was to be had.
    #[error("no connection to the database")]
    NotSent(#[source] Box<dyn StdError + Send + Sync>),
    /// The caller's time was over before it could be sent.
    #[error("the deadline passed while waiting for a connection")]
    TooLate,
    /// Postgres refused it, and a repetition may succeed.
    #[error("the statement was refused for now")]
    Conflict(#[source] tokio_postgres::Error),
    /// The row's own check refused a token that is not above the last one.
    #[error("the sequence is behind the lock table")]
    TokenBehind(#[source] tokio_postgres::Error),
    /// This server is a standby, or was made read-only.
    #[error("the database is read-only")]
    ReadOnly(#[source] Box<dyn StdError + Send + Sync>),
    /// Postgres refused it for good: a bug, or a database that was tampered with.
    #[error("the statement was refused")]
    Refused(#[source] tokio_postgres::Error),
    /// It may have happened.
    #[error("the outcome of the statement is unknown")]
    Unknown(#[source] Box<dyn StdError + Send + Sync>),
}

/// A cause that has no error of its own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Because(pub(super) &'static str);

impl Failure {
    /// Its name in the metrics.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::NotSent(_) => "not_sent",
            Self::TooLate => "too_late",
            Self::Conflict(_) => "conflict",
            Self::TokenBehind(_) => "token_behind",
            Self::ReadOnly(_) => "read_only",
            Self::Refused(_) => "refused",
            Self::Unknown(_) => "unknown",
        }
    }

    pub(super) fn unknown(why: &'static str) -> Self {
        Self::Unknown(Box::new(Because(why)))
    }

    /// Whether the connection may serve the next statement.
    pub(super) fn keeps_connection(&self) -> bool {
        matches!(self, Self::Conflict(_) | Self::TokenBehind(_))
    }

    /// No connection was free in time.
    pub(super) fn no_connection() -> Self {
        Self::NotSent(Box::new(Because("no connection is free")))
    }

    /// Whether Postgres refused a statement of many rows, one of which may be the
    /// cause: nothing of it stands, and each goes alone.
    pub(super) fn may_be_of_one_row(&self) -> bool {
        matches!(
            self,
            Self::Conflict(_) | Self::TokenBehind(_) | Self::Refused(_)
        )
    }

    /// Whether the statement may have taken effect.
    pub(super) fn may_have_happened(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            return Self::Unknown(Box::new(error));
        };
        let code = db.code();
        match *code {
            SqlState::T_R_SERIALIZATION_FAILURE
            | SqlState::T_R_DEADLOCK_DETECTED
            | SqlState::LOCK_NOT_AVAILABLE => Self::Conflict(error),
            SqlState::CHECK_VIOLATION if db.constraint() == Some("locks_token_rises") => {
                Self::TokenBehind(error)
            }
            SqlState::READ_ONLY_SQL_TRANSACTION | SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE => {
                Self::ReadOnly(Box::new(error))
            }
            _ if may_have_happened(code, db.parsed_severity()) => Self::Unknown(Box::new(error)),
            _ => Self::Refused(error),
        }
    }
}

fn may_have_happened(code: &SqlState, severity: Option<Severity>) -> bool {
    severity != Some(Severity::Error)
        || code.code().starts_with("08")
        || code.code().starts_with("57")
}

impl From<Failure> for Outage {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::TooLate => Self::Deadline,
            // A missing function, a full disk, a permission taken away: the
            // store cannot serve, and an operator can mend it under way.
            Failure::NotSent(_)
            | Failure::Conflict(_)
            | Failure::TokenBehind(_)
            | Failure::ReadOnly(_)
            | Failure::Refused(_)
            | Failure::Unknown(_) => Self::Unavailable(Box::new(failure)),
        }
    }
}

/// Whether an error of the migration's own transaction is worth another try:
/// somebody held a lock for longer than we are willing to queue for it, or made
/// the same thing at the same time (a restore, or an administrator).
pub(super) fn is_passing_conflict(error: &tokio_postgres::Error) -> bool {
    matches!(
        error.code(),
        Some(
            &SqlState::LOCK_NOT_AVAILABLE
                | &SqlState::T_R_DEADLOCK_DETECTED
                | &SqlState::UNIQUE_VIOLATION
        )
    )
}

/// Whether a connection was refused for its start-up options, as PgBouncer does. It
/// has one SQLSTATE for all that it refuses, a database that is not there included.
pub(super) fn is_refused_option(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db| {
        *db.code() == SqlState::PROTOCOL_VIOLATION && db.message().contains("startup parameter")
    })
}

/// Whether a connection was given up by our own side, which wants to write.
pub(super) fn is_refused_as_read_only(error: &tokio_postgres::Error) -> bool {
    error
        .source()
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(|io| io.kind() == io::ErrorKind::PermissionDenied)
}

/// Whether the schema has never been made in this database.
pub(super) fn is_missing_schema(error: &tokio_postgres::Error) -> bool {
    matches!(
        error.code(),
        Some(&SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME)
    )
}
