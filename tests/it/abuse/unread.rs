//! Calls that stay open: answers that nobody reads, and headers without a message.

use std::time::Duration;

use fencepost_proto::v1::GetRequest;
use fencepost_support::{
    Server,
    calls::{acquire, get, granted, request, send},
    frames::{
        END_HEADERS, END_STREAM, Peer, call, frame, header,
        kind::{DATA, HEADERS, SETTINGS, WINDOW_UPDATE},
        message,
    },
    postgres::{Database, fresh_database},
    server::Client,
    wait::within,
};
use tokio::{task::JoinSet, time::timeout};
use tonic::Request;

use crate::{
    keep_alive::stage::{self, Stream},
    metrics::{scrape::Scrape, wait_for},
    usage::Usage,
    world::LONG,
};

/// Calls that a connection may have open.
const MOST: u32 = 2_000;
/// SETTINGS_INITIAL_WINDOW_SIZE.
const WINDOW: u16 = 4;

/// The frames of Gets of `fat`, on streams of these numbers.
fn gets(numbers: impl Iterator<Item = u32>) -> Vec<u8> {
    let get = message(&GetRequest {
        resource: "fat".into(),
    });
    numbers
        .flat_map(|n| {
            let head = frame(HEADERS, END_HEADERS, 2 * n + 1, &call("Get"));
            [head, frame(DATA, END_STREAM, 2 * n + 1, &get)].concat()
        })
        .collect()
}

/// A server of which the store refuses none of them, and `fat`, which is held with as many
/// labels as there may be.
async fn fat(database: &Database) -> (Server, Client) {
    let server = Server::builder(&database.url())
        .flag("--max-in-flight", "20000")
        .flag("--request-timeout", "1m")
        .ready()
        .await;
    let mut client = server.client().await;
    let mut ask = request("fat", "holder", LONG);
    ask.labels = (0..15).map(|n| (n.to_string(), "x".repeat(250))).collect();
    send(&mut client, ask).await.unwrap();
    (server, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_nobody_reads_are_few_on_all_connections_together() {
    /// How many it takes to have too many.
    const PEERS: u32 = 10;
    let database = fresh_database().await;
    let (server, mut client) = fat(&database).await;
    let lock = granted(&mut client, "kept", "owner", Duration::from_secs(15)).await;
    let mut kept = Stream::open(&mut client, stage::request(&lock)).await;
    kept.next().await;
    let answered = [("method", "Get"), ("code", "OK")];
    let mut peers = JoinSet::new();
    for n in 1..=PEERS {
        let mut peer = Peer::greet(server.grpc(), &[(WINDOW, 0)]).await.unwrap();
        peer.send(&gets(0..MOST)).await.unwrap();
        peers.spawn(async move { peer.pinged().await });
        wait_for(
            &server,
            "fencepost_rpcs_total",
            &answered,
            f64::from(n * MOST),
        )
        .await;
    }
    // The one that is over the limit is not the one with the most.
    let mut last = Peer::greet(server.grpc(), &[(WINDOW, 0)]).await.unwrap();
    last.send(&gets(0..MOST / 4)).await.unwrap();
    peers.spawn(async move { last.pinged().await });
    let gone = timeout(Duration::from_secs(30), peers.join_next()).await;
    gone.unwrap().unwrap().unwrap();
    let told = server.logs().concat();
    assert!(told.contains("too much waits for callers"), "{told}");
    // With the honest one and the last, without the one that went.
    let connections = f64::from(PEERS + 1 + 1 - 1);
    wait_for(&server, "fencepost_connections", &[], connections).await;
    // Others hear nothing of it.
    kept.next().await;
    get(&mut client, "fat").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_nobody_reads_are_few() {
    let database = fresh_database().await;
    let (server, mut client) = fat(&database).await;
    let before = Usage::of(&server, &database).await;

    let mut peer = Peer::greet(server.grpc(), &[(WINDOW, 0)]).await.unwrap();
    peer.send(&gets(0..2 * MOST)).await.unwrap();
    let shed = [("method", "Get"), ("why", "open")];
    wait_for(&server, "fencepost_shed_total", &shed, f64::from(MOST)).await;
    let answered = [("method", "Get"), ("code", "OK")];
    wait_for(&server, "fencepost_rpcs_total", &answered, f64::from(MOST)).await;
    let after = Usage::of(&server, &database).await;
    println!("{before:?} before, {after:?} with all of them unread");
    // It is a matter of each connection.
    get(&mut client, "fat").await.unwrap();

    // Who takes its answers may go on.
    let open = [
        frame(
            SETTINGS,
            0,
            0,
            &[&WINDOW.to_be_bytes()[..], &65_535_u32.to_be_bytes()].concat(),
        ),
        frame(WINDOW_UPDATE, 0, 0, &(1_u32 << 30).to_be_bytes()),
    ];
    peer.send(&open.concat()).await.unwrap();
    let mut next = 2 * MOST;
    within(Duration::from_secs(30), "it is answered", async || {
        // Reads, for as long as something comes.
        let _ = timeout(Duration::from_millis(200), peer.closed()).await;
        peer.send(&gets(next..next + 1)).await.unwrap();
        next += 1;
        let scrape = Scrape::of(&server).await;
        let ok = scrape.value("fencepost_rpcs_total", &answered);
        (ok > f64::from(MOST + 1)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_without_a_message_are_few() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--request-timeout", "1m")
        .ready()
        .await;
    let mut peer = Peer::greet(server.grpc(), &[]).await.unwrap();
    let long = header("authorization", &"x".repeat(7_000));
    let head = [call("Acquire"), long].concat();
    for n in 0..MOST + 100 {
        peer.send(&frame(HEADERS, END_HEADERS, 2 * n + 1, &head))
            .await
            .unwrap();
    }
    let shed = [("method", "Acquire"), ("why", "open")];
    wait_for(&server, "fencepost_shed_total", &shed, 100.0).await;
    granted(&mut server.client().await, "a", "beside it", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_have_room_for_a_token_and_no_more() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    for (length, passes) in [(4 * 1024, true), (8 * 1024, false)] {
        let mut ask = Request::new(request("a", "owner", LONG));
        let token = "x".repeat(length).parse().unwrap();
        ask.metadata_mut().insert("authorization", token);
        let answer = client.acquire(ask).await;
        assert_eq!(answer.is_ok(), passes, "{length}: {answer:?}");
    }
    acquire(&mut client, "b", "owner", LONG).await.unwrap();
}
