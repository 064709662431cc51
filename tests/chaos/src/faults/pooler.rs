//! `PgBouncer` under load.

use super::Stage;

/// Killed with all its connections and started again, again and again.
pub(super) async fn restart(mut stage: Stage<'_>) {
    let Some(pooler) = &stage.world.pooler else {
        return;
    };
    let mut pooler = pooler.lock().await;
    stage
        .repeat(200..1000, async || pooler.restart().await)
        .await;
}

/// Server connections are replaced, or all are killed, while clients stay.
pub(super) async fn reconnect(mut stage: Stage<'_>) {
    let Some(pooler) = &stage.world.pooler else {
        return;
    };
    let pooler = pooler.lock().await;
    let mut turns = ["RECONNECT", "RELOAD"].iter().cycle();
    stage
        .repeat(50..300, async || {
            if let Some(command) = turns.next() {
                pooler.command(command).await;
            }
        })
        .await;
}
