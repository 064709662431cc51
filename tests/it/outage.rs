//! A database that is away, cut off, restarted, read-only or not what it was.
//!
//! Meanwhile every call is answered within its bound by an error that says
//! that it can be repeated, readiness follows, liveness stays, and the server
//! does not spin. Afterwards all works again without a restart of the server.
//!
//! Measured on two busy cores with the default budget of 5 s: readiness follows
//! a database that refuses within 1 s (the pace of the check), and a black hole
//! within 3 s (the check gives up after 2 s). It returns within 2 s once
//! Postgres answers. The slowest call took 4.6 s.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod holes;
mod pool;
mod restarts;
mod settings;
mod watch;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::{acquire, assert_no_secrets, expect_retryable, get, granted, reason, release, renew},
    server::Client,
};
use tokio::{task::JoinSet, time::timeout};
use tonic::{Code, Status};

use self::watch::Watch;

const LONG: Duration = Duration::from_secs(600);

/// The default budget of a call, and a second on top.
const BOUND: Duration = Duration::from_secs(6);

/// By when readiness must have followed the database: 3 s, and a busy machine.
const FOLLOW: Duration = Duration::from_millis(4300);

/// By when all must work again.
const RECOVERY: Duration = Duration::from_secs(10);

/// One call and its answer.
struct Seen {
    call: &'static str,
    sent: Instant,
    arrived: Instant,
    answer: Result<(), Status>,
}

/// A few calls of each kind all the time, and everything they were answered.
struct Load {
    seen: Arc<Mutex<Vec<Seen>>>,
    tasks: JoinSet<()>,
}

impl Load {
    /// Starts one caller for each RPC, ten calls a second each.
    async fn start(server: &Server) -> Self {
        let mut load = Self {
            seen: Arc::default(),
            tasks: JoinSet::new(),
        };
        let mut client = server.client().await;
        let token = granted(&mut client, "load", "holder", LONG)
            .await
            .fencing_token;
        for call in ["acquire", "renew", "release", "get"] {
            let mut client = client.clone();
            let seen = Arc::clone(&load.seen);
            load.tasks.spawn(async move {
                for n in 0.. {
                    let sent = Instant::now();
                    let answer = timeout(BOUND * 2, one(&mut client, call, n, token)).await;
                    let arrived = Instant::now();
                    let answer = answer.unwrap_or_else(|_| Err(Status::unknown("no answer")));
                    seen.lock().unwrap().push(Seen {
                        call,
                        sent,
                        arrived,
                        answer,
                    });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
        }
        load
    }

    /// Judges all that was answered until now: in time, as the contract has
    /// it. Returns how many calls failed, and the longest time one took.
    #[track_caller]
    fn judge(&self) -> (usize, Duration) {
        let mut longest = Duration::ZERO;
        let mut failed = 0;
        for seen in self.seen.lock().unwrap().drain(..) {
            let took = seen.arrived - seen.sent;
            longest = longest.max(took);
            assert!(took < BOUND, "{} took {took:?}", seen.call);
            if let Err(status) = seen.answer {
                failed += 1;
                assert_outage(&status);
            }
        }
        (failed, longest)
    }

    /// Waits until every kind of call works, three times in a row.
    async fn wait_until_well(&self, since: Instant) -> Duration {
        let tail = |call: &str| {
            let seen = self.seen.lock().unwrap();
            let mut last = seen.iter().rev().filter(|seen| seen.call == call).take(3);
            last.clone().count() == 3 && last.all(|seen| seen.answer.is_ok() && seen.sent > since)
        };
        loop {
            if ["acquire", "renew", "release", "get"]
                .iter()
                .all(|call| tail(call))
            {
                return since.elapsed();
            }
            assert!(since.elapsed() < RECOVERY, "calls still fail");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// One call; an answer that a healthy server may give counts as well.
async fn one(client: &mut Client, call: &str, n: u64, token: i64) -> Result<(), Status> {
    let answer = match call {
        "acquire" => {
            let name = format!("new-{n}");
            acquire(client, &name, "owner", LONG).await.map(|_| ())
        }
        "renew" => renew(client, "load", "holder", token, None)
            .await
            .map(|_| ()),
        // Nobody's: the row is locked and judged nevertheless.
        "release" => release(client, "load", "stranger", token).await,
        _ => get(client, "load").await.map(|_| ()),
    };
    match answer {
        Err(status) if status.code() == Code::PermissionDenied => Ok(()),
        other => other,
    }
}

/// An error as the contract has it for a store that is away.
#[track_caller]
fn assert_outage(status: &Status) {
    let why = reason(status);
    let fits = match status.code() {
        Code::Unavailable => why.as_deref() == Some("STORE_UNAVAILABLE"),
        Code::DeadlineExceeded => why.as_deref() == Some("DEADLINE"),
        _ => false,
    };
    assert!(fits, "{status:?}");
    assert_no_secrets(status);
    expect_retryable(status);
}

/// A server under light load, with its health watched.
struct Patient {
    server: Server,
    load: Load,
    watch: Watch,
}

impl Patient {
    async fn new(server: Server) -> Self {
        server.wait_ready().await;
        let load = Load::start(&server).await;
        let watch = Watch::start(&server).await;
        Self {
            server,
            load,
            watch,
        }
    }

    /// Waits until health has followed an outage that began at `since`, and
    /// says how long that took.
    async fn falls_ill(&mut self, what: &str, since: Instant) {
        let after = self.watch.wait_for(false, since, FOLLOW).await;
        println!("{what}: not ready after {after:?}");
    }

    /// Waits until all works again, judges what was answered meanwhile, and
    /// says how long things took.
    async fn recovers(&mut self, what: &str, since: Instant) {
        let ready = self.watch.wait_for(true, since, RECOVERY).await;
        let well = self.load.wait_until_well(since).await;
        let (failed, longest) = self.load.judge();
        self.watch.assert_sound();
        println!(
            "{what}: {failed} calls failed, the longest took {longest:?}; \
             ready again after {ready:?}, all calls work after {well:?}"
        );
        assert!(failed > 0, "nothing was broken");
    }
}
