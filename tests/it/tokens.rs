//! What the tests of fencing tokens share: a record of every token that was
//! answered, clients that fight over names, and a few moves of an operator.
//!
//! A token is judged in real time: whoever asks after another was answered
//! must get a larger one, whatever happened to the database in between.

use std::{
    collections::BTreeMap,
    process::ExitStatus,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server, calls, eventually,
    postgres::{Client as Session, Postgres},
    server::{Builder, Client},
    wait::PATIENCE,
};
use tokio::{sync::watch, task::JoinSet};
use tonic::Status;

/// Long enough never to expire within a test.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// JavaScript's last exact integer plus one: no token may reach it.
const DOUBLE_LIMIT: i64 = 1 << 53;

/// Tokens per second of the absolute leap.
pub(crate) const TICKS_PER_SECOND: i64 = 1 << 22;

/// One grant as its caller saw it.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) resource: String,
    pub(crate) token: i64,
    /// By the database's clock, read under the row's lock.
    pub(crate) acquired_at: SystemTime,
    pub(crate) asked: Instant,
    pub(crate) answered: Instant,
}

/// Every grant that was answered.
#[derive(Debug, Default)]
pub(crate) struct Record {
    grants: Mutex<Vec<Grant>>,
}

impl Record {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// One Acquire; a grant is recorded, a refusal is none.
    pub(crate) async fn acquire(
        &self,
        client: &mut Client,
        resource: &str,
        owner: &str,
        ttl: Duration,
    ) -> Result<Option<Lock>, Status> {
        let asked = Instant::now();
        let answer = calls::acquire(client, resource, owner, ttl).await?;
        let answered = Instant::now();
        if !answer.acquired {
            return Ok(None);
        }
        let lock = answer.lock.expect("a grant carries the lease");
        assert!(
            0 < lock.fencing_token && lock.fencing_token < DOUBLE_LIMIT,
            "{lock:?}"
        );
        self.lock().push(Grant {
            resource: resource.to_owned(),
            token: lock.fencing_token,
            acquired_at: calls::time(lock.acquired_at),
            asked,
            answered,
        });
        Ok(Some(lock))
    }

    /// Repeats Acquire, through outages, until it is granted.
    pub(crate) async fn granted(
        &self,
        client: &mut Client,
        resource: &str,
        owner: &str,
        ttl: Duration,
    ) -> Lock {
        let start = Instant::now();
        loop {
            let answer = self.acquire(client, resource, owner, ttl).await;
            if let Ok(Some(lock)) = answer {
                return lock;
            }
            assert!(start.elapsed() < PATIENCE, "{resource}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Grants `resource` again and again, each time to another owner.
    pub(crate) async fn burst(&self, client: &mut Client, resource: &str, times: u32) -> Vec<Lock> {
        let mut locks = Vec::new();
        for n in 0..times {
            let owner = format!("burst-{n}");
            let lock = self.granted(client, resource, &owner, LONG).await;
            calls::release(client, resource, &owner, lock.fencing_token)
                .await
                .unwrap();
            locks.push(lock);
        }
        locks
    }

    /// The largest token that anybody was ever told.
    pub(crate) fn highest(&self) -> i64 {
        self.lock().iter().map(|grant| grant.token).max().unwrap()
    }

    pub(crate) fn grants(&self) -> Vec<Grant> {
        self.lock().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Panics unless, for each resource, every token is above all that were
    /// answered before it was asked for.
    #[track_caller]
    pub(crate) fn assert_rising(&self) {
        let mut resources = BTreeMap::<String, Vec<Grant>>::new();
        for grant in self.grants() {
            let of_resource = resources.entry(grant.resource.clone()).or_default();
            of_resource.push(grant);
        }
        for mut by_asked in resources.into_values() {
            let mut by_answered = by_asked.clone();
            by_answered.sort_by_key(|grant| grant.answered);
            by_asked.sort_by_key(|grant| grant.asked);
            let mut before = by_answered.into_iter().peekable();
            let mut largest: Option<Grant> = None;
            for next in by_asked {
                while let Some(grant) = before.next_if(|grant| grant.answered < next.asked) {
                    if largest.as_ref().is_none_or(|held| held.token < grant.token) {
                        largest = Some(grant);
                    }
                }
                if let Some(largest) = &largest {
                    assert!(
                        largest.token < next.token,
                        "the token did not rise:\n  {largest:?}\n  {next:?}"
                    );
                }
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Grant>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clients that take and release a few names, through several servers, until
/// told to stop.
pub(crate) struct Load {
    stop: watch::Sender<bool>,
    clients: JoinSet<()>,
    failed: Arc<Mutex<Vec<Status>>>,
    calls: Arc<AtomicU64>,
}

impl Load {
    pub(crate) async fn start(
        record: &Arc<Record>,
        servers: &[&Server],
        names: usize,
        clients: usize,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let failed = Arc::<Mutex<Vec<Status>>>::default();
        let calls = Arc::<AtomicU64>::default();
        let mut tasks = JoinSet::new();
        for n in 0..clients {
            let mut client = servers[n % servers.len()].client().await;
            let record = Arc::clone(record);
            let (stopped, failed, calls) =
                (stopped.clone(), Arc::clone(&failed), Arc::clone(&calls));
            tasks.spawn(async move {
                let owner = format!("client-{n}");
                for round in n.. {
                    if *stopped.borrow() {
                        return;
                    }
                    let resource = format!("load-{}", round % names);
                    let done = take_turn(&record, &mut client, &resource, &owner).await;
                    calls.fetch_add(1, Ordering::Relaxed);
                    if let Err(status) = done {
                        failed.lock().unwrap().push(status);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            });
        }
        Self {
            stop,
            clients: tasks,
            failed,
            calls,
        }
    }

    /// Waits until `count` more turns were taken.
    pub(crate) async fn more(&self, count: u64) {
        let goal = self.calls.load(Ordering::Relaxed) + count;
        eventually("the load goes on", async || {
            (self.calls.load(Ordering::Relaxed) >= goal).then_some(())
        })
        .await;
    }

    /// Ends it; returns what failed.
    pub(crate) async fn stop(mut self) -> Vec<Status> {
        self.stop.send_replace(true);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        self.failed.lock().unwrap().clone()
    }
}

async fn take_turn(
    record: &Record,
    client: &mut Client,
    resource: &str,
    owner: &str,
) -> Result<(), Status> {
    let ttl = Duration::from_secs(2);
    match record.acquire(client, resource, owner, ttl).await? {
        Some(lock) => calls::release(client, resource, owner, lock.fencing_token).await,
        None => {
            tokio::time::sleep(Duration::from_millis(2)).await;
            Ok(())
        }
    }
}

/// A cluster that is soon back after a crash: the flush of its files that
/// comes first takes seconds one by one, and is of no use to a machine that
/// has not crashed itself.
pub(crate) async fn quick_to_recover() -> Postgres {
    let builder = Postgres::builder();
    if cfg!(target_os = "linux") {
        let at_once = builder.setting("recovery_init_sync_method", "syncfs");
        at_once.start().await
    } else {
        builder.start().await
    }
}

/// Where a leap would take the tokens now, by the database's clock.
pub(crate) async fn by_clock(session: &Session) -> i64 {
    session
        .value(
            "SELECT floor(extract(epoch FROM clock_timestamp()
                  - timestamptz '2026-01-01 00:00:00+00') * 4194304)::bigint",
        )
        .await
}

/// Where the sequence is.
pub(crate) async fn position(session: &Session) -> i64 {
    session
        .value("SELECT last_value FROM fencepost.fencing_tokens")
        .await
}

/// One page of a purge, as a server sends it, with a retention of one's own.
/// Returns how many names went.
pub(crate) async fn purge(session: &Session, retention: Duration) -> i32 {
    let ms = retention.as_millis();
    session
        .value(&format!(
            "SELECT purged FROM fencepost.purge_v1('', 500, {ms}, clock_timestamp())"
        ))
        .await
}

/// Asserts that a database knows of none of `lost`, and that its sequence would
/// hand out some of their tokens again.
pub(crate) async fn assert_forgotten(session: &Session, lost: &[Lock]) {
    assert_rows_forgotten(session, lost).await;
    let last = lost.iter().map(|lock| lock.fencing_token).max().unwrap();
    let at = position(session).await;
    assert!(at < last, "the sequence is at {at}, not below {last}");
}

/// Asserts that a database knows of none of `lost`. Servers may have made its
/// sequence leap already.
pub(crate) async fn assert_rows_forgotten(session: &Session, lost: &[Lock]) {
    let tokens: Vec<i64> = lost.iter().map(|lock| lock.fencing_token).collect();
    let row = session
        .query_one(
            "SELECT count(*) FROM fencepost.locks WHERE fencing_token = ANY ($1)",
            &[&tokens],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 0, "a grant was not lost");
}

/// Runs a command of the server binary to its end.
pub(crate) async fn command(builder: Builder) -> (ExitStatus, Vec<String>) {
    let process = builder.spawn();
    let status = process.wait_exit().await;
    // Its last lines may still be on their way: wait for their end.
    process.log().wait_for(|_| None::<()>).await;
    (status, process.log().lines())
}

/// `fencepostd advance-tokens`.
pub(crate) async fn advance_tokens(url: &str, words: &[&str]) -> (ExitStatus, Vec<String>) {
    let builder = Server::builder(url).switch("advance-tokens");
    command(words.iter().fold(builder, |all, word| all.switch(word))).await
}

/// How often a server has logged that tokens leapt, a new database's first
/// leap not counted.
pub(crate) fn leaps(server: &Server) -> usize {
    let leapt = |line: &&String| line.contains("fencing tokens leapt") || line.contains("relative");
    server.logs().iter().filter(leapt).count()
}

/// Expects so many leaps of these together. The log comes a moment after the
/// answer.
pub(crate) async fn expect_leaps(servers: &[&Server], expected: usize) {
    let count = || servers.iter().map(|server| leaps(server)).sum::<usize>();
    let enough = async || (count() >= expected).then_some(());
    eventually("a leap in the log", enough).await;
    assert_eq!(count(), expected);
}

/// The URL of the database `postgres` behind a proxy.
pub(crate) fn url_behind(proxy: &fencepost_support::proxy::Proxy) -> String {
    Postgres::url_via(proxy.address(), "postgres")
}
