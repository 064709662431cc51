//! Faults of links: between clients and a replica, and between a replica and the
//! database.

use std::time::Duration;

use fencepost_support::proxy::{Flow, Proxy};
use rand::Rng as _;

use super::{
    Seen, Stage,
    stage::{counted, refuses},
};
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

pub(super) async fn delay(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let before = hindered(&links);
    let by = Duration::from_millis(stage.rng.random_range(20..800));
    links.iter().for_each(|link| link.delay(by));
    stage.hold().await;
    let late = counted(hindered(&links) - before, "bytes late");
    forward(links).await;
    late
}

/// Connections end, again and again.
pub(super) async fn cut(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let with_reset: bool = stage.rng.random();
    let mut ended = 0;
    stage
        .repeat(10..400, async || {
            for link in &links {
                ended += link.open();
                match with_reset {
                    true => link.reset().await,
                    false => link.cut().await,
                }
            }
        })
        .await;
    counted(ended, "connections ended")
}

/// Nobody is there.
pub(super) async fn refuse(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    for link in &links {
        link.refuse().await;
        link.reset().await;
    }
    let all_refuse = async || {
        let mut seen = None;
        for link in &links {
            seen = Some(refuses(link.address()).await?);
        }
        seen
    };
    let seen = stage.watch(all_refuse).await;
    forward(links).await;
    seen
}

/// What is said does not arrive; answers to what was said before do.
pub(super) async fn requests_lost(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let before = hindered(&links);
    links.iter().for_each(|link| link.swallow_up());
    stage.hold().await;
    let lost = counted(hindered(&links) - before, "bytes lost");
    anew(links).await;
    lost
}

/// What is said arrives, and is done; nobody hears of it.
pub(super) async fn answers_lost(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let before = hindered(&links);
    links.iter().for_each(|link| link.swallow_down());
    stage.hold().await;
    let lost = counted(hindered(&links) - before, "bytes lost");
    anew(links).await;
    lost
}

/// Answers break off in their middle: at once, or by silence.
pub(super) async fn answers_torn(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let mut lengths = stage.rng.clone();
    let before = hindered(&links);
    stage
        .repeat(50..600, async || {
            for link in &links {
                let after = lengths.random_range(0..2000);
                anew([*link]).await;
                link.set_down(match lengths.random() {
                    true => Flow::ResetAfter(after),
                    false => Flow::SwallowAfter(after),
                });
            }
        })
        .await;
    let torn = counted(hindered(&links) - before, "bytes torn off");
    anew(links).await;
    torn
}

/// All is held back, and comes at the end.
pub(super) async fn stall(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let before = hindered(&links);
    links.iter().for_each(|link| link.hold());
    stage.hold().await;
    let held = counted(hindered(&links) - before, "bytes held back");
    forward(links).await;
    held
}

/// Bytes come in drips.
pub(super) async fn drip(mut stage: Stage<'_>, leg: Leg) -> Seen {
    let links = leg.links(&mut stage);
    let before = hindered(&links);
    stage
        .repeat(20..200, async || {
            links
                .iter()
                .for_each(|link| link.set(Flow::Pass, Flow::Pass));
            tokio::time::sleep(Duration::from_millis(1)).await;
            links.iter().for_each(|link| link.hold());
        })
        .await;
    let held = counted(hindered(&links) - before, "bytes in drips");
    forward(links).await;
    held
}

/// Bytes that did not pass when they came.
fn hindered(links: &[&Proxy]) -> u64 {
    links.iter().map(|link| link.hindered()).sum()
}

async fn forward(links: Vec<&Proxy>) {
    for link in links {
        link.forward().await;
    }
}

/// Bytes are missing: a connection that lost some never goes on, as no network
/// leaves a hole in a stream.
async fn anew(links: impl IntoIterator<Item = &Proxy>) {
    for link in links {
        link.refuse().await;
        link.reset().await;
        link.forward().await;
    }
}
