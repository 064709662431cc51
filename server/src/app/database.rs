//! The database that a command works with, ready for it.

use std::time::Duration;

use super::AppError;
use crate::{
    config::DatabaseSource,
    private_postgres::PrivatePostgres,
    store::{self, DatabaseUrl, Schema, StoreConfig},
    telemetry::Chain,
};

/// How long a start waits for the schema, which another replica may be making.
const START_BUDGET: Duration = Duration::from_secs(30);

/// A database to work with.
pub(super) struct Database {
    pub(super) url: DatabaseUrl,
    pub(super) private: Option<PrivatePostgres>,
}

impl Database {
    /// Starts the private Postgres if there is one, and brings the schema up to date.
    pub(super) async fn open(
        source: DatabaseSource,
        config: &StoreConfig,
        schema: Schema,
    ) -> Result<Self, AppError> {
        let database = match source {
            DatabaseSource::Url(url) => {
                tracing::info!(at = url.place(), "the database");
                Self { url, private: None }
            }
            DatabaseSource::Private(dir) => {
                let postgres = PrivatePostgres::start(&dir).await?;
                tracing::info!(url = postgres.url(), data_dir = %dir.display(), "private postgres ready");
                tracing::info!("no other server shares its locks");
                Self {
                    url: postgres.url().parse()?,
                    private: Some(postgres),
                }
            }
        };
        match store::migrate(&database.url, config, schema, START_BUDGET).await {
            Ok((before, after)) => {
                if before == after {
                    tracing::info!(version = after, "schema is up to date");
                } else {
                    tracing::info!(before, after, "schema migrated");
                }
                Ok(database)
            }
            Err(error) => {
                database.close().await;
                Err(error.into())
            }
        }
    }

    pub(super) async fn close(self) {
        if let Some(postgres) = self.private
            && let Err(error) = postgres.stop().await
        {
            tracing::warn!(error = %Chain(&error), "the private Postgres did not stop");
        }
    }
}
