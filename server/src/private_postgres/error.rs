//! What can go wrong, in the operator's words.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::programs;

/// Why the private Postgres could not be started or stopped. Each displays as
/// one line for the operator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrivatePostgresError {
    /// No usable Postgres on this machine.
    #[error(
        "no PostgreSQL (version {min} or later) is installed: give --database-url, or install one \
         (apt-get install postgresql, dnf install postgresql-server, brew install postgresql@16)",
        min = programs::MIN_MAJOR
    )]
    NotInstalled,
    /// The cluster was made by a version that is not, or no longer, installed.
    #[error(
        "the data in {} was written by PostgreSQL {version}, which is not installed \
         (apt-get install postgresql-{version})",
        .data_dir.display()
    )]
    VersionNotInstalled {
        /// The directory whose cluster needs it.
        data_dir: PathBuf,
        /// What the cluster's `PG_VERSION` says.
        version: String,
    },
    /// Another server holds the lock file.
    #[error("the data directory {} is in use by another fencepostd", .data_dir.display())]
    InUse {
        /// The directory that is taken.
        data_dir: PathBuf,
    },
    /// Started by root on a machine without the users Postgres could run as.
    #[error("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")]
    NoUnprivilegedUser,
    /// The path would have to pass through a shell, which would change it.
    #[error(
        "the data directory {} cannot be used: its path must be UTF-8 without control \
         characters and without any of \" ' $ ` \\",
        .data_dir.display()
    )]
    UnusablePath {
        /// The path as given.
        data_dir: PathBuf,
    },
    /// Somebody else could enter, or already owns, a directory that must be ours.
    #[error("{} must be a directory that only user id {uid} can enter (mode 0700)", .path.display())]
    NotPrivate {
        /// The directory in question.
        path: PathBuf,
        /// The user id that Postgres runs with.
        uid: u32,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// One of Postgres's programs failed.
    #[error("{program} failed: {detail}")]
    Failed {
        /// `initdb`, `postgres` or `pg_ctl`.
        program: &'static str,
        /// The line of its output, or of Postgres's log, that says why.
        detail: String,
    },
    /// Neither success nor failure in time.
    #[error("{what} took longer than {} s", .limit.as_secs())]
    TimedOut {
        /// The program, or what was waited for.
        what: &'static str,
        /// How long was waited.
        limit: Duration,
    },
}

/// For `map_err`: says what was tried on which path.
pub(super) fn io_error(
    action: &'static str,
    path: &Path,
) -> impl Fn(io::Error) -> PrivatePostgresError {
    let path = path.to_owned();
    move |source| PrivatePostgresError::Io {
        action,
        path: path.clone(),
        source,
    }
}
