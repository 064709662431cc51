//! Standbys: promoted, stalled, lost. Replicas stay up, and reach the new primary at
//! the old one's address.

use std::time::Duration;

use fencepost_model::history::{Time, What};
use fencepost_support::{Postgres, postgres::Replication};
use futures_util::future::join_all;
use rand::Rng as _;
use tokio::time::sleep;

use super::{Seen, Stage, stage::counted};
use crate::world::{STANDBY, World};

/// To a standby that lost the last seconds.
pub(super) async fn promotion(stage: Stage<'_>) -> Seen {
    promotions(stage, 1).await
}

/// To two of them, one after the other, that lost the same and never met.
pub(super) async fn promotion_twice(stage: Stage<'_>) -> Seen {
    promotions(stage, 2).await
}

async fn promotions(stage: Stage<'_>, count: usize) -> Seen {
    let world = stage.world;
    let mut primary = world.primary().await;
    let before = timeline(world).await?;
    let mut standbys: Vec<Postgres> = Vec::new();
    for n in 0..count {
        let name = format!("{STANDBY}{n}");
        standbys.push(primary.standby(&name, Replication::Asynchronous).await);
    }
    let (from, arrived) = cut_off(&stage, &primary, &standbys).await;
    let mut lost = 0;
    for standby in standbys {
        stage.hold().await;
        let admin = primary.admin().await;
        lost += admin.value::<i64>(FLUSHED).await - arrived;
        primary.kill9().await;
        standby.promote().await;
        world.switch_to(&mut primary, standby).await;
    }
    let to = stage.recorder.now();
    stage.recorder.event(from, to, What::LeasesForgotten);
    let after = timeline(world).await?;
    let what = format!("bytes of the log lost, timeline {before} to {after}");
    (after > before).then(|| counted(lost, &what))?
}

/// How far a primary's log is on its disk, in bytes.
const FLUSHED: &str = "SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint";

/// How far a standby has its primary's log, in bytes.
const RECEIVED: &str = "SELECT (pg_last_wal_receive_lsn() - '0/0')::bigint";

/// Cuts standbys off. Returns how far all of them have the primary's log, and a moment
/// by which it was no farther: what was answered before has not been lost.
async fn cut_off(stage: &Stage<'_>, primary: &Postgres, standbys: &[Postgres]) -> (Time, i64) {
    let admin = primary.admin().await;
    let mut flushed = Vec::new();
    let mut look = async || {
        // What is answered by now is on the primary's disk when it is asked.
        let now = stage.recorder.now();
        flushed.push((now, admin.value::<i64>(FLUSHED).await));
    };
    look().await;
    for standby in standbys {
        primary.wait_replayed(standby).await;
    }
    let looking = async {
        loop {
            look().await;
            sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        () = looking => {}
        _ = join_all(standbys.iter().map(Postgres::cut_off)) => {}
    }
    let mut arrived = i64::MAX;
    for standby in standbys {
        arrived = arrived.min(standby.admin().await.value(RECEIVED).await);
    }
    let all_there = flushed
        .iter()
        .rev()
        .find(|(_, flushed)| *flushed <= arrived);
    let (from, _) = all_there.expect("they had replayed what the first look saw");
    (*from, arrived)
}

/// It rises with each promotion.
async fn timeline(world: &World) -> Option<i32> {
    let session = world.session("postgres").await?;
    let query = "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer";
    session.try_value(query).await
}

/// It receives nothing and confirms nothing: no commit returns.
pub(super) async fn standby_stalled(stage: Stage<'_>) -> Seen {
    let standby = stage.world.standby.as_ref()?.lock().await;
    standby.freeze();
    let seen = stage
        .watch(async || waiting_commits(stage.world).await)
        .await;
    standby.thaw();
    seen
}

/// It is dead: no commit returns.
pub(super) async fn standby_lost(stage: Stage<'_>) -> Seen {
    let mut standby = stage.world.standby.as_ref()?.lock().await;
    standby.kill9().await;
    let seen = stage
        .watch(async || waiting_commits(stage.world).await)
        .await;
    standby.start_again().await;
    seen
}

async fn waiting_commits(world: &World) -> Seen {
    let query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let session = world.session("template1").await?;
    counted(session.try_value::<i64>(query).await?, "commits waited")
}

/// To the standby that every commit has waited for: nothing is forgotten, also when
/// it was lost before. The new primary gets a standby of its own.
pub(super) async fn promotion_synchronous(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let mut primary = world.primary().await;
    let mut standby = world.standby.as_ref()?.lock().await;
    let before = timeline(world).await?;
    if stage.rng.random() {
        // Not merely frozen: what is in its socket would still arrive.
        standby.kill9().await;
        stage.hold().await;
        primary.kill9().await;
        standby.start_again().await;
    } else {
        primary.kill9().await;
    }
    standby.promote().await;
    // Nobody reaches it before it has a standby of its own.
    let next = standby.standby(STANDBY, Replication::Synchronous).await;
    let promoted = std::mem::replace(&mut *standby, next);
    world.switch_to(&mut primary, promoted).await;
    let after = timeline(world).await?;
    (after > before).then(|| format!("timeline {before} to {after}"))
}
