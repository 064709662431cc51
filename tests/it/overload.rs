//! A flood of Acquires from one caller, faster than they can be served, beside
//! holders that keep, give back and take locks: the holders lose nothing, and the
//! flood hears when to come again.

#![expect(clippy::print_stdout, reason = "figures, for who reads the log")]

mod holding;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use fencepost_support::{
    Postgres, Server,
    calls::{acquire, expect_retryable, granted, reason, release, renew, request},
    postgres::fresh_database,
    proxy::Proxy,
    row_lock::RowLock,
    server::{Client, channel_at},
};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

use self::holding::{Holding, on_a_thread};
use crate::{
    metrics::scrape::Scrape,
    world::{LONG, SHORT},
};

/// Calls a second, whatever becomes of them. A debug build serves a tenth of what a release build does, and shares
/// the machine with other tests.
const RATE: usize = if cfg!(debug_assertions) { 400 } else { 5_000 };
const FLOOD: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(20);

/// Answers by their reason; `""` are those that took the lock or said who has it.
type Answers = BTreeMap<String, usize>;

/// Floods a server; each error must say why, and when to come again.
async fn flood(address: SocketAddr, connections: usize) -> Answers {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(Client::new(channel_at(address).await));
    }
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let began = Instant::now();
    let mut calls = JoinSet::new();
    while began.elapsed() < FLOOD {
        ticks.tick().await;
        for _ in 0..RATE * 20 / 1000 {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let mut client = clients[n % connections].clone();
            // A name of its own: each is a row to be written.
            let ask = request(&format!("flood-{n}"), "flood", LONG);
            calls.spawn(async move { client.acquire(ask).await });
        }
    }
    let sent = began.elapsed();
    let mut answers = Answers::new();
    while let Some(answer) = calls.join_next().await {
        let why = match answer.unwrap() {
            Ok(_) => String::new(),
            Err(status) => {
                expect_retryable(&status);
                reason(&status).unwrap_or_else(|| panic!("an opaque error: {status:?}"))
            }
        };
        *answers.entry(why).or_default() += 1;
    }
    println!(
        "{connections} connections, {} calls in {sent:?}, the last answered after {:?}: {answers:?}",
        answers.values().sum::<usize>(),
        began.elapsed()
    );
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_lose_nothing_beside_a_flood_of_acquires() {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let room = RATE * 3 / 10;
    let server = Server::builder(&Postgres::url_via(proxy.address(), database.name()))
        .flag("--max-in-flight", &room.to_string())
        .ready()
        .await;
    let holding = Holding::start(server.grpc()).await;

    for way in [Duration::ZERO, Duration::from_millis(200)] {
        proxy.delay(way);
        for connections in [1, 50] {
            println!("each way to the database takes {way:?}:");
            let answers = on_a_thread(flood(server.grpc(), connections))
                .await
                .unwrap();
            let heard = |why: &str| answers.get(why).copied().unwrap_or_default();
            assert!(heard("") > 0, "{answers:?}");
            // Then a round takes 0.4 s, and all of the room waits for it.
            if !way.is_zero() {
                assert!(heard("OVERLOADED") > RATE / 10, "{answers:?}");
            }
        }
    }
    let report = holding.end().await;
    println!("beside it {report:?}");
    assert_eq!(report.late, 0, "{report:?}");
    let scrape = Scrape::of(&server).await;
    let shed =
        |method, why| scrape.value("fencepost_shed_total", &[("method", method), ("why", why)]);
    assert!(shed("Acquire", "share") > 0.0);
    for why in ["full", "share", "late"] {
        assert_eq!(
            (shed("Renew", why), shed("Release", why)),
            (0.0, 0.0),
            "{why}"
        );
    }
}

/// Those who hold a lock have room of their own.
#[tokio::test(flavor = "multi_thread")]
async fn acquires_that_wait_refuse_no_renewal_and_no_release() {
    const ROOM: usize = 8;
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "4")
        .flag("--max-in-flight", &ROOM.to_string())
        .ready()
        .await;
    let mut client = server.client().await;
    let held = granted(&mut client, "held", "holder", LONG).await;
    let given = granted(&mut client, "given", "holder", LONG).await;
    let over = granted(&mut client, "hot", "holder", SHORT).await;
    tokio::time::sleep(SHORT * 2).await;

    let row = RowLock::hold(&database.url(), "hot").await;
    let mut calls = JoinSet::new();
    for connection in 0..2 {
        let flooding = server.client().await;
        for n in 0..ROOM {
            let mut client = flooding.clone();
            let owner = format!("{connection}-{n}");
            calls.spawn(async move { acquire(&mut client, "hot", &owner, LONG).await });
        }
    }
    // Half of the room is for the first of the two, half of the rest for the other.
    let mut refused = 0;
    while refused < 2 * ROOM - ROOM / 2 - ROOM / 4 {
        let status = calls.join_next().await.unwrap().unwrap().unwrap_err();
        assert_eq!(reason(&status).as_deref(), Some("OVERLOADED"), "{status:?}");
        expect_retryable(&status);
        refused += 1;
    }
    renew(&mut client, "held", "holder", held.fencing_token, None)
        .await
        .unwrap();
    release(&mut client, "given", "holder", given.fencing_token)
        .await
        .unwrap();
    // And there is a place for another caller.
    granted(&mut client, "given", "next", LONG).await;

    row.rollback().await;
    let mut grants = 0;
    for answer in calls.join_all().await {
        grants += usize::from(answer.unwrap().acquired);
    }
    assert_eq!(grants, 1);
    assert!(over.fencing_token > 0);
}

/// What waits behind a flood is not begun once nobody has time for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_time_is_over_before_its_turn_is_not_begun() {
    const CALLS: usize = 20;
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let server = Server::builder(&Postgres::url_via(proxy.address(), database.name()))
        .flag("--database-pool-size", "1")
        .ready()
        .await;
    let mut client = server.client().await;
    granted(&mut client, "first", "a", LONG).await;
    let rounds = ("fencepost_round_calls_count", [("lane", "calls")]);
    let before = Scrape::of(&server).await.value(rounds.0, &rounds.1);
    proxy.hold();
    let busy = {
        let mut client = client.clone();
        tokio::spawn(async move { acquire(&mut client, "busy", "a", LONG).await })
    };
    // Not merely there: what comes before its round has begun may go with it.
    crate::metrics::wait_for(&server, rounds.0, &rounds.1, before + 1.0).await;
    let calls: JoinSet<_> = (0..CALLS)
        .map(|n| {
            let mut client = client.clone();
            let mut ask = tonic::Request::new(request(&format!("late-{n}"), "a", LONG));
            ask.set_timeout(SHORT);
            async move { client.acquire(ask).await }
        })
        .collect();
    for answer in calls.join_all().await {
        answer.unwrap_err();
    }
    proxy.forward().await;
    busy.await.unwrap().unwrap();
    let late = [("method", "Acquire"), ("why", "late")];
    let scrape = crate::metrics::wait_for(&server, "fencepost_calls_in_flight", &[], 0.0).await;
    // A client whose time is over early does not even send.
    assert!(scrape.value("fencepost_shed_total", &late) > CALLS as f64 / 2.0);
    let admin = database.client().await;
    let rows: i64 = admin
        .value("SELECT count(*) FROM fencepost.locks WHERE resource LIKE 'late-%'")
        .await;
    assert_eq!(rows, 0);
}
