//! Holders that are gone, frozen or hung: how long their lock stays blocked.
//!
//! A dead or frozen peer is found out by pings, in ten seconds; its lease ends
//! one TTL later at most. Where something answers the pings for it (its own
//! transport, or a proxy) the stream renews until its time is over. The bounds
//! are the documented ones, and what they come to is printed.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::{granted, refused},
    haproxy::HaProxy,
    postgres::{Database, fresh_database},
    process::Process,
    proxy::Proxy,
    server::{Client, channel_at},
};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    keep_alive::{
        command::{keepalive, wait_renewed},
        stage::{Stream, free_within, request_for},
    },
    world::LONG,
};

/// A ping after five seconds of silence, which has five seconds to be answered.
const PINGS: Duration = Duration::from_secs(10);
const TTL: Duration = Duration::from_secs(2);

async fn server() -> (Database, Server, Client) {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let client = server.client().await;
    (database, server, client)
}

/// A process that holds `a` by streams of this length.
async fn holder(client: &mut Client, address: SocketAddr, max_duration: &str) -> Process {
    let lock = granted(client, "a", "holder", TTL).await;
    let flags = ["--max-duration", max_duration];
    let holder = keepalive(&format!("http://{address}"), &lock, &flags);
    wait_renewed(&holder).await;
    // It holds for longer than one lease.
    sleep(TTL * 3 / 2).await;
    refused(client, "a", "another", LONG).await;
    holder
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_holder_blocks_its_lock_for_one_lease() {
    let (_database, server, mut client) = server().await;
    let holder = holder(&mut client, server.grpc(), "60s").await;
    holder.signal(Signal::KILL);
    let took = free_within(&mut client, "a", Instant::now(), TTL).await;
    println!("killed: free after {took:?}, bound {TTL:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_holder_blocks_its_lock_until_pings_find_it_out() {
    let (_database, server, mut client) = server().await;
    let holder = holder(&mut client, server.grpc(), "60s").await;
    holder.signal(Signal::STOP);
    let bound = PINGS + TTL;
    let took = free_within(&mut client, "a", Instant::now(), bound).await;
    println!("frozen: free after {took:?}, bound {bound:?}");
    // It wakes up, and knows at once.
    holder.signal(Signal::CONT);
    let status = holder.wait_exit().await;
    assert_eq!(status.code(), Some(76), "{}", holder.tail());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_swallowed_network_blocks_a_lock_until_pings_find_it_out() {
    let (_database, server, mut client) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let lock = granted(&mut client, "a", "holder", TTL).await;
    let mut far = Client::new(channel_at(proxy.address()).await);
    let mut stream = Stream::open(&mut far, request_for(&lock, LONG)).await;
    for _ in 0..4 {
        stream.next().await;
    }
    // No FIN, no RST.
    proxy.black_hole();
    let bound = PINGS + TTL;
    let took = free_within(&mut client, "a", Instant::now(), bound).await;
    println!("swallowed: free after {took:?}, bound {bound:?}");
}

/// Its transport reads and answers pings; the application never looks.
#[tokio::test(flavor = "multi_thread")]
async fn a_hung_application_blocks_its_lock_for_its_streams_time() {
    const STREAM: Duration = Duration::from_secs(13);
    let (_database, server, mut client) = server().await;
    let lock = granted(&mut client, "a", "holder", TTL).await;
    let mut hung = server.client().await;
    let since = Instant::now();
    let stream = Stream::open(&mut hung, request_for(&lock, STREAM)).await;
    // Pings tell nothing: it still holds when they would have found it out.
    sleep(PINGS + TTL).await;
    refused(&mut client, "a", "another", LONG).await;
    let bound = STREAM + TTL;
    let took = free_within(&mut client, "a", since, bound).await;
    println!("hung: free after {took:?}, bound {bound:?}");
    drop(stream);
}

/// The same without a word to the connection's reader, either: nothing is read
/// that the flow control does not allow.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_without_room_blocks_its_lock_for_its_streams_time() {
    const STREAM: Duration = Duration::from_secs(3);
    let (_database, server, mut client) = server().await;
    let lock = granted(&mut client, "a", "holder", TTL).await;
    let endpoint = server
        .endpoint()
        .initial_stream_window_size(0)
        .connect()
        .await;
    let since = Instant::now();
    let mut hung = Client::new(endpoint.unwrap());
    let stream = Stream::open(&mut hung, request_for(&lock, STREAM)).await;
    let bound = STREAM + TTL;
    let took = free_within(&mut client, "a", since, bound).await;
    println!("without room: free after {took:?}, bound {bound:?}");
    drop(stream);
}

/// The proxy answers the server's pings for a holder that is frozen.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_holder_behind_a_proxy_blocks_its_lock_for_its_streams_time() {
    const STREAM: Duration = Duration::from_secs(16);
    let (_database, server, mut client) = server().await;
    let proxy = HaProxy::start(server.grpc()).await;
    let holder = holder(&mut client, proxy.address(), "16s").await;
    holder.signal(Signal::STOP);
    let since = Instant::now();
    // Or this would be a test of pings.
    sleep((PINGS + TTL).saturating_sub(since.elapsed())).await;
    refused(&mut client, "a", "another", LONG).await;
    let bound = STREAM + TTL;
    let took = free_within(&mut client, "a", since, bound).await;
    println!("frozen behind haproxy: free after {took:?}, bound {bound:?}");
}

/// The proxy takes a FIN for one that may still read. It finds out by renewals
/// that it has to hand on: the first one is answered with an RST.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_holder_behind_a_proxy_blocks_its_lock_for_two_intervals_more() {
    let (_database, server, mut client) = server().await;
    let proxy = HaProxy::start(server.grpc()).await;
    let holder = holder(&mut client, proxy.address(), "60s").await;
    holder.signal(Signal::KILL);
    let bound = TTL + TTL / 3 * 2;
    let took = free_within(&mut client, "a", Instant::now(), bound).await;
    println!("killed behind haproxy: free after {took:?}, bound {bound:?}");
}
