//! A stream beside everything else that can happen to its lease: releases,
//! other replicas, and a server that stood still.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{granted, release},
    postgres::fresh_database,
};
use rand::Rng as _;
use tokio::{task::JoinSet, time::sleep};

use super::stage::{Stream, follow, request, request_for};
use crate::world::LONG;

/// Whatever renewal is on its way, what was given back stays free.
#[tokio::test(flavor = "multi_thread")]
async fn no_renewal_brings_a_released_lock_back() {
    const ROUNDS: usize = 60;
    const WORKERS: usize = 8;
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let mut client = server.client().await;
        workers.spawn(async move {
            let name = format!("lock-{worker}");
            let ttl = Duration::from_millis(500);
            for round in 0..ROUNDS {
                // The lock is free, so each of them gets it at once.
                let owner = format!("owner-{round}");
                let lock = granted(&mut client, &name, &owner, ttl).await;
                let mut stream = Stream::open(&mut client, request(&lock)).await;
                if round % 2 == 0 {
                    stream.next().await;
                }
                let pause = rand::rng().random_range(0..20_000);
                sleep(Duration::from_micros(pause)).await;
                // Half of the streams are gone before, half of them after.
                let stream = (round % 4 < 2).then_some(stream);
                release(&mut client, &name, &owner, lock.fencing_token)
                    .await
                    .unwrap();
                drop(stream);
            }
        });
    }
    while let Some(done) = workers.join_next().await {
        done.unwrap();
    }
    let admin = database.client().await;
    let held = "SELECT count(*) FROM fencepost.locks
                WHERE NOT released AND expires_at > clock_timestamp()";
    assert_eq!(admin.value::<i64>(held).await, 0);
    let writes = "SELECT sum(xmin::text::bigint)::bigint FROM fencepost.locks";
    let before: i64 = admin.value(writes).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(admin.value::<i64>(writes).await, before, "still renewed");
}

/// A lease is there for every replica as soon as it is granted.
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_lease_is_kept_by_any_replica() {
    const ROUNDS: usize = 400;
    let database = fresh_database().await;
    let servers = [
        Server::start(&database.url()).await,
        Server::start(&database.url()).await,
    ];
    let [mut first, mut second] = [servers[0].client().await, servers[1].client().await];
    for round in 0..ROUNDS {
        let lock = granted(&mut first, &format!("{round}"), "a", LONG).await;
        let mut stream = Stream::open(&mut second, request(&lock)).await;
        let renewed = stream.next().await;
        assert_eq!(renewed.lock.fencing_token, lock.fencing_token);
        std::mem::swap(&mut first, &mut second);
    }
}

/// What was missed while it stood still is not made up for in a burst.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stood_still_does_not_catch_up() {
    let ttl = Duration::from_secs(9);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let mut streams = Vec::new();
    for n in 0..50 {
        let lock = granted(&mut client, &format!("{n}"), "a", ttl).await;
        let mut stream = Stream::open(&mut client, request_for(&lock, LONG)).await;
        stream.next().await;
        streams.push(stream);
    }
    // Each of them misses one or two.
    server.sigstop();
    sleep(Duration::from_secs(5)).await;
    server.sigcont();
    let until = Instant::now() + Duration::from_secs(1);
    let readers: JoinSet<_> = streams
        .into_iter()
        .map(|stream| follow(stream, until))
        .collect();
    for report in readers.join_all().await {
        report.assert_kept("a stream");
        assert!((1..=2).contains(&report.renewals), "{report:?}");
    }
}
