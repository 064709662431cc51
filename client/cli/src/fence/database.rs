//! The database that holds the data: how it is found, and what is asked of it.

use std::{fs, path::PathBuf};

use fencepost_client::fence::POSTGRES_KIT;
use fencepost_tls::postgres::{self, BadUrl, PostgresTls};
use tokio_postgres::{Client, Config, config::TargetSessionAttrs, error::SqlState};

use crate::{
    exit::{Exit, Failure},
    output::Seen,
};

/// Why a subcommand of `fence` failed. Says nothing of what is in a URL.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FenceFailure {
    #[error(
        "no database: give --database-url, --database-url-file or FENCEPOST_FENCE_DATABASE_URL"
    )]
    NoUrl,
    #[error("the file of the database URL cannot be read: {0}")]
    UrlFile(std::io::Error),
    #[error(transparent)]
    Url(#[from] BadUrl),
    #[error("the database is not available: {0}")]
    Away(Cause),
    #[error("no answer from the database in time; it may have happened all the same")]
    TimedOut,
    #[error("the fencing kit is not installed there: run `fencepost fence install`")]
    NotInstalled,
    #[error("the database refuses: {0}")]
    Denied(Cause),
    #[error("the database refuses the value: {0}")]
    Value(Cause),
    #[error("the database failed: {0}")]
    Failed(Cause),
}

/// An error of the driver in one line, with what the database said of it.
#[derive(Debug)]
pub(crate) struct Cause(tokio_postgres::Error);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(error) = self.0.as_db_error() {
            return write!(f, "{} ({})", error.message(), error.code().code());
        }
        match std::error::Error::source(&self.0) {
            Some(source) => write!(f, "{source}"),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FenceFailure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::NoUrl
            | Self::UrlFile(_)
            | Self::Url(_)
            | Self::NotInstalled
            | Self::Denied(_) => Exit::Configuration,
            Self::Away(_) | Self::TimedOut => Exit::Unavailable,
            Self::Value(_) => Exit::Usage,
            Self::Failed(_) => Exit::Bug,
        }
    }
}

impl From<tokio_postgres::Error> for FenceFailure {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(code) = error.code().cloned() else {
            return Self::Away(Cause(error));
        };
        let cause = Cause(error);
        match code {
            SqlState::INVALID_SCHEMA_NAME
            | SqlState::UNDEFINED_FUNCTION
            | SqlState::UNDEFINED_TABLE => Self::NotInstalled,
            SqlState::INSUFFICIENT_PRIVILEGE
            | SqlState::DUPLICATE_SCHEMA
            | SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE => Self::Denied(cause),
            SqlState::INVALID_PARAMETER_VALUE | SqlState::NO_DATA_FOUND => Self::Value(cause),
            // Connections, transactions to be repeated, resources, an operator.
            code if ["08", "25", "40", "53", "55", "57"].contains(&&code.code()[..2]) => {
                Self::Away(cause)
            }
            _ => Self::Failed(cause),
        }
    }
}

impl From<FenceFailure> for Failure {
    fn from(failure: FenceFailure) -> Self {
        Self::Fence(failure)
    }
}

/// One connection. Its task goes with the program.
pub(super) struct Database(Client);

impl Database {
    pub(super) async fn connect(
        url: Option<String>,
        file: Option<PathBuf>,
    ) -> Result<Self, FenceFailure> {
        let url = match (url, file) {
            (Some(url), _) => url,
            (None, Some(file)) => fs::read_to_string(file).map_err(FenceFailure::UrlFile)?,
            (None, None) => return Err(FenceFailure::NoUrl),
        };
        let (config, tls) = parse(&url)?;
        let connected = tls.connect(&config).await;
        // Whatever it says at this point, it cannot be used: 28P01, 3D000, …
        let (client, connection) = connected.map_err(|error| FenceFailure::Away(Cause(error)))?;
        tokio::spawn(async move {
            // Its error reaches the client's own calls.
            let _ = connection.await;
        });
        Ok(Self(client))
    }

    /// All or nothing: what is sent as one message is one transaction.
    pub(super) async fn install(&self) -> Result<(), FenceFailure> {
        Ok(self.0.batch_execute(POSTGRES_KIT).await?)
    }

    pub(super) async fn check(&self, resource: &str) -> Result<Seen, FenceFailure> {
        let row = self
            .0
            .query_opt(
                "SELECT token, admitted_at FROM fence.check($1)",
                &[&resource],
            )
            .await?;
        let rejected = self
            .0
            .query_one("SELECT fence.rejected_total()", &[])
            .await?;
        Ok(Seen {
            highest_token: row.as_ref().map_or(0, |row| row.get(0)),
            admitted_at: row.and_then(|row| row.get(1)),
            rejected_total: rejected.get(0),
        })
    }

    /// Returns the highest token that was there before.
    ///
    /// It may wait for writers. Only a commit that we send makes it so: one that we
    /// have given up on does not happen later, when newer holders have been there.
    pub(super) async fn reset(&self, resource: &str, to: Option<i64>) -> Result<i64, FenceFailure> {
        self.0.batch_execute("BEGIN").await?;
        let row = match to {
            Some(token) => {
                let sql = "SELECT fence.reset($1, $2)";
                self.0.query_one(sql, &[&resource, &token]).await?
            }
            None => {
                let sql = "SELECT fence.reset($1)";
                self.0.query_one(sql, &[&resource]).await?
            }
        };
        self.0.batch_execute("COMMIT").await?;
        Ok(row.get(0))
    }
}

fn parse(url: &str) -> Result<(Config, PostgresTls), BadUrl> {
    let (mut config, tls) = postgres::parse(url)?;
    if config.get_application_name().is_none() {
        config.application_name("fencepost fence");
    }
    // With several hosts, this finds the primary.
    config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    Ok((config, tls))
}
