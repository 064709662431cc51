//! Where a fault happens, for how long, and what is seen of it.

use std::{net::SocketAddr, time::Duration};

use fencepost_model::Recorder;
use rand::{Rng as _, rngs::StdRng};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use crate::world::{Replica, World};

/// Where a fault happens, and for how long.
pub(crate) struct Stage<'a> {
    pub(crate) world: &'a World,
    pub(crate) recorder: Recorder,
    pub(crate) rng: StdRng,
    pub(crate) time: Duration,
}

/// What was seen of a fault while it went on, in words; none: nothing, and it may
/// have been none.
pub(crate) type Seen = Option<String>;

/// What came of a fault.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) seen: Seen,
    /// When all was mended. A replica that was killed has begun to start again by
    /// then, and not more.
    pub(crate) at: Instant,
}

impl From<Seen> for Ended {
    fn from(seen: Seen) -> Self {
        let at = Instant::now();
        Self { seen, at }
    }
}

impl<'a> Stage<'a> {
    /// As long as the fault goes on.
    pub(super) async fn hold(&self) {
        sleep(self.time).await;
    }

    /// As long as the fault goes on; looks meanwhile until its effect is seen.
    pub(super) async fn watch(&self, mut look: impl AsyncFnMut() -> Seen) -> Seen {
        let end = Instant::now() + self.time;
        let looking = async {
            loop {
                if let Some(seen) = look().await {
                    return seen;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        let seen = timeout_at(end, looking).await.ok();
        sleep_until(end).await;
        seen
    }

    /// Does something again and again as long as the fault goes on, with a random
    /// pause of some milliseconds after each time.
    pub(super) async fn repeat(
        &mut self,
        pause: std::ops::Range<u64>,
        mut work: impl AsyncFnMut(),
    ) {
        let end = Instant::now() + self.time;
        loop {
            work().await;
            let pause = Duration::from_millis(self.rng.random_range(pause.clone()));
            sleep_until(end.min(Instant::now() + pause)).await;
            if Instant::now() >= end {
                return;
            }
        }
    }

    pub(super) fn replica(&mut self) -> &'a Replica {
        &self.world.replicas[self.rng.random_range(0..self.world.replicas.len())]
    }

    /// One replica, or all of them.
    pub(super) fn replicas(&mut self) -> &'a [Replica] {
        let all = &self.world.replicas;
        if self.rng.random() {
            return all;
        }
        let n = self.rng.random_range(0..all.len());
        &all[n..=n]
    }
}

/// So many of something, when there were any.
pub(super) fn counted(count: impl TryInto<u64>, what: &str) -> Seen {
    let count = count.try_into().unwrap_or(0);
    (count > 0).then(|| format!("{count} {what}"))
}

/// Whether nobody listens there.
pub(super) async fn refuses(address: SocketAddr) -> Seen {
    let connecting = timeout(Duration::from_millis(200), TcpStream::connect(address));
    matches!(connecting.await, Ok(Err(_))).then(|| "connections are refused".to_owned())
}
