//! A standby, a host or a reader of the log that does not answer.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use fencepost_support::{
    Postgres, Server,
    calls::{acquire, get, granted, renew},
    eventually,
    postgres::{Replication, fresh_database},
    proxy::Proxy,
    server::{Client, binary, endpoint_at},
    system::free_address,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::errors::expect_transient;

const LONG: Duration = Duration::from_secs(60);
const POOL: i64 = 4;

/// Commits wait for ever, and a session in such a wait outlives its connection:
/// they must not pile up in a database that others use too.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_standby_costs_no_more_sessions_than_the_pool_has() {
    let primary = Postgres::start().await;
    let standby = primary.standby("strict", Replication::Synchronous).await;
    let server = Server::builder(&primary.url())
        .flag("--database-pool-size", &POOL.to_string())
        .flag("--request-timeout", "2s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    granted(&mut client, "before", "holder", LONG).await;
    standby.freeze();

    let mut callers = JoinSet::new();
    for n in 0..8 {
        let mut client = client.clone();
        callers.spawn(async move {
            for round in 0_u32.. {
                let name = format!("{n}-{round}");
                expect_transient(acquire(&mut client, &name, "caller", LONG).await);
            }
        });
    }
    let admin = primary.admin().await;
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencepostd'";
    let until = Instant::now() + Duration::from_secs(15);
    let mut unready = false;
    while Instant::now() < until {
        // One more asks how the database is.
        let now: i64 = admin.value(sessions).await;
        assert!(now <= POOL + 1, "{now} sessions");
        unready |= server.health("").await != server.health("liveness").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(unready, "health says that no lock can be taken");
    assert!(
        callers.try_join_next().is_none(),
        "no caller heard anything else"
    );
    callers.shutdown().await;

    standby.thaw();
    let awake = Instant::now();
    eventually("locks are granted again", async || {
        let answer = acquire(&mut client, "after", "holder", LONG).await;
        answer.is_ok_and(|answer| answer.acquired).then_some(())
    })
    .await;
    assert!(
        awake.elapsed() < Duration::from_secs(10),
        "{:?}",
        awake.elapsed()
    );
    server.wait_ready().await;
    // What nobody was told of is given back.
    eventually("the names of the stalled calls are free", async || {
        get(&mut client, "0-0").await.is_err().then_some(())
    })
    .await;
}

/// Of several hosts one may hang, before or after it accepts: the others are
/// found all the same, at the start and later.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_hangs_keeps_no_other_from_being_found() {
    let postgres = Postgres::start().await;
    let first = Proxy::start(postgres.address()).await;
    first.black_hole();
    let url = format!(
        "postgresql://postgres@{},{}/postgres",
        first.address(),
        postgres.address()
    );
    let server = Server::start(&url).await;
    server.wait_ready().await;
    granted(&mut server.client().await, "a", "holder", LONG).await;
}

/// A primary on a busy machine takes longer than its share of the time, and the
/// standby refuses at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_slow_to_answer_is_found_among_its_standbys() {
    let primary = Postgres::start().await;
    let standby = primary.standby("next", Replication::Asynchronous).await;
    let url = format!(
        "postgresql://postgres@{},{}/postgres",
        primary.address(),
        standby.address()
    );
    // Of the 4 s to connect, each has 2.
    let server = Server::builder(&url).flag("--request-timeout", "10s");
    primary.freeze();
    let slow = async {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        primary.thaw();
    };
    let (server, ()) = tokio::join!(server.start(), slow);
    server.wait_ready().await;
    granted(&mut server.client().await, "a", "holder", LONG).await;
}

/// An old primary and its promoted successor, behind one URL.
struct Succession {
    old: Postgres,
    new: Postgres,
    server: Server,
    client: Client,
}

impl Succession {
    /// The old primary is frozen and not demoted, and the server has connections
    /// to it.
    async fn start() -> Self {
        let old = Postgres::start().await;
        let new = old.standby("next", Replication::Asynchronous).await;
        let url = format!(
            "postgresql://postgres@{},{}/postgres",
            old.address(),
            new.address()
        );
        let server = Server::builder(&url)
            .flag("--database-pool-size", "4")
            .start()
            .await;
        server.wait_ready().await;
        let client = server.client().await;
        let this = Self {
            old,
            new,
            server,
            client,
        };
        assert!(this.burst("before").await);
        this.old.freeze();
        this.new.promote().await;
        this
    }

    /// Whether sixteen names were answered.
    async fn burst(&self, round: &str) -> bool {
        let mut calls = JoinSet::new();
        for n in 0..16 {
            let (mut client, name) = (self.client.clone(), format!("{round}-{n}"));
            calls.spawn(async move { acquire(&mut client, &name, "holder", LONG).await });
        }
        calls.join_all().await.iter().all(Result::is_ok)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_is_left_for_its_successor() {
    let frozen = Instant::now();
    let succession = Succession::start().await;
    let mut round = 0;
    eventually("every call is answered by the new primary", async || {
        round += 1;
        let answered = succession.burst(&format!("after-{round}")).await;
        answered.then_some(())
    })
    .await;
    assert!(frozen.elapsed() < Duration::from_secs(20));
    succession.old.thaw();
}

/// The old primary wakes up, and takes writes. One connection has met the new
/// one: none goes back, or a name would be granted on both.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_wakes_up_after_its_successor_is_not_used_again() {
    let succession = Succession::start().await;
    succession
        .server
        .wait_for_log("the health check meets the new primary", |line| {
            line["message"]
                .as_str()
                .is_some_and(|message| message.starts_with("another Postgres answers"))
        })
        .await;
    succession.old.thaw();
    let there = succession.old.admin().await;
    let here = succession.new.admin().await;
    for round in 0..20 {
        let round = format!("awake-{round}");
        assert!(succession.burst(&round).await);
        let count = format!("SELECT count(*) FROM fencepost.locks WHERE resource LIKE '{round}-%'");
        assert_eq!(there.value::<i64>(&count).await, 0);
        assert_eq!(here.value::<i64>(&count).await, 16);
    }
}

/// A log that nobody reads fills its pipe, and must not stop the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_stops_nothing() {
    let database = fresh_database().await;
    let (grpc, http) = (free_address(), free_address());
    let mut server = Command::new(binary())
        .args(["--database-url", &database.url(), "--log", "debug"])
        .args([
            "--listen",
            &grpc.to_string(),
            "--http-listen",
            &http.to_string(),
        ])
        .args(["--drain-delay", "0s", "--drain-timeout", "5s"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let channel = eventually("the server listens", async || {
        endpoint_at(grpc).connect().await.ok()
    })
    .await;
    let mut client = Client::new(channel);
    let held = granted(&mut client, "held", "holder", LONG).await;
    // More than a pipe holds, several times over.
    for _ in 0..3000 {
        let unknown = held.fencing_token + 1;
        renew(&mut client, "held", "holder", unknown, None)
            .await
            .unwrap_err();
    }
    let pid = Pid::from_child(&server);
    kill_process(pid, Signal::TERM).unwrap();
    let status = eventually("the server ends", async || server.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
}
