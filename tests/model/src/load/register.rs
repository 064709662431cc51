//! The fenced register: a log that can only be written together with `admit`.

use std::time::Duration;

use fencepost_client::fence::{ADMIT, POSTGRES_KIT};
use fencepost_support::postgres::Client;
use tokio::time::timeout;

use super::{Error, PATIENCE};
use crate::{
    history::{Admitted, Call, Outcome, Via},
    recorder::{Caller, Recorder},
};

/// `place` is drawn under the lock that `admit` takes, so it tells the order of the
/// commits of a resource.
const TABLE: &str = "
CREATE SCHEMA IF NOT EXISTS model;
CREATE TABLE IF NOT EXISTS model.register (
    place    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    resource text   NOT NULL,
    token    bigint NOT NULL,
    op       bigint NOT NULL
)";

const INSERT: &str = "INSERT INTO model.register (resource, token, op) VALUES ($1, $2, $3)";

const LOG: &str =
    "SELECT resource, token, op FROM model.register WHERE resource = ANY ($1) ORDER BY place";

/// Installs the fencing kit and the table.
pub(super) async fn install(url: &str) -> Result<(), Error> {
    let client = Client::connect(url).await?;
    client.batch_execute(POSTGRES_KIT).await?;
    client.batch_execute(TABLE).await?;
    Ok(())
}

/// What was written, in the order of the commits.
pub(super) async fn log(url: &str, resources: &[String]) -> Result<Vec<Admitted>, Error> {
    let client = timeout(PATIENCE * 2, Client::connect(url)).await??;
    let rows = client.query(LOG, &[&resources]).await?;
    let line = |row: tokio_postgres::Row| {
        Ok(Admitted {
            resource: row.try_get(0)?,
            token: row.try_get(1)?,
            op: u64::try_from(row.try_get::<_, i64>(2)?)?,
        })
    };
    rows.into_iter().map(line).collect()
}

/// One client's connection.
#[derive(Debug)]
pub(super) struct Writer {
    url: String,
    client: Option<Client>,
}

impl Writer {
    pub(super) fn new(url: String) -> Self {
        Self { url, client: None }
    }

    /// Writes once, and records it.
    pub(super) async fn write(
        &mut self,
        recorder: &Recorder,
        number: usize,
        resource: &str,
        owner: &str,
        token: i64,
    ) {
        let caller = Caller {
            client: number,
            via: Via::Register,
            resource: resource.to_owned(),
            owner: owner.to_owned(),
        };
        let id = recorder.next_id();
        let sent = recorder.now();
        let attempt = timeout(PATIENCE, self.attempt(resource, token, id)).await;
        let outcome = attempt.unwrap_or_else(|_| Outcome::Unknown("no answer in time".to_owned()));
        if matches!(outcome, Outcome::Unknown(_)) {
            self.client = None;
        }
        recorder.record(id, &caller, Call::Write { token }, sent, outcome);
    }

    async fn attempt(&mut self, resource: &str, token: i64, op: u64) -> Outcome {
        let unknown = |error: tokio_postgres::Error| Outcome::Unknown(error.to_string());
        if self.client.is_none() {
            match timeout(Duration::from_secs(2), Client::connect(&self.url)).await {
                Ok(Ok(client)) => self.client = Some(client),
                Ok(Err(error)) => return unknown(error),
                Err(_) => return Outcome::Unknown("no connection in time".to_owned()),
            }
        }
        let Some(client) = &self.client else {
            return Outcome::Unknown("no connection".to_owned());
        };
        match transaction(client, resource, token, op).await {
            Ok(()) => match client.batch_execute("COMMIT").await {
                Ok(()) => Outcome::Done,
                Err(error) => unknown(error),
            },
            // Nothing of it was committed.
            Err(error) => match (error.code(), client.batch_execute("ROLLBACK").await) {
                (Some(code), Ok(())) => Outcome::No(code.code().to_owned()),
                _ => unknown(error),
            },
        }
    }
}

/// All but the commit.
async fn transaction(
    client: &Client,
    resource: &str,
    token: i64,
    op: u64,
) -> Result<(), tokio_postgres::Error> {
    client.batch_execute("BEGIN").await?;
    client.execute(ADMIT, &[&resource, &token]).await?;
    let op = op.cast_signed();
    client.execute(INSERT, &[&resource, &token, &op]).await?;
    Ok(())
}
