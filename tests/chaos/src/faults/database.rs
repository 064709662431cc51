//! Postgres as a process: stopped, killed, frozen, without room.

use std::time::Duration;

use fencepost_support::postgres::Stop;
use tokio::time::{sleep, timeout};

use super::Stage;

/// Stopped at once, and started again at the end.
pub(super) async fn immediate(stage: Stage<'_>) {
    let mut primary = stage.world.primary().await;
    primary.stop(Stop::Immediate).await;
    stage.hold().await;
    primary.start_again().await;
}

/// Killed with all its processes.
pub(super) async fn kill(stage: Stage<'_>) {
    let mut primary = stage.world.primary().await;
    primary.kill9().await;
    stage.hold().await;
    primary.start_again().await;
}

/// All its processes stand still, with all connections open.
pub(super) async fn freeze(stage: Stage<'_>) {
    let primary = stage.world.primary().await;
    primary.freeze();
    stage.hold().await;
    primary.thaw();
}

/// Restarted in order, again and again.
pub(super) async fn restart(mut stage: Stage<'_>) {
    let mut primary = stage.world.primary().await;
    stage
        .repeat(200..1000, async || primary.restart(Stop::Fast).await)
        .await;
}

/// No file grows any more, and somebody writes much.
pub(super) async fn disk_full(stage: Stage<'_>) {
    fill(
        stage,
        "CREATE TABLE IF NOT EXISTS filling (t text);
         INSERT INTO filling SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
    )
    .await;
}

/// The same, and new files for its log are needed: it panics, and does not come
/// back before there is room.
pub(super) async fn disk_full_log(stage: Stage<'_>) {
    fill(stage, "SELECT txid_current(), pg_switch_wal()").await;
}

async fn fill(mut stage: Stage<'_>, with: &str) {
    let world = stage.world;
    let Some(disk) = &world.disk else { return };
    let mut primary = world.primary().await;
    disk.fill();
    stage
        .repeat(20..100, async || {
            if let Some(session) = world.session("postgres").await {
                // That it fails is the fault.
                let _ = session.batch_execute(with).await;
            }
        })
        .await;
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
}
