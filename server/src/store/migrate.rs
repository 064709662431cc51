//! The schema, made and brought up to date by whoever starts first.
//!
//! All pending migrations run in one transaction, under an advisory lock of
//! that transaction which is polled and never waited for: a replica that is
//! killed leaves nothing behind, and nobody holds a snapshot while waiting. A
//! change waits only briefly for a table lock before it gives way and tries
//! again, since a waiting change would queue every renewal behind it.
//!
//! Old and new replicas run side by side: a migration only adds, and a server
//! accepts a schema that is newer than itself.

use std::{ops::RangeInclusive, time::Duration};

use tokio::time::{Instant, timeout_at};
use tokio_postgres::{Client, SimpleQueryMessage};

use super::{
    config::{DatabaseUrl, StoreConfig},
    connection::{Hosts, OwnConnection},
    failure::{is_missing_schema, is_passing_conflict, is_refused_option},
    statement,
};

/// In order; a migration that has shipped is never changed.
const MIGRATIONS: &[(i32, &str, &str)] = &[
    (1, "locks", include_str!("migrations/0001_locks.sql")),
    (2, "rounds", include_str!("migrations/0002_rounds.sql")),
    (3, "held", include_str!("migrations/0003_held.sql")),
    (4, "ended", include_str!("migrations/0004_ended.sql")),
];

/// "fencepos" in ASCII: the advisory lock of migrations.
const ADVISORY_LOCK: i64 = 0x6665_6e63_6570_6f73;

/// The major versions of PostgreSQL that the tests run on.
const TESTED: RangeInclusive<i32> = 14..=18;

/// Why the database cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MigrateError {
    #[error("there is no Fencepost schema in this database: is it the right one?")]
    NoSchema,
    #[error("the database cannot be connected to")]
    Away(#[source] tokio_postgres::Error),
    #[error("the database is PostgreSQL {0}, and the oldest that is supported is {oldest}", oldest = TESTED.start())]
    TooOld(i32),
    #[error("the database's encoding is {0}, and names need UTF8")]
    NotUtf8(String),
    #[error("the database is a standby or read-only")]
    ReadOnly,
    #[error(
        "the database runs with fsync=off and would forget tokens in a crash (--allow-fsync-off for a toy)"
    )]
    FsyncOff,
    #[error("the schema could not be migrated")]
    Failed(#[from] tokio_postgres::Error),
    #[error(
        "a pooler keeps our settings from the database: give --pgbouncer, or connect without a pooler"
    )]
    Pooler,
    #[error(
        "the schema \"fencepost\" belongs to another role, in whole or in part: {0}. Its owner could put code \
         into it that we would run: connect as that role, or drop what is not yours"
    )]
    Strangers(String),
    #[error("the database did not answer in time")]
    TimedOut,
    #[error("another replica's migration did not end in time")]
    Busy,
}

/// What to do about a schema that is missing or old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schema {
    Migrate,
    /// It must be there: whoever mends a database has named the wrong one else.
    Expect,
}

/// Checks the database and brings its schema up to date, within `budget`.
/// Returns the schema's version before and after.
pub(crate) async fn migrate(
    url: &DatabaseUrl,
    config: &StoreConfig,
    schema: Schema,
    budget: Duration,
) -> Result<(i32, i32), MigrateError> {
    let deadline = Instant::now() + budget;
    let hosts = Hosts::new(url, config);
    let connection = timeout_at(deadline, OwnConnection::open(&hosts))
        .await
        .map_err(|_| MigrateError::TimedOut)?
        .map_err(|error| {
            if is_refused_option(&error) {
                MigrateError::Pooler
            } else {
                MigrateError::Away(error)
            }
        })?;
    timeout_at(deadline, check(&connection.client, config))
        .await
        .map_err(|_| MigrateError::TimedOut)??;
    if schema == Schema::Expect {
        refuse_strangers(&connection.client).await?;
        return match version(&connection.client).await {
            Ok(0) => Err(MigrateError::NoSchema),
            Ok(version) => Ok((version, version)),
            Err(error) => Err(MigrateError::Failed(error)),
        };
    }
    let work = async {
        loop {
            if let Some(versions) = try_migrate(&connection.client).await? {
                return Ok(versions);
            }
            tokio::time::sleep(Duration::from_millis(rand::random_range(50..150))).await;
        }
    };
    timeout_at(deadline, work)
        .await
        .unwrap_or(Err(MigrateError::Busy))
}

async fn check(client: &Client, config: &StoreConfig) -> Result<(), MigrateError> {
    let rows = client
        .query_typed(statement::CHECK.sql, &[])
        .await
        .map_err(MigrateError::Away)?;
    let row = rows.first().ok_or(MigrateError::TimedOut)?;
    let get = |error| MigrateError::Failed(error);
    let version: i32 = row.try_get("version").map_err(get)?;
    let encoding: String = row.try_get("encoding").map_err(get)?;
    if !config.pgbouncer && !row.try_get::<_, bool>("configured").map_err(get)? {
        return Err(MigrateError::Pooler);
    }
    let fit = fit(version)?;
    if encoding != "UTF8" {
        return Err(MigrateError::NotUtf8(encoding));
    }
    if row.try_get("read_only").map_err(get)? {
        return Err(MigrateError::ReadOnly);
    }
    if !row.try_get::<_, bool>("fsync").map_err(get)? && !config.allow_fsync_off {
        return Err(MigrateError::FsyncOff);
    }
    if let Fit::Newer(version) = fit {
        tracing::warn!(
            version,
            "this PostgreSQL is newer than any the tests have seen"
        );
    }
    Ok(())
}

/// Whether a database's version is one to serve on.
#[derive(Debug, PartialEq, Eq)]
enum Fit {
    Tested,
    /// Its major version. Nothing is known against it.
    Newer(i32),
}

/// Judges `server_version_num`, such as 150018 for 15.18.
fn fit(version: i32) -> Result<Fit, MigrateError> {
    let major = version / 10_000;
    if TESTED.contains(&major) {
        Ok(Fit::Tested)
    } else if major > *TESTED.end() {
        Ok(Fit::Newer(major))
    } else {
        Err(MigrateError::TooOld(major))
    }
}

/// One try. None when another replica is at it, or a table stayed locked.
async fn try_migrate(client: &Client) -> Result<Option<(i32, i32)>, MigrateError> {
    let latest = MIGRATIONS.last().map_or(0, |(version, ..)| *version);
    refuse_strangers(client).await?;
    let found = match version(client).await {
        Ok(found) => found,
        Err(error) if is_passing_conflict(&error) => return Ok(None),
        Err(error) => return Err(MigrateError::Failed(error)),
    };
    if found >= latest {
        return Ok(Some((found, found)));
    }
    match apply(client, latest).await {
        Ok(done) => Ok(done),
        Err(error) => {
            // Ends the failed transaction; its own failure changes nothing.
            let _ = client.batch_execute("ROLLBACK").await;
            match error {
                MigrateError::Failed(error) if is_passing_conflict(&error) => Ok(None),
                other => Err(other),
            }
        }
    }
}

/// Before anything of the schema is used: a view or a trigger would do to run
/// another's code.
async fn refuse_strangers(client: &Client) -> Result<(), MigrateError> {
    match single(client, statement::STRANGERS.sql).await {
        Ok(None) => Ok(()),
        Ok(Some(what)) => Err(MigrateError::Strangers(what)),
        Err(error) => Err(MigrateError::Failed(error)),
    }
}

/// Simple queries throughout: they need no session state, so that PgBouncer
/// may stand in between.
async fn apply(client: &Client, latest: i32) -> Result<Option<(i32, i32)>, MigrateError> {
    client
        .batch_execute(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'; \
             SET LOCAL statement_timeout = '60s'; SET LOCAL synchronous_commit = 'on'; \
             SET LOCAL client_min_messages = 'warning'; SET LOCAL search_path = 'pg_catalog'",
        )
        .await?;
    let locked = single(
        client,
        &format!("SELECT pg_try_advisory_xact_lock({ADVISORY_LOCK})"),
    )
    .await?;
    if locked.as_deref() != Some("t") {
        client.batch_execute("ROLLBACK").await?;
        return Ok(None);
    }
    client
        .batch_execute(
            "CREATE SCHEMA IF NOT EXISTS fencepost; \
             CREATE TABLE IF NOT EXISTS fencepost.migrations ( \
                 version integer PRIMARY KEY, name text NOT NULL, \
                 applied_at timestamptz NOT NULL DEFAULT clock_timestamp())",
        )
        .await?;
    // Somebody may have made them meanwhile.
    refuse_strangers(client).await?;
    let found = current_version(client).await?;
    for (version, name, sql) in MIGRATIONS.iter().filter(|(version, ..)| *version > found) {
        client.batch_execute(sql).await?;
        client
            .batch_execute(&format!(
                "INSERT INTO fencepost.migrations (version, name) VALUES ({version}, '{name}')"
            ))
            .await?;
    }
    client.batch_execute("COMMIT").await?;
    Ok(Some((found, found.max(latest))))
}

/// The schema's version; 0 when there is none.
async fn version(client: &Client) -> Result<i32, tokio_postgres::Error> {
    match current_version(client).await {
        Err(error) if is_missing_schema(&error) => Ok(0),
        other => other,
    }
}

async fn current_version(client: &Client) -> Result<i32, tokio_postgres::Error> {
    let version = single(client, "SELECT max(version) FROM fencepost.migrations").await?;
    Ok(version
        .and_then(|version| version.parse().ok())
        .unwrap_or(0))
}

async fn single(client: &Client, sql: &str) -> Result<Option<String>, tokio_postgres::Error> {
    let messages = client.simple_query(sql).await?;
    Ok(messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::{Fit, MigrateError, fit};

    #[test]
    fn versions_that_were_tested_pass_newer_ones_are_told_and_older_ones_refused() {
        for tested in [140_000, 150_018, 180_006, 189_999] {
            assert!(matches!(fit(tested), Ok(Fit::Tested)), "{tested}");
        }
        assert!(matches!(fit(190_000), Ok(Fit::Newer(19))));
        for old in [90_624, 130_023, 139_999] {
            let Err(error @ MigrateError::TooOld(_)) = fit(old) else {
                panic!("{old} is served");
            };
            let text = error.to_string();
            assert!(text.contains(&(old / 10_000).to_string()), "{text}");
            assert!(text.ends_with("is 14"), "{text}");
        }
    }
}
