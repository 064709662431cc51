//! Leases that somebody was told of while a fault went on, and that nobody ended:
//! each is still there afterwards, with its token. The load's own leases are too
//! short for that: they are over before a failover is.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use fencepost_support::calls;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    recovery::{BOUND, connect},
    world::World,
};

/// Longer than any fault.
const TTL: Duration = Duration::from_secs(120);

const OWNER: &str = "keeper";

/// The leases: name and token.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Vec<(String, i64)>>);

impl Kept {
    /// Takes leases at each replica until it is dropped.
    pub(crate) async fn take(&self, world: &World, round: &str) {
        let asking = (0..world.replicas.len()).map(|n| async move {
            for turn in 0.. {
                let name = format!("kept-{round}-{n}-{turn}");
                let mut client = connect(world, n);
                let asked = calls::acquire(&mut client, &name, OWNER, TTL);
                if let Ok(Ok(answer)) = timeout(Duration::from_secs(1), asked).await
                    && let Some(lock) = answer.lock
                {
                    let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                    leases.push((name, lock.fencing_token));
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
        join_all(asking).await;
    }

    /// Renews and releases each; says which are not there.
    pub(crate) async fn check(self, world: &World) -> Vec<String> {
        let leases = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let checking = leases.into_iter().enumerate().map(|(n, (name, token))| {
            let mut client = connect(world, n % world.replicas.len());
            let end = Instant::now() + BOUND;
            async move {
                loop {
                    let renewed = calls::renew(&mut client, &name, OWNER, token, None).await;
                    let Err(status) = renewed else { break };
                    let reason = calls::reason(&status).unwrap_or_default();
                    let passing = ["STORE_UNAVAILABLE", "DEADLINE", "OVERLOADED", ""];
                    if !passing.contains(&reason.as_str()) || Instant::now() > end {
                        return Some(format!("{name} with {token}: {:?} {reason}", status.code()));
                    }
                    sleep(Duration::from_millis(50)).await;
                }
                // Without an answer it ends by itself.
                let _ = calls::release(&mut client, &name, OWNER, token).await;
                None
            }
        });
        join_all(checking).await.into_iter().flatten().collect()
    }
}
