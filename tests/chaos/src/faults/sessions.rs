//! Other sessions of the same database, and settings of it. They do not mind when
//! the database is away meanwhile.

use std::time::Duration;

use fencepost_support::eventually;
use rand::Rng as _;

use super::Stage;
use crate::world::World;

const TERMINATE: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
     WHERE datname = 'postgres' AND pid <> pg_backend_pid() AND backend_type = 'client backend'";

/// Somebody locks every row there is: small pools are soon used up.
pub(super) async fn rows_locked(mut stage: Stage<'_>) {
    let world = stage.world;
    let time = stage.time / 2;
    stage
        .repeat(50..200, async || {
            let Some(session) = world.session("postgres").await else {
                return;
            };
            // In the order of the server's own statements, and no longer than this
            // fault goes on.
            let lock = "BEGIN; SELECT FROM fencepost.locks ORDER BY resource FOR UPDATE";
            if let Ok(Ok(())) = tokio::time::timeout(time, session.batch_execute(lock)).await {
                tokio::time::sleep(time).await;
            }
        })
        .await;
}

/// Every session is ended, again and again.
pub(super) async fn terminate_storm(mut stage: Stage<'_>) {
    let world = stage.world;
    stage
        .repeat(20..200, async || {
            if let Some(session) = world.session("template1").await {
                let _ = session.batch_execute(TERMINATE).await;
            }
        })
        .await;
}

/// Some sessions update pairs of rows in any order, slowly: they wait for each
/// other, and for the server's statements, in circles.
pub(super) async fn deadlock_storm(stage: Stage<'_>) {
    let storms = (0..4).map(|_| storm(stage.world));
    let storms = futures_util::future::join_all(storms);
    let _ = tokio::time::timeout(stage.time, storms).await;
}

async fn storm(world: &World) {
    loop {
        if let Some(session) = world.session("postgres").await {
            let update = "UPDATE fencepost.locks SET labels = labels
                 WHERE resource = (SELECT resource FROM fencepost.locks ORDER BY random() LIMIT 1)";
            let statements = format!(
                "SET deadlock_timeout = '50ms';
                 BEGIN; {update}; SELECT pg_sleep(0.02); {update}; SELECT pg_sleep(0.02); {update}; ROLLBACK"
            );
            while session.batch_execute(&statements).await.is_ok() {}
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whoever does not say otherwise has serializable transactions.
pub(super) async fn serializable(stage: Stage<'_>) {
    let setting = "default_transaction_isolation";
    configure(stage.world, &format!("SET {setting} = serializable"), true).await;
    stage.hold().await;
    configure(stage.world, &format!("RESET {setting}"), true).await;
}

/// The database takes no writes for a while, as before a switchover.
pub(super) async fn read_only(mut stage: Stage<'_>) {
    let world = stage.world;
    let setting = "default_transaction_read_only";
    configure(world, &format!("SET {setting} = on"), true).await;
    stage.hold().await;
    // Sessions of that time stay read-only: a replica leaves them by itself; a
    // pooler never would.
    let terminate = world.pooler.is_some() || stage.rng.random();
    configure(world, &format!("RESET {setting}"), terminate).await;
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
        let done = tokio::time::timeout(Duration::from_secs(2), work).await;
        done.ok()?.ok()
    })
    .await;
}
