//! Faults of links: between clients and a replica, and between a replica and the
//! database.

use std::time::Duration;

use fencepost_support::proxy::{Flow, Proxy};
use rand::Rng as _;

use super::Stage;
use crate::world::Replica;

/// Which link.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leg {
    /// Between clients and replicas.
    Front,
    /// Between replicas and what they have for a database.
    Back,
}

impl Leg {
    /// Those of one replica, or of all.
    fn links<'a>(self, stage: &mut Stage<'a>) -> Vec<&'a Proxy> {
        let link = |replica: &'a Replica| match self {
            Self::Front => &replica.front,
            Self::Back => &replica.back,
        };
        stage.replicas().iter().map(link).collect()
    }
}

pub(super) async fn delay(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    let by = Duration::from_millis(stage.rng.random_range(20..800));
    links.iter().for_each(|link| link.delay(by));
    stage.hold().await;
    forward(links).await;
}

/// Connections end, again and again.
pub(super) async fn cut(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    let with_reset: bool = stage.rng.random();
    stage
        .repeat(10..400, async || {
            for link in &links {
                match with_reset {
                    true => link.reset().await,
                    false => link.cut().await,
                }
            }
        })
        .await;
}

/// Nobody is there.
pub(super) async fn refuse(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    for link in &links {
        link.refuse().await;
        link.reset().await;
    }
    stage.hold().await;
    forward(links).await;
}

/// What is said does not arrive; answers to what was said before do.
pub(super) async fn requests_lost(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    links.iter().for_each(|link| link.swallow_up());
    stage.hold().await;
    anew(links).await;
}

/// What is said arrives, and is done; nobody hears of it.
pub(super) async fn answers_lost(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    links.iter().for_each(|link| link.swallow_down());
    stage.hold().await;
    anew(links).await;
}

/// Answers break off in their middle: at once, or by silence.
pub(super) async fn answers_torn(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    let mut lengths = stage.rng.clone();
    stage
        .repeat(50..600, async || {
            for link in &links {
                let after = lengths.random_range(0..2000);
                link.set_down(match lengths.random() {
                    true => Flow::ResetAfter(after),
                    false => Flow::SwallowAfter(after),
                });
            }
        })
        .await;
    anew(links).await;
}

/// All is held back, and comes at the end.
pub(super) async fn stall(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    links.iter().for_each(|link| link.hold());
    stage.hold().await;
    forward(links).await;
}

/// Bytes come in drips.
pub(super) async fn drip(mut stage: Stage<'_>, leg: Leg) {
    let links = leg.links(&mut stage);
    stage
        .repeat(20..200, async || {
            links
                .iter()
                .for_each(|link| link.set(Flow::Pass, Flow::Pass));
            tokio::time::sleep(Duration::from_millis(1)).await;
            links.iter().for_each(|link| link.hold());
        })
        .await;
    forward(links).await;
}

async fn forward(links: Vec<&Proxy>) {
    for link in links {
        link.forward().await;
    }
}

/// Bytes are missing: a connection that lost some never goes on, as no network
/// leaves a hole in a stream.
async fn anew(links: Vec<&Proxy>) {
    for link in links {
        link.refuse().await;
        link.reset().await;
        link.forward().await;
    }
}
