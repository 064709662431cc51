//! Streams that break, and what they leave behind: nothing.

use std::time::{Duration, Instant};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server,
    postgres::fresh_database,
    server::{Client, channel_at},
};
use tokio::{sync::Semaphore, task::JoinSet};

use super::wide;
use crate::{
    keep_alive::stage::{Stream, leases, request_for},
    usage::Usage,
};

const STREAMS: usize = 50_000;

/// One stream that is opened and vanishes.
async fn vanish(mut client: Client, lock: Lock, n: usize) {
    let asks = request_for(&lock, Duration::from_secs(300));
    // Before its answer, after it, or after its first renewal.
    if n.is_multiple_of(4) {
        let opened = Stream::try_open(&mut client, asks);
        let _ = tokio::time::timeout(Duration::from_micros(500), opened).await;
        return;
    }
    // A connection that ends under it is one of the ways.
    let Ok(mut stream) = Stream::try_open(&mut client, asks).await else {
        return;
    };
    if n % 4 == 1 {
        let _ = stream.try_next().await;
    }
}

/// Opens and drops `count` streams, some hundred at a time, on connections that
/// are dropped with all that is on them.
async fn break_streams(server: &Server, locks: &[Lock], count: usize) {
    const ON_ONE: usize = 1_000;
    for connection in 0..count / ON_ONE {
        let client = if connection.is_multiple_of(2) {
            Client::new(wide(server).await)
        } else {
            Client::new(channel_at(server.grpc()).await)
        };
        let turns = std::sync::Arc::new(Semaphore::new(200));
        let mut streams = JoinSet::new();
        for n in 0..ON_ONE {
            let turn = std::sync::Arc::clone(&turns).acquire_owned().await.unwrap();
            let lock = locks[(connection * ON_ONE + n) % locks.len()].clone();
            let client = client.clone();
            streams.spawn(async move {
                vanish(client, lock, n).await;
                drop(turn);
            });
        }
        if connection % 3 == 2 {
            // In the middle of it: the connection goes with its streams.
            streams.abort_all();
        }
        while streams.join_next().await.is_some() {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_thousand_broken_streams_leave_nothing_behind() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let ttl = Duration::from_secs(60);
    let locks = leases(&database, "lock", 500, ttl).await;
    // What an allocator takes once and keeps is not a leak: as much as this
    // once, then ten times.
    break_streams(&server, &locks, STREAMS / 10).await;
    let base = Usage::at_rest(&server, &database).await;
    let began = Instant::now();
    break_streams(&server, &locks, STREAMS).await;
    let after = Usage::of(&server, &database).await;
    println!(
        "{STREAMS} streams broken in {:?}: {base:?} before, {after:?} after",
        began.elapsed()
    );
    let calm = base.back(&server, &database).await;
    println!("{calm:?} {:?} after the start", began.elapsed());

    // Nobody renews what nobody listens to.
    let admin = database.client().await;
    let latest = "SELECT extract(epoch FROM max(expires_at))::float8 FROM fencepost.locks";
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before: f64 = admin.value(latest).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after: f64 = admin.value(latest).await;
    assert_eq!(before.to_bits(), after.to_bits(), "renewed for nobody");
}
