//! Other sessions of the same database, and settings of it. They do not mind when
//! the database is away meanwhile.

use std::time::Duration;

use fencepost_support::{eventually, postgres::Client};
use futures_util::future::join_all;
use rand::Rng as _;
use tokio::time::{sleep, timeout};

use super::{Seen, Stage, stage::counted};
use crate::{http, world::World};

/// Says how many sessions it ended.
const TERMINATE: &str = "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid))
     FROM pg_stat_activity
     WHERE datname = 'postgres' AND pid <> pg_backend_pid() AND backend_type = 'client backend'";

/// A row that the load contends for.
const HOT: &str = "(SELECT resource FROM fencepost.locks WHERE resource LIKE 'model-%'
     ORDER BY random() LIMIT 1)";

/// Somebody locks every row there is.
pub(super) async fn rows_locked(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let time = stage.time / 2;
    let mut most = 0;
    stage
        .repeat(50..200, async || {
            let Some(session) = world.session("postgres").await else {
                return;
            };
            // In the order of the server's own statements, and no longer than this
            // fault goes on.
            let lock = "BEGIN; SELECT FROM fencepost.locks ORDER BY resource FOR UPDATE";
            if let Ok(Ok(())) = timeout(time, session.batch_execute(lock)).await {
                let _ = timeout(time, async {
                    loop {
                        let waiters = waiters(world, &session).await;
                        most = most.max(waiters.unwrap_or_default());
                        sleep(Duration::from_millis(50)).await;
                    }
                })
                .await;
            }
        })
        .await;
    counted(most, "sessions at a time waited for its rows")
}

/// How many sessions wait for what this one has locked.
async fn waiters(world: &World, holder: &Client) -> Option<i64> {
    let pid: i32 = holder.try_value("SELECT pg_backend_pid()").await?;
    let waiters = format!(
        "SELECT count(*) FROM pg_stat_activity
         WHERE wait_event_type = 'Lock' AND {pid} = ANY (pg_blocking_pids(pid))"
    );
    world.session("template1").await?.try_value(&waiters).await
}

/// Somebody locks the whole table, as a rewrite of it does: statements wait in their
/// connections until those of a replica are used up.
pub(super) async fn pool_exhausted(stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let Some(session) = world.session("postgres").await else {
        stage.hold().await;
        return None;
    };
    let lock = "BEGIN; SET LOCAL lock_timeout = '1s'; LOCK TABLE fencepost.locks";
    let locking = timeout(Duration::from_secs(2), session.batch_execute(lock));
    let locked = matches!(locking.await, Ok(Ok(())));
    let look = async || {
        for replica in &world.replicas {
            let Ok(server) = replica.server.try_lock() else {
                continue;
            };
            let metrics = http::get(server.http(), "/metrics").await;
            if locked && in_use(&metrics.unwrap_or_default()) >= replica.pool_size {
                let all = replica.pool_size;
                return Some(format!("all {all} connections of a replica in use"));
            }
        }
        None
    };
    stage.watch(look).await
}

/// How many connections of a server's pool for calls have a statement under way.
fn in_use(metrics: &str) -> usize {
    let lines = metrics.lines().filter(|line| {
        let other = line.contains("state=\"idle\"");
        line.starts_with("fencepost_pool_connections{") && line.contains("\"calls\"") && !other
    });
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok());
    values.sum()
}

/// Every session is ended, again and again.
pub(super) async fn terminate_storm(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let mut ended = 0;
    stage
        .repeat(20..200, async || {
            if let Some(session) = world.session("template1").await {
                let count: Option<i64> = session.try_value(TERMINATE).await;
                ended += count.unwrap_or_default();
            }
        })
        .await;
    counted(ended, "sessions ended")
}

/// Some sessions update pairs of rows in any order, slowly: they wait for each
/// other, and for the server's statements, in circles.
pub(super) async fn deadlock_storm(stage: Stage<'_>) -> Seen {
    let update = format!("UPDATE fencepost.locks SET labels = labels WHERE resource = {HOT}");
    let statements = format!(
        "SET deadlock_timeout = '50ms';
         BEGIN; {update}; SELECT pg_sleep(0.02); {update}; SELECT pg_sleep(0.02); {update}; ROLLBACK"
    );
    let deadlocks = storm(&stage, &statements, "40P01").await;
    counted(deadlocks, "deadlocks")
}

/// Whoever does not say otherwise has serializable transactions, and some sessions do
/// not: they update rows of which they have an old snapshot.
pub(super) async fn serializable(stage: Stage<'_>) -> Seen {
    let setting = "default_transaction_isolation";
    configure(stage.world, &format!("SET {setting} = serializable"), true).await;
    let statements = format!(
        "BEGIN; SELECT count(*) FROM fencepost.locks; SELECT pg_sleep(0.05);
         UPDATE fencepost.locks SET labels = labels WHERE resource = {HOT}; ROLLBACK"
    );
    let failures = storm(&stage, &statements, "40001").await;
    configure(stage.world, &format!("RESET {setting}"), true).await;
    counted(failures, "serialization failures")
}

/// Sessions that run these statements as long as the fault goes on; how often one
/// failed with this SQLSTATE.
async fn storm(stage: &Stage<'_>, statements: &str, sqlstate: &str) -> usize {
    let failures = std::cell::Cell::new(0);
    let again = async |session: &Client| {
        let Err(error) = session.batch_execute(statements).await else {
            return true;
        };
        let failed = error.code().is_some_and(|code| code.code() == sqlstate);
        failures.set(failures.get() + usize::from(failed));
        session.batch_execute("ROLLBACK").await.is_ok()
    };
    let storms = (0..4).map(|_| async {
        loop {
            if let Some(session) = stage.world.session("postgres").await {
                while again(&session).await {}
            }
            sleep(Duration::from_millis(10)).await;
        }
    });
    let _ = timeout(stage.time, join_all(storms)).await;
    failures.get()
}

/// The database takes no writes for a while, as before a switchover.
pub(super) async fn read_only(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let setting = "default_transaction_read_only";
    configure(world, &format!("SET {setting} = on"), true).await;
    let refused = async || {
        let session = world.session("postgres").await?;
        let write = "DELETE FROM fencepost.migrations WHERE false";
        let error = session.batch_execute(write).await.err()?;
        let refused = error.code().is_some_and(|code| code.code() == "25006");
        refused.then(|| "a write was refused with 25006".to_owned())
    };
    let seen = stage.watch(refused).await;
    // Sessions of that time stay read-only: a replica leaves them by itself; a
    // pooler never would.
    let terminate = world.pooler.is_some() || stage.rng.random();
    configure(world, &format!("RESET {setting}"), terminate).await;
    seen
}

/// Changes a setting of the database as soon as it answers.
async fn configure(world: &World, change: &str, terminate: bool) {
    let alter = format!("ALTER DATABASE postgres {change}");
    eventually("the setting is changed", async || {
        // From another one: here this very session may not write.
        let session = world.session("template1").await?;
        let work = async {
            session.batch_execute(&alter).await?;
            match terminate {
                true => session.batch_execute(TERMINATE).await,
                false => Ok(()),
            }
        };
        let done = timeout(Duration::from_secs(2), work).await;
        done.ok()?.ok()
    })
    .await;
}
