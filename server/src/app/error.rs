//! Why the server ends, and the exit code that says so.

use std::io::ErrorKind;

use crate::{
    private_postgres::PrivatePostgresError,
    store::{self, AdvanceError, MigrateError},
};

/// sysexits(3).
pub(crate) const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
pub(crate) const BUG: u8 = 70;
pub(crate) const CONFIGURATION: u8 = 78;

/// Why the server did not run, or ended by itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AppError {
    #[error("the private Postgres")]
    PrivatePostgres(#[from] PrivatePostgresError),
    #[error("the database URL")]
    DatabaseUrl(#[from] store::BadDatabaseUrl),
    #[error("the database cannot be used")]
    Migrate(#[from] MigrateError),
    #[error("tokens were not advanced")]
    Advance(#[from] AdvanceError),
    #[error("cannot listen on {1} ({0})")]
    Listen(&'static str, std::net::SocketAddr, #[source] std::io::Error),
    #[error("signals cannot be watched")]
    Signals(#[source] std::io::Error),
    #[error("traces cannot be exported")]
    Traces(#[from] opentelemetry_otlp::ExporterBuildError),
    #[error("the store cannot be set up")]
    Store(#[from] crate::lock::Outage),
    #[error("the private Postgres has ended; a new start starts it again")]
    PrivatePostgresEnded,
    #[error("a task of the server ended by itself: {0}")]
    TaskEnded(&'static str),
}

impl AppError {
    /// sysexits(3), as the manual lists them.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // An outgoing connection may have the port for a moment, and an address may
            // come a moment after us.
            Self::Listen(.., error)
                if matches!(
                    error.kind(),
                    ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable
                ) =>
            {
                UNAVAILABLE
            }
            Self::DatabaseUrl(_) | Self::Listen(..) | Self::Traces(_) => CONFIGURATION,
            Self::PrivatePostgres(error) => match error {
                PrivatePostgresError::NotInstalled
                | PrivatePostgresError::VersionNotInstalled { .. }
                | PrivatePostgresError::InUse { .. }
                | PrivatePostgresError::NoUnprivilegedUser
                | PrivatePostgresError::UnusablePath { .. }
                | PrivatePostgresError::NotPrivate { .. } => CONFIGURATION,
                PrivatePostgresError::Io { .. }
                | PrivatePostgresError::Failed { .. }
                | PrivatePostgresError::TimedOut { .. } => UNAVAILABLE,
            },
            Self::Migrate(error) => match error {
                MigrateError::TooOld(_)
                | MigrateError::NotUtf8(_)
                | MigrateError::FsyncOff
                | MigrateError::NoSchema
                | MigrateError::Strangers(_)
                | MigrateError::Pooler => CONFIGURATION,
                MigrateError::Away(_)
                | MigrateError::ReadOnly
                | MigrateError::TimedOut
                | MigrateError::Failed(_)
                | MigrateError::Busy => UNAVAILABLE,
            },
            Self::Advance(error) => match error {
                AdvanceError::Lower { .. }
                | AdvanceError::Absurd { .. }
                | AdvanceError::Exhausted { .. } => USAGE,
                AdvanceError::Outage(_) => UNAVAILABLE,
            },
            Self::PrivatePostgresEnded => UNAVAILABLE,
            Self::Signals(_) | Self::Store(_) | Self::TaskEnded(_) => BUG,
        }
    }
}
