//! Leases that somebody was told of while a fault went on, and that nobody ended:
//! each is still there afterwards, with its token. The load's own leases are too
//! short for that: they are over before a failover is.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use fencepost_model::{
    Recorder, failed,
    history::{History, Outcome, Time},
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

/// The leases.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Vec<Lease>>);

#[derive(Debug)]
struct Lease {
    name: String,
    token: i64,
    sent: Time,
    answered: Time,
}

impl Kept {
    /// Takes leases at each replica until it is dropped.
    pub(crate) async fn take(&self, world: &World, recorder: &Recorder, round: &str) {
        let asking = (0..world.replicas.len()).map(|n| async move {
            for turn in 0.. {
                let name = format!("kept-{round}-{n}-{turn}");
                let mut client = connect(world, n);
                let sent = recorder.now();
                let asked = calls::acquire(&mut client, &name, OWNER, TTL);
                if let Ok(Ok(answer)) = timeout(Duration::from_secs(1), asked).await
                    && let Some(lock) = answer.lock
                {
                    let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                    leases.push(Lease {
                        name,
                        token: lock.fencing_token,
                        sent,
                        answered: recorder.now(),
                    });
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
        join_all(asking).await;
    }

    /// Renews and releases each; says which are not there. What a failover may have
    /// forgotten need not be.
    pub(crate) async fn check(self, world: &World, history: &History) -> Vec<String> {
        let leases = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let durable = leases
            .into_iter()
            .filter(|lease| !history.forgotten(lease.sent, lease.answered));
        let clients: Vec<_> = (0..world.replicas.len())
            .map(|n| connect(world, n))
            .collect();
        let checking = durable.enumerate().map(|(n, Lease { name, token, .. })| {
            let mut client = clients[n % clients.len()].clone();
            let end = Instant::now() + BOUND;
            async move {
                loop {
                    let renewed = calls::renew(&mut client, &name, OWNER, token, None).await;
                    let Err(status) = renewed else { break };
                    let said = failed(&status);
                    if matches!(said.outcome, Outcome::No(_)) || Instant::now() > end {
                        return Some(format!("{name} with {token}: {:?}", said.outcome));
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
