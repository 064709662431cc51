//! Holders of short leases, who must not lose them, in three ways of using locks.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    calls::{acquire, granted, reason, release, renew, span},
    server::{Client, channel_at},
};
use tokio::{
    runtime::Builder,
    sync::{oneshot, watch},
    task::{JoinHandle, JoinSet},
};
use tonic::Status;

use crate::keep_alive::stage::{Stream, request};

/// A debug build, on cores that are shared with other tests, takes seconds for an answer.
const TTL: Duration = Duration::from_secs(if cfg!(debug_assertions) { 10 } else { 3 });
/// Of a lease that is given back and never renewed.
const TURN: Duration = Duration::from_secs(10);
const BY_CALLS: usize = 90;
const BY_STREAMS: usize = 90;
const IN_TURN: usize = 20;
/// Holders on one connection.
const TOGETHER: usize = 10;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// Holders at work.
pub(super) struct Holding {
    stop: watch::Sender<bool>,
    thread: JoinHandle<Report>,
}

/// What they have seen.
#[derive(Debug, Default)]
pub(super) struct Report {
    renewals: usize,
    /// Renewals that were heard of when the lease, as far as its holder knew, was over.
    pub(super) late: usize,
    /// Locks that were taken, held for a while, and given back.
    turns: usize,
    /// Acquires that were told to come again.
    put_off: usize,
    slowest: Duration,
    /// The least that was left of a lease when its renewal was heard of.
    least: Option<Duration>,
}

impl Holding {
    /// On a thread of its own: what the flood does to its own process is no concern of
    /// theirs.
    pub(super) async fn start(address: SocketAddr) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (began, all_began) = oneshot::channel();
        let thread = on_a_thread(async move {
            let tasks = begin(address, &stopped).await;
            began.send(()).unwrap();
            let mut sum = Report::default();
            for one in tasks.join_all().await {
                sum.renewals += one.renewals;
                sum.late += one.late;
                sum.turns += one.turns;
                sum.put_off += one.put_off;
                sum.slowest = sum.slowest.max(one.slowest);
                sum.least = sum.least.into_iter().chain(one.least).min();
            }
            sum
        });
        all_began.await.expect("all have their locks");
        Self { stop, thread }
    }

    /// Ends them; panics when one has lost its lock.
    pub(super) async fn end(self) -> Report {
        self.stop.send_replace(true);
        let sum = self.thread.await.expect("nobody has lost its lock");
        assert!(sum.turns > 0 && sum.renewals > 0, "{sum:?}");
        sum
    }
}

async fn begin(address: SocketAddr, stopped: &watch::Receiver<bool>) -> JoinSet<Report> {
    let mut tasks = JoinSet::new();
    let mut client = Client::new(channel_at(address).await);
    for n in 0..BY_CALLS + BY_STREAMS + IN_TURN {
        if n % TOGETHER == 0 {
            client = Client::new(channel_at(address).await);
        }
        let (name, stopped) = (format!("held-{n}"), stopped.clone());
        let mut client = client.clone();
        if n < IN_TURN {
            tasks.spawn(take_turns(client, name, stopped));
            continue;
        }
        let asked = Instant::now();
        let lock = granted(&mut client, &name, "holder", TTL).await;
        let ends = asked + span(lock.remaining);
        if n < IN_TURN + BY_CALLS {
            tasks.spawn(keep_by_calls(client, lock, ends, stopped));
        } else {
            tasks.spawn(keep_by_streams(client, lock, ends, stopped));
        }
    }
    tasks
}

/// Runs it on a thread and a runtime of its own.
pub(super) fn on_a_thread<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::task::spawn_blocking(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work)
    })
}

impl Report {
    fn renewed(&mut self, ends: Instant) {
        self.renewals += 1;
        let left = ends.saturating_duration_since(Instant::now());
        self.late += usize::from(left.is_zero());
        self.least = self.least.into_iter().chain([left]).min();
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>, after: Duration) -> bool {
    tokio::time::timeout(after, stop.wait_for(|stop| *stop))
        .await
        .is_ok()
}

/// A refusal for want of room: a holder must not hear of it.
fn assert_room(status: &Status) {
    assert_ne!(reason(status).as_deref(), Some("OVERLOADED"), "{status:?}");
}

/// Whether it is the end of a lease, rather than of a try.
fn is_transient(status: &Status) -> bool {
    let why = reason(status);
    matches!(
        why.as_deref(),
        Some("STORE_UNAVAILABLE" | "DEADLINE" | "REOPEN")
    )
}

async fn keep_by_calls(
    mut client: Client,
    lock: Lock,
    mut ends: Instant,
    mut stop: watch::Receiver<bool>,
) -> Report {
    let mut report = Report::default();
    let (name, token) = (&lock.resource, lock.fencing_token);
    let mut next = Instant::now();
    loop {
        // A third of the TTL from when it was asked for, however long the answer takes.
        next += TTL / 3;
        if stopped(&mut stop, next.saturating_duration_since(Instant::now())).await {
            return report;
        }
        loop {
            let asked = Instant::now();
            let answer = renew(&mut client, name, "holder", token, None).await;
            report.slowest = report.slowest.max(asked.elapsed());
            match answer {
                Ok(renewed) => {
                    report.renewed(ends);
                    ends = asked + span(renewed.remaining);
                    break;
                }
                Err(status) => {
                    assert_room(&status);
                    assert!(is_transient(&status), "{name} is lost: {status:?}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

async fn keep_by_streams(
    mut client: Client,
    lock: Lock,
    mut ends: Instant,
    mut stop: watch::Receiver<bool>,
) -> Report {
    let mut report = Report::default();
    loop {
        let mut stream = match Stream::try_open(&mut client, request(&lock)).await {
            Ok(stream) => stream,
            Err(status) => {
                assert!(is_transient(&status), "{status:?}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        loop {
            let renewed = tokio::select! {
                renewed = stream.try_next() => renewed,
                _ = stop.wait_for(|stop| *stop) => return report,
            };
            match renewed {
                Ok(renewal) => {
                    report.renewed(ends);
                    ends = renewal.deadline();
                }
                Err(status) => {
                    assert!(
                        is_transient(&status),
                        "{} is lost: {status:?}",
                        lock.resource
                    );
                    break;
                }
            }
        }
    }
}

async fn take_turns(mut client: Client, name: String, mut stop: watch::Receiver<bool>) -> Report {
    let mut report = Report::default();
    while !*stop.borrow() {
        let lock = match acquire(&mut client, &name, "holder", TURN).await {
            Ok(answer) => answer.lock.expect("nobody else wants it"),
            Err(status) => {
                let why = reason(&status);
                let known = matches!(why.as_deref(), Some("OVERLOADED" | "DEADLINE"));
                assert!(known || is_transient(&status), "{status:?}");
                report.put_off += 1;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        stopped(&mut stop, PAUSE * 5).await;
        let asked = Instant::now();
        give_back(&mut client, &name, lock.fencing_token).await;
        report.slowest = report.slowest.max(asked.elapsed());
        report.turns += 1;
    }
    report
}

async fn give_back(client: &mut Client, name: &str, token: i64) {
    let mut may_be_done = false;
    while let Err(status) = release(client, name, "holder", token).await {
        assert_room(&status);
        if may_be_done && reason(&status).as_deref() == Some("LOCK_NOT_FOUND") {
            return;
        }
        assert!(is_transient(&status), "{name} is lost: {status:?}");
        may_be_done = true;
        tokio::time::sleep(PAUSE).await;
    }
}
