//! `PgBouncer` under load.

use std::collections::HashSet;

use super::{
    Seen, Stage,
    stage::{counted, refuses},
};
use crate::world::World;

/// Killed with all its connections and started again, again and again.
pub(super) async fn restart(mut stage: Stage<'_>) -> Seen {
    let mut pooler = stage.world.pooler.as_ref()?.lock().await;
    let mut refusals = 0;
    stage
        .repeat(200..1000, async || {
            pooler.kill9().await;
            refusals += usize::from(refuses(pooler.address()).await.is_some());
            pooler.start_again().await;
        })
        .await;
    counted(refusals, "times it refused connections")
}

/// Its configuration is read again, and its server connections are replaced, while
/// clients stay.
pub(super) async fn reconnect(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let pooler = world.pooler.as_ref()?.lock().await;
    let mut turns = ["RECONNECT", "RELOAD"].iter().cycle();
    let before = backends(world).await;
    stage
        .repeat(50..300, async || {
            if let Some(command) = turns.next() {
                pooler.command(command).await;
            }
        })
        .await;
    let after = backends(world).await?;
    let gone = before?.difference(&after).count();
    counted(gone, "sessions of the pool replaced")
}

/// The processes of the sessions that the pool has.
async fn backends(world: &World) -> Option<HashSet<i32>> {
    let session = world.session("template1").await?;
    let query = "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity
         WHERE datname = 'postgres' AND backend_type = 'client backend'";
    let pids: Vec<i32> = session.try_value(query).await?;
    Some(pids.into_iter().collect())
}
