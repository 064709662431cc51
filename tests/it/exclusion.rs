//! Exclusion and rising tokens under contention; and that being refused costs
//! the database nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Postgres, Server,
    calls::{self, assert_no_secrets, granted, reason, refused, span},
    eventually,
    history::{Held, History, deadline},
    postgres::fresh_database,
    server::Client,
};
use rand::Rng as _;
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::world::{LONG, SHORT};

/// How many clients contend.
const CLIENTS: usize = 64;

/// For how long at least.
const CONTENTION: Duration = Duration::from_secs(30);

/// Until there are more grants than this, however long a busy machine takes.
const ENOUGH: u64 = 100;

const EIGHT: [&str; 8] = ["0", "1", "2", "3", "4", "5", "6", "7"];

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_on_one_name_through_three_replicas_never_overlap() {
    let database = fresh_database().await;
    let servers = three_replicas(&database.url()).await;
    let run = Run::contend(&servers, &["contended"], CONTENTION).await;
    run.assert_sound();
}

/// A database may default to serializable; nobody hears of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_default_of_serializable_reaches_no_caller() {
    let database = fresh_database().await;
    let admin = database.client().await;
    let name = database.name();
    admin
        .run(&format!(
            "ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
        ))
        .await;
    let servers = three_replicas(&database.url()).await;
    let run = Run::contend(&servers, &EIGHT, Duration::from_secs(5)).await;
    run.assert_sound();
    assert_eq!(run.counts.transient.load(Ordering::Relaxed), 0);
}

async fn three_replicas(url: &str) -> [Server; 3] {
    // All at once, on an empty database.
    let (a, b, c) = tokio::join!(Server::start(url), Server::start(url), Server::start(url));
    [a, b, c]
}

#[derive(Debug, Default)]
struct Counts {
    granted: AtomicU64,
    refused: AtomicU64,
    transient: AtomicU64,
}

/// What came of a run.
#[derive(Debug, Default)]
struct Run {
    history: History,
    counts: Counts,
    over: AtomicBool,
}

impl Run {
    /// Lets all clients contend for the names for this time, and until they have
    /// had enough grants.
    async fn contend(
        servers: &[Server; 3],
        names: &'static [&'static str],
        time: Duration,
    ) -> Arc<Self> {
        let run = Arc::new(Self::default());
        let mut tasks = JoinSet::new();
        for n in 0..CLIENTS {
            let client = servers[n % servers.len()].client().await;
            let contender = Contender {
                client,
                owner: format!("client-{n}"),
                run: Arc::clone(&run),
            };
            tasks.spawn(contender.contend(names));
        }
        tokio::time::sleep(time).await;
        eventually("enough is granted", async || {
            (run.granted() > ENOUGH).then_some(())
        })
        .await;
        run.over.store(true, Ordering::Relaxed);
        tasks.join_all().await;
        run
    }

    fn granted(&self) -> u64 {
        self.counts.granted.load(Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn assert_sound(&self) {
        self.history.assert_sound();
        assert!(self.counts.refused.load(Ordering::Relaxed) > 0);
    }
}

struct Contender {
    client: Client,
    owner: String,
    run: Arc<Run>,
}

impl Contender {
    async fn contend(mut self, names: &[&str]) {
        for round in 0.. {
            let name = names[rand::rng().random_range(0..names.len())];
            let ttl = Duration::from_millis(rand::rng().random_range(500..1500));
            let id = format!("{}-{round}", self.owner);
            let ask = calls::request_with_id(name, &self.owner, ttl, &id);
            // An unknown outcome is repeated until it is known, also when the
            // time is over: a grant nobody knows would hide an overlap.
            let (asked, answer) = loop {
                let asked = Instant::now();
                match calls::send(&mut self.client, ask.clone()).await {
                    Ok(answer) => break (asked, Some(answer)),
                    Err(status) if is_spent(&status) => break (asked, None),
                    Err(status) => self.transient(&status).await,
                }
            };
            let start = Instant::now();
            // Spent: a grant that nobody heard of is over.
            let Some(answer) = answer else { continue };
            let Some(lock) = answer.lock else {
                self.run.counts.refused.fetch_add(1, Ordering::Relaxed);
                if self.run.is_over() {
                    return;
                }
                let rest = rand::rng().random_range(5..60);
                tokio::time::sleep(Duration::from_millis(rest)).await;
                continue;
            };
            self.run.counts.granted.fetch_add(1, Ordering::Relaxed);
            let believed = deadline(asked, span(lock.remaining));
            let stop = self.work(name, lock.fencing_token, believed).await;
            self.run.history.record(Held {
                resource: name.to_owned(),
                holder: self.owner.clone(),
                asked,
                start,
                end: stop,
                token: lock.fencing_token,
            });
            if self.run.is_over() {
                return;
            }
        }
    }

    /// Works under a lease, renews it now and then, and gives it back or
    /// forgets to. Returns until when it was believed in.
    async fn work(&mut self, name: &str, token: i64, mut believed: Instant) -> Instant {
        let (renewals, forget) = {
            let mut rng = rand::rng();
            let renewals = if rng.random_bool(0.1) { 3 } else { 0 };
            (renewals, rng.random_bool(0.01))
        };
        for _ in 0..renewals {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let asked = Instant::now();
            if asked > believed {
                return believed;
            }
            match calls::renew(&mut self.client, name, &self.owner, token, None).await {
                Ok(lock) => believed = believed.max(deadline(asked, span(lock.remaining))),
                // Too late: somebody else may even have had it, and given it back.
                Err(status) if is_over(&status) => return believed,
                Err(status) => self.transient(&status).await,
            }
        }
        if forget {
            // Lives until its own deadline.
            tokio::time::sleep_until(believed.into()).await;
            return believed;
        }
        let stop = Instant::now().min(believed);
        loop {
            let answer = calls::release(&mut self.client, name, &self.owner, token).await;
            match answer {
                Ok(()) => return stop,
                // Its time was over, or an earlier try had happened.
                Err(status) if is_over(&status) => return stop,
                Err(status) => self.transient(&status).await,
            }
        }
    }

    /// Counts an error that may be answered under load; any other is a fault.
    async fn transient(&self, status: &Status) {
        let known = matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted
        );
        assert!(known && reason(status).is_some(), "{status:?}");
        assert_no_secrets(status);
        self.run.counts.transient.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(calls::expect_retryable(status)).await;
    }
}

fn is_spent(status: &Status) -> bool {
    reason(status).as_deref() == Some("REQUEST_SPENT")
}

/// Whether an error ends a lease.
fn is_over(status: &Status) -> bool {
    matches!(
        reason(status).as_deref(),
        Some("LOCK_NOT_FOUND" | "LOCK_EXPIRED" | "NOT_OWNER" | "TOKEN_SUPERSEDED")
    )
}

/// No WAL, no transaction id, no token: with all else quiet, the numbers stand
/// still.
#[tokio::test]
async fn a_refused_acquire_writes_nothing() {
    let postgres = Postgres::builder()
        .setting("autovacuum", "off")
        // Nothing but commits writes WAL then: no running transactions for
        // standbys, no checkpoint by time.
        .setting("wal_level", "minimal")
        .setting("max_wal_senders", "0")
        .setting("checkpoint_timeout", "1d")
        .start()
        .await;
    let server = Server::start(&postgres.url()).await;
    let mut client = server.client().await;
    granted(&mut client, "held", "a", LONG * 10).await;
    // One name that was free once: the look is the same, its row is older.
    granted(&mut client, "again", "b", SHORT).await;
    granted(&mut client, "again", "b", LONG * 10).await;
    refused(&mut client, "held", "c", LONG).await;

    let admin = postgres.admin().await;
    // Without dead rows and unset hint bits, reading cleans nothing up.
    admin.run("VACUUM FREEZE").await;
    admin.run("CHECKPOINT").await;
    let state = "SELECT concat_ws(' ', pg_current_wal_insert_lsn(),
                        pg_snapshot_xmax(pg_current_snapshot()),
                        (SELECT last_value FROM fencepost.fencing_tokens))";
    let before: String = admin.value(state).await;
    let tasks: Vec<_> = (0..16)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let owner = format!("challenger-{n}");
                for round in 0..50 {
                    let name = if round % 2 == 0 { "held" } else { "again" };
                    let id = format!("{owner}-{round}");
                    let ask = calls::request_with_id(name, &owner, LONG, &id);
                    calls::refusal_in(calls::send(&mut client, ask).await);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let after: String = admin.value(state).await;
    assert_eq!(after, before, "WAL position, next transaction, last token");
    granted(&mut client, "free", "a", LONG).await;
    assert_ne!(admin.value::<String>(state).await, before);
}
