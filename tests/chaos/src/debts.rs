//! Names that somebody took, or may have taken, and left: each is free again one TTL
//! later, or as soon as all replicas serve again when that is later.
//!
//! A call whose answer was lost may take effect until the end of the fault and its
//! time-out in the server: from then on its TTL is counted.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fencepost_support::calls;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    faults::FARTHEST_STEP,
    recovery::connect,
    world::{Setup, World},
};

const TTL: Duration = Duration::from_millis(1500);

/// How long a call may take effect after the end of a fault: `--request-timeout` and
/// a little.
const SETTLE: Duration = Duration::from_secs(6);

/// For a busy machine.
const SLACK: Duration = Duration::from_secs(1);

/// Names that wait to be free.
#[derive(Debug, Default)]
pub(crate) struct Debts {
    /// Granted before the fault or during it, and when its time is over.
    told: Mutex<Vec<(String, Instant)>>,
    /// Nobody knows.
    lost: Mutex<Vec<String>>,
}

impl Debts {
    /// A lease from each replica, whose holder is never heard of again.
    pub(crate) async fn take(world: &World, round: &str) -> Self {
        let taken = (0..world.replicas.len()).map(|n| async move {
            let name = format!("gone-{round}-{n}");
            let mut client = connect(world, n);
            let answer = calls::acquire(&mut client, &name, "gone", TTL).await;
            answer.ok()?.acquired.then(|| (name, Instant::now() + TTL))
        });
        let taken = join_all(taken).await.into_iter().flatten();
        Self {
            told: Mutex::new(taken.collect()),
            lost: Mutex::default(),
        }
    }

    /// Asks each replica for names of its own until it is dropped, and remembers each,
    /// granted or without an answer.
    pub(crate) async fn lose(&self, world: &World, round: &str) {
        let asking = (0..world.replicas.len()).map(|n| async move {
            for turn in 0.. {
                let mut client = connect(world, n);
                let name = format!("lost-{round}-{n}-{turn}");
                // Whatever comes of it: also when the whole is dropped meanwhile.
                lock(&self.lost).push(name.clone());
                let asked = calls::acquire(&mut client, &name, "lost", TTL);
                let answer = timeout(Duration::from_millis(200), asked).await;
                if let Ok(Ok(answer)) = answer {
                    lock(&self.lost).retain(|lost| *lost != name);
                    if answer.acquired {
                        lock(&self.told).push((name, Instant::now() + TTL));
                    }
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
        join_all(asking).await;
    }

    /// Takes each name, now that all replicas serve; says which could not be taken in
    /// time. `ended` is the end of the faults.
    pub(crate) async fn settle(self, world: &World, ended: Instant) -> Vec<String> {
        let clock = match world.setup {
            Setup::Clocks => FARTHEST_STEP,
            _ => Duration::ZERO,
        };
        let lost = std::mem::take(&mut *lock(&self.lost));
        let lost = lost.into_iter().map(|name| (name, ended + SETTLE + TTL));
        let told = std::mem::take(&mut *lock(&self.told));
        let clients: Vec<_> = (0..world.replicas.len())
            .map(|n| connect(world, n))
            .collect();
        let now = Instant::now();
        let taken = told.into_iter().chain(lost).enumerate();
        let taken = taken.map(|(n, (name, due))| {
            let due = due.max(now) + clock + SLACK;
            let mut client = clients[n % clients.len()].clone();
            async move {
                loop {
                    let asked = Instant::now();
                    let answer = calls::acquire(&mut client, &name, "next", TTL).await;
                    if matches!(&answer, Ok(answer) if answer.acquired) {
                        return None;
                    }
                    if asked > due {
                        let said = match answer {
                            Ok(answer) => format!("{:?}", answer.holder),
                            Err(status) => format!("{:?}", status.code()),
                        };
                        return Some(format!("{name} is not free: {said}"));
                    }
                    sleep(Duration::from_millis(50)).await;
                }
            }
        });
        join_all(taken).await.into_iter().flatten().collect()
    }
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
