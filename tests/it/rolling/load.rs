//! Clients that hold locks, wait for them, and take them for a moment.

use std::{sync::Arc, time::Duration};

use fencepost_client::{AcquireOptions, Client};
use fencepost_support::{
    Server,
    calls::{reason, release, renew, request_with_id, send, span},
    server::Client as Stub,
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status, transport::Channel};

use crate::{keep_alive::stage, world::LONG};

const TTL: Duration = Duration::from_secs(5);
const GUARDS: usize = 20;
/// Locks that two wait for in turn.
const QUEUES: usize = 5;
const CYCLERS: usize = 5;
const STREAMS: usize = 20;
const RENEWERS: usize = 10;

/// What they did.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Leases that were held from before the first stop to the end.
    held: usize,
    /// Waits that ended with the lock.
    waits: usize,
    cycles: usize,
    renewals: usize,
    /// Streams that ended, and were opened anew.
    reopened: usize,
    retries: usize,
}

impl Report {
    /// Whether everybody had work.
    pub(super) fn is_full(&self) -> bool {
        self.held == GUARDS + STREAMS + RENEWERS
            && self.waits > QUEUES * 4
            && self.cycles > CYCLERS * 8
            && self.renewals > self.held
            && self.reopened > 0
    }

    fn and(mut self, other: Self) -> Self {
        self.held += other.held;
        self.waits += other.waits;
        self.cycles += other.cycles;
        self.renewals += other.renewals;
        self.reopened += other.reopened;
        self.retries += other.retries;
        self
    }
}

/// Clients at work.
pub(super) struct Load {
    stop: watch::Sender<bool>,
    tasks: JoinSet<Report>,
}

#[derive(Clone)]
struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Whether it came before so much time had passed.
    async fn within(&mut self, time: Duration) -> bool {
        timeout(time, self.0.wait_for(|stop| *stop)).await.is_ok()
    }
}

impl Load {
    /// The Rust client knows all replicas; stubs those of the balanced channel.
    pub(super) async fn start(replicas: &[Server], channel: Channel) -> Self {
        let urls: Vec<_> = replicas.iter().map(Server::url).collect();
        let client = Arc::new(Client::connect_lazy(urls.join(",")).unwrap());
        let (stop, stopped) = watch::channel(false);
        let stopped = Stop(stopped);
        let mut tasks = JoinSet::new();
        let options = || AcquireOptions::default().ttl(TTL);
        for n in 0..GUARDS {
            let guard = client.acquire(&format!("guarded-{n}"), options()).await;
            let (guard, mut stopped) = (guard.unwrap(), stopped.clone());
            tasks.spawn(async move {
                tokio::select! {
                    why = guard.lost() => panic!("{} is lost: {why}", guard.resource()),
                    _ = stopped.0.wait_for(|stop| *stop) => {}
                }
                guard.release().await.unwrap();
                Report {
                    held: 1,
                    ..Report::default()
                }
            });
        }
        for n in 0..QUEUES * 2 {
            let (client, mut stopped) = (Arc::clone(&client), stopped.clone());
            tasks.spawn(async move {
                let name = format!("queue-{}", n / 2);
                let mut report = Report::default();
                while !stopped.within(Duration::from_millis(20)).await {
                    let waiting = client.acquire_with_retry(&name, options().wait(LONG)).await;
                    let guard = waiting.unwrap();
                    sleep(Duration::from_millis(100)).await;
                    guard.release().await.unwrap();
                    report.waits += 1;
                }
                report
            });
        }
        for n in 0..CYCLERS {
            let (client, mut stopped) = (Arc::clone(&client), stopped.clone());
            tasks.spawn(async move {
                let mut report = Report::default();
                while !stopped.within(Duration::from_millis(50)).await {
                    let guard = client.acquire(&format!("cycle-{n}"), options()).await;
                    guard.unwrap().release().await.unwrap();
                    report.cycles += 1;
                }
                report
            });
        }
        for n in 0..STREAMS + RENEWERS + CYCLERS {
            let (stub, stopped) = (Stub::new(channel.clone()), stopped.clone());
            match n {
                _ if n < STREAMS => tasks.spawn(keep(stub, n, stopped)),
                _ if n < STREAMS + RENEWERS => tasks.spawn(hold(stub, n, stopped)),
                _ => tasks.spawn(cycle(stub, n, stopped)),
            };
        }
        Self { stop, tasks }
    }

    pub(super) async fn end(mut self) -> Report {
        self.stop.send_replace(true);
        let mut sum = Report::default();
        while let Some(report) = self.tasks.join_next().await {
            sum = sum.and(report.unwrap());
        }
        sum
    }
}

/// As the README's service config has it: five attempts, from 0.1 s on.
async fn retry<T, F>(report: &mut Report, call: impl Fn() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut pause = Duration::from_millis(100);
    for _ in 1..5 {
        match call().await {
            // A connection that ended is UNAVAILABLE in other languages.
            Err(status) if status.code() == Code::Unavailable || reason(&status).is_none() => {
                report.retries += 1;
            }
            other => return other,
        }
        sleep(pause.mul_f64(rand::random_range(0.8..1.2))).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
    call().await
}

async fn take(stub: &Stub, name: &str, report: &mut Report) -> fencepost_proto::v1::Lock {
    let id = format!("{name}-{}", rand::random::<u64>());
    let ask = request_with_id(name, "owner", TTL, &id);
    let taken = retry(report, || {
        let (mut stub, ask) = (stub.clone(), ask.clone());
        async move { send(&mut stub, ask).await }
    });
    let taken = taken
        .await
        .unwrap_or_else(|status| panic!("{name}: {status:?}"));
    taken.lock.expect("nobody else wants it")
}

/// Keeps a lock by streams, one after the other.
async fn keep(mut stub: Stub, n: usize, mut stop: Stop) -> Report {
    let mut report = Report {
        held: 1,
        ..Report::default()
    };
    let asked = Instant::now();
    let lock = take(&stub, &format!("kept-{n}"), &mut report).await;
    let mut ends = asked + span(lock.remaining);
    loop {
        let opened = stage::Stream::try_open(&mut stub, stage::request(&lock)).await;
        let why = match opened {
            Ok(mut stream) => loop {
                tokio::select! {
                    renewed = stream.try_next() => match renewed {
                        Ok(renewal) => {
                            assert!(Instant::now() < ends, "{} was over", lock.resource);
                            report.renewals += 1;
                            ends = renewal.deadline().into();
                        }
                        Err(why) => break why,
                    },
                    _ = stop.0.wait_for(|stop| *stop) => return report,
                }
            },
            Err(why) => why,
        };
        let transient = why.code() == Code::Unavailable || reason(&why).is_none();
        assert!(transient, "{} is lost: {why:?}", lock.resource);
        report.reopened += 1;
        assert!(Instant::now() < ends, "{} was over: {why:?}", lock.resource);
        sleep(Duration::from_millis(100)).await;
    }
}

/// Keeps a lock by calls.
async fn hold(stub: Stub, n: usize, mut stop: Stop) -> Report {
    let mut report = Report {
        held: 1,
        ..Report::default()
    };
    let name = format!("renewed-{n}");
    let token = take(&stub, &name, &mut report).await.fencing_token;
    while !stop.within(TTL / 5).await {
        let renewed = retry(&mut report, || {
            let (mut stub, name) = (stub.clone(), &name);
            async move { renew(&mut stub, name, "owner", token, None).await }
        });
        renewed
            .await
            .unwrap_or_else(|status| panic!("{name} is lost: {status:?}"));
        report.renewals += 1;
    }
    report
}

/// Takes a lock and gives it back.
async fn cycle(stub: Stub, n: usize, mut stop: Stop) -> Report {
    let mut report = Report::default();
    let name = format!("plain-{n}");
    while !stop.within(Duration::from_millis(50)).await {
        let token = take(&stub, &name, &mut report).await.fencing_token;
        let before = report.retries;
        let released = retry(&mut report, || {
            let (mut stub, name) = (stub.clone(), &name);
            async move { release(&mut stub, name, "owner", token).await }
        });
        match released.await {
            // After an unknown outcome: done.
            Err(status) if status.code() == Code::NotFound && report.retries > before => {}
            other => other.unwrap_or_else(|status| panic!("{name}: {status:?}")),
        }
        report.cycles += 1;
    }
    report
}
