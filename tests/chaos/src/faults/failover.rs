//! Standbys: promoted, stalled, lost. Replicas stay up, and reach the new primary at
//! the old one's address.

use fencepost_model::history::What;
use fencepost_support::{Postgres, postgres::Replication};

use rand::Rng as _;

use super::Stage;
use crate::world::STANDBY;

/// To a standby that lost the last seconds.
pub(super) async fn promotion(stage: Stage<'_>) {
    promotions(stage, 1).await;
}

/// To two of them, one after the other, that lost the same and never met.
pub(super) async fn promotion_twice(stage: Stage<'_>) {
    promotions(stage, 2).await;
}

async fn promotions(stage: Stage<'_>, count: usize) {
    let mut primary = stage.world.primary().await;
    let mut standbys: Vec<Postgres> = Vec::new();
    for n in 0..count {
        let name = format!("{STANDBY}{n}");
        standbys.push(primary.standby(&name, Replication::Asynchronous).await);
    }
    let from = stage.recorder.now();
    for standby in &standbys {
        standby.cut_off().await;
    }
    for standby in standbys {
        stage.hold().await;
        primary.kill9().await;
        standby.promote().await;
        stage.world.switch_to(&mut primary, standby).await;
    }
    let to = stage.recorder.now();
    stage.recorder.event(from, to, What::LeasesForgotten);
}

/// It receives nothing and confirms nothing: no commit returns.
pub(super) async fn standby_stalled(stage: Stage<'_>) {
    let Some(standby) = &stage.world.standby else {
        return;
    };
    let standby = standby.lock().await;
    standby.freeze();
    stage.hold().await;
    standby.thaw();
}

/// It is dead: no commit returns.
pub(super) async fn standby_lost(stage: Stage<'_>) {
    let Some(standby) = &stage.world.standby else {
        return;
    };
    let mut standby = standby.lock().await;
    standby.kill9().await;
    stage.hold().await;
    standby.start_again().await;
}

/// To the standby that every commit has waited for: nothing is forgotten, also when
/// it was lost before. The new primary gets a standby of its own.
pub(super) async fn promotion_synchronous(mut stage: Stage<'_>) {
    let Some(standby) = &stage.world.standby else {
        return;
    };
    let mut primary = stage.world.primary().await;
    let mut standby = standby.lock().await;
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
    stage.world.switch_to(&mut primary, promoted).await;
}
