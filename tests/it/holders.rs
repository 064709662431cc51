//! Honest callers, while somebody else is not: each keeps a lock, and takes and
//! gives back others.

use std::time::{Duration, Instant};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server,
    calls::{acquire, expect_retryable, grant_in, release, renew},
    server::{Client, channel_at},
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Interval, MissedTickBehavior, interval},
};
use tonic::{Code, Status};

use crate::world::LONG;

/// Honest callers at work, each on a connection of its own.
pub(crate) struct Holders {
    stop: watch::Sender<bool>,
    tasks: JoinSet<Report>,
}

/// What they have seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    /// The slowest answer of any kind.
    pub(crate) slowest: Duration,
    /// Locks that were taken and given back on the side.
    pub(crate) grants: usize,
    /// Answers that told to come again.
    pub(crate) put_off: usize,
}

/// Takes a lock as a patient client does.
async fn held(client: &mut Client, name: &str, ttl: Duration) -> Lock {
    loop {
        match acquire(client, name, "holder", ttl).await {
            Ok(answer) => return grant_in(Ok(answer)),
            Err(status) => tokio::time::sleep(expect_retryable(&status)).await,
        }
    }
}

impl Holders {
    /// Takes `count` locks for `ttl`, and renews each twice a second.
    pub(crate) async fn start(server: &Server, count: usize, ttl: Duration) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        for holder in 0..count {
            let mut client = Client::new(channel_at(server.grpc()).await);
            let lock = held(&mut client, &format!("held-{holder}"), ttl).await;
            let stem = format!("side-{holder}");
            tasks.spawn(take(client.clone(), stem, Turns::new(&stopped)));
            tasks.spawn(keep(client, lock, Turns::new(&stopped)));
        }
        Self { stop, tasks }
    }

    /// Ends them; panics when one has lost its lock.
    pub(crate) async fn end(self) -> Report {
        self.stop.send_replace(true);
        let all = self.tasks.join_all().await;
        all.into_iter().fold(Report::default(), |sum, one| Report {
            slowest: sum.slowest.max(one.slowest),
            grants: sum.grants + one.grants,
            put_off: sum.put_off + one.put_off,
        })
    }
}

impl Report {
    /// Overloaded is an answer too; the lease must outlive it.
    fn heard<T>(&mut self, asked: Instant, answer: Result<T, Status>) -> Option<T> {
        self.slowest = self.slowest.max(asked.elapsed());
        match answer {
            Ok(answer) => Some(answer),
            Err(status)
                if matches!(
                    status.code(),
                    Code::ResourceExhausted | Code::Unavailable | Code::DeadlineExceeded
                ) =>
            {
                self.put_off += 1;
                None
            }
            Err(status) => panic!("{status:?}"),
        }
    }
}

/// Turns twice a second, until told to stop.
struct Turns {
    ticks: Interval,
    stop: watch::Receiver<bool>,
}

impl Turns {
    fn new(stop: &watch::Receiver<bool>) -> Self {
        let mut ticks = interval(Duration::from_millis(500));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stop = stop.clone();
        Self { ticks, stop }
    }

    async fn next(&mut self) -> Option<()> {
        tokio::select! {
            _ = self.ticks.tick() => Some(()),
            _ = self.stop.wait_for(|stop| *stop) => None,
        }
    }
}

/// Renews one lock, and proves at the end that it was never lost.
async fn keep(mut client: Client, lock: Lock, mut turns: Turns) -> Report {
    let (name, owner, token) = (&lock.resource, &lock.owner, lock.fencing_token);
    let mut report = Report::default();
    while turns.next().await.is_some() {
        let asked = Instant::now();
        let renewed = renew(&mut client, name, owner, token, None).await;
        report.heard(asked, renewed);
    }
    renew(&mut client, name, owner, token, None)
        .await
        .unwrap_or_else(|status| panic!("{name} is lost: {status:?}"));
    report
}

/// Takes other locks and gives them back.
async fn take(mut client: Client, stem: String, mut turns: Turns) -> Report {
    let mut report = Report::default();
    let mut n = 0;
    while turns.next().await.is_some() {
        n += 1;
        let name = format!("{stem}-{n}");
        let asked = Instant::now();
        let answer = acquire(&mut client, &name, "taker", LONG).await;
        let Some(lock) = report.heard(asked, answer).and_then(|answer| answer.lock) else {
            continue;
        };
        report.grants += 1;
        let asked = Instant::now();
        let released = release(&mut client, &name, "taker", lock.fencing_token).await;
        report.heard(asked, released);
    }
    report
}
