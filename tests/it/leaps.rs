//! A restart of the database is one leap of the tokens, however many replicas
//! and calls notice it at once.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server, calls, eventually,
    postgres::{Client as Session, Database, Stop, fresh_database},
};

use crate::{metrics::scrape::Scrape, tokens::LONG};

const REPLICAS: usize = 3;
const CLIENTS: usize = 12;

fn leaps(server: &Server) -> usize {
    let lines = server.logs();
    lines
        .iter()
        .filter(|line| line.contains("tokens leapt"))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_database_is_one_leap_for_all_replicas() {
    let mut postgres = Postgres::start().await;
    let mut replicas = Vec::new();
    for _ in 0..REPLICAS {
        replicas.push(Server::start(&postgres.url()).await);
    }
    let mut before = 0;
    for round in 1..=2 {
        postgres.restart(Stop::Fast).await;
        let until = Instant::now() + Duration::from_secs(3);
        let mut load = Vec::new();
        for n in 0..CLIENTS {
            let mut client = replicas[n % REPLICAS].client().await;
            load.push(tokio::spawn(async move {
                let (mut granted, ttl) = (0, Duration::from_secs(5));
                let name = format!("lock {n}");
                while Instant::now() < until {
                    let answer = calls::acquire(&mut client, &name, "a", ttl).await;
                    granted += u32::from(answer.is_ok());
                }
                granted
            }));
        }
        for client in load {
            assert!(client.await.unwrap() > 10, "a client was not served");
        }
        let after: usize = replicas.iter().map(leaps).sum();
        assert_eq!(after - before, 1, "leaps of restart {round}");
        before = after;
    }
}

/// Waits for a leap other than `before` that waits, because somebody keeps the identity:
/// its session, and since when.
async fn another_leap(watcher: &Session, before: Option<&String>) -> String {
    eventually("a leap waits for the identity", async || {
        let waiting = "FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock' AND query LIKE '%leap_v1%'";
        let row = format!("SELECT pid || ' since ' || query_start {waiting} LIMIT 1");
        let leap = watcher.try_value::<String>(&row).await?;
        (before != Some(&leap)).then_some(leap)
    })
    .await
}

/// A server that has just started and cannot leap, and the session that is in its way.
async fn no_leap(database: &Database, room: &str) -> (Server, Session) {
    drop(Server::builder(&database.url()).ready().await);
    let in_the_way = database.client().await;
    in_the_way
        .run("BEGIN; SELECT FROM fencepost.identity FOR UPDATE")
        .await;
    let server = Server::builder(&database.url())
        .flag("--max-in-flight", room)
        .flag("--drain-delay", "0s")
        .start()
        .await;
    (server, in_the_way)
}

/// The wait is in the room of the calls: no more wait than may.
#[tokio::test]
async fn calls_that_wait_for_the_first_leap_have_their_places() {
    let database = fresh_database().await;
    let (server, in_the_way) = no_leap(&database, "4").await;
    let mut client = server.client().await;
    let waiting: Vec<_> = (0..2)
        .map(|n| {
            let mut client = client.clone();
            let name = format!("waiting-{n}");
            tokio::spawn(async move { calls::acquire(&mut client, &name, "a", LONG).await })
        })
        .collect();
    eventually("two calls wait", async || {
        let room = [("room", "asking")];
        let calls = Scrape::of(&server).await;
        (calls.value("fencepost_calls_in_flight", &room) >= 2.0).then_some(())
    })
    .await;
    // Half of the room is what one connection has.
    let refused = calls::acquire(&mut client, "one-more", "a", LONG).await;
    let refused = refused.unwrap_err();
    assert_eq!(calls::reason(&refused).as_deref(), Some("OVERLOADED"));
    in_the_way.run("COMMIT").await;
    for call in waiting {
        assert!(call.await.unwrap().unwrap().acquired);
    }
}

#[tokio::test]
async fn a_leap_is_finished_though_its_caller_has_gone() {
    let database = fresh_database().await;
    let watcher = database.client().await;
    let (server, in_the_way) = no_leap(&database, "4").await;
    // That of a look at the database's health; the call's is the next.
    let first = another_leap(&watcher, None).await;
    let mut client = server.client().await;
    let call = tokio::spawn(async move { calls::acquire(&mut client, "name", "a", LONG).await });
    let leap = another_leap(&watcher, Some(&first)).await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    eventually("the server knows that the caller has gone", async || {
        let calls = Scrape::of(&server).await;
        let room = [("room", "asking")];
        (calls.value("fencepost_calls_in_flight", &room) == 0.0).then_some(())
    })
    .await;
    in_the_way.run("COMMIT").await;
    server.wait_ready().await;
    let (session, _) = leap.split_once(' ').unwrap();
    let open = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {session}");
    assert_eq!(watcher.value::<i64>(&open).await, 1, "its session is gone");
}

#[tokio::test]
async fn a_drain_waits_for_a_leap() {
    let database = fresh_database().await;
    let watcher = database.client().await;
    let (server, in_the_way) = no_leap(&database, "4").await;
    another_leap(&watcher, None).await;
    let before: i64 = watcher
        .value("SELECT last_value FROM fencepost.fencing_tokens")
        .await;
    server.sigterm();
    let early = tokio::time::timeout(Duration::from_millis(500), server.wait_exit()).await;
    assert!(early.is_err(), "it has ended in the middle of a leap");
    in_the_way.run("COMMIT").await;
    assert!(server.wait_exit().await.success());
    let after: i64 = watcher
        .value("SELECT last_value FROM fencepost.fencing_tokens")
        .await;
    assert!(after > before);
}
