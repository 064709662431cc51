//! Postgres as a process: stopped, killed, frozen, without room.

use std::time::Duration;

use fencepost_support::{Postgres, postgres::Stop};
use tokio::time::{sleep, timeout};

use super::{
    Seen, Stage,
    stage::{counted, refuses},
};

/// Stopped at once, and started again at the end.
pub(super) async fn immediate(stage: Stage<'_>) -> Seen {
    let mut primary = stage.world.primary().await;
    primary.stop(Stop::Immediate).await;
    let seen = stage.watch(async || refuses(primary.address()).await).await;
    primary.start_again().await;
    seen
}

/// Killed with all its processes.
pub(super) async fn kill(stage: Stage<'_>) -> Seen {
    let mut primary = stage.world.primary().await;
    primary.kill9().await;
    let seen = stage.watch(async || refuses(primary.address()).await).await;
    primary.start_again().await;
    seen
}

/// All its processes stand still, with all connections open.
pub(super) async fn freeze(stage: Stage<'_>) -> Seen {
    let primary = stage.world.primary().await;
    primary.freeze();
    let seen = stage.watch(async || stands_still(&primary)).await;
    primary.thaw();
    seen
}

fn stands_still(postgres: &Postgres) -> Seen {
    let frozen = postgres.is_frozen();
    frozen.then(|| "the state of all its processes is T".to_owned())
}

/// Restarted in order, again and again.
pub(super) async fn restart(mut stage: Stage<'_>) -> Seen {
    let mut primary = stage.world.primary().await;
    let mut refusals = 0;
    stage
        .repeat(200..1000, async || {
            primary.stop(Stop::Fast).await;
            refusals += usize::from(refuses(primary.address()).await.is_some());
            primary.start_again().await;
        })
        .await;
    counted(refusals, "times it refused connections")
}

/// No file grows any more, and somebody writes much.
pub(super) async fn disk_full(stage: Stage<'_>) -> Seen {
    fill(
        stage,
        "CREATE TABLE IF NOT EXISTS filling (t text);
         INSERT INTO filling SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
    )
    .await
}

/// The same, and new files for its log are needed: it panics, and does not come
/// back before there is room.
pub(super) async fn disk_full_log(stage: Stage<'_>) -> Seen {
    fill(stage, "SELECT txid_current(), pg_switch_wal()").await
}

async fn fill(mut stage: Stage<'_>, with: &str) -> Seen {
    let world = stage.world;
    let disk = world.disk.as_ref()?;
    let mut primary = world.primary().await;
    let before = complaints(&primary);
    disk.fill();
    stage
        .repeat(20..100, async || {
            if let Some(session) = world.session("postgres").await {
                // That it fails is the fault.
                let _ = session.batch_execute(with).await;
            }
        })
        .await;
    let complaints = complaints(&primary) - before;
    disk.empty();
    // What it could not write may end it only now: whoever runs it starts it again.
    let answers = timeout(Duration::from_secs(10), async {
        loop {
            if let Some(session) = world.session("postgres").await {
                return session;
            }
            if !primary.is_running() {
                primary.start_again().await;
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    if let Ok(session) = answers.await {
        let _ = session.batch_execute("DROP TABLE IF EXISTS filling").await;
    }
    counted(complaints, "times Postgres had no space left")
}

fn complaints(postgres: &Postgres) -> usize {
    let log = postgres.log();
    let full = log.iter().filter(|line| line.contains("No space left"));
    full.count()
}
