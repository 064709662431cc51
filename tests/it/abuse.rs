//! Peers that keep no rule of HTTP/2. Honest callers get their locks meanwhile,
//! and nothing of it is left behind.

#![allow(
    clippy::print_stdout,
    reason = "figures and seeds, for who reads the log"
)]

mod attacks;
mod unread;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::granted,
    frames::{PREFACE, Peer},
    postgres::fresh_database,
    system::free_address,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

use self::attacks::Attack;
use crate::{holders::Holders, usage::Usage, world::LONG};

/// How long a peer goes on when the server has nothing against it.
const ATTACK: Duration = Duration::from_secs(3);

/// Every attack at once. Returns how many were cut off.
async fn storm(address: SocketAddr, rng: &mut StdRng) -> usize {
    let mut attacks = JoinSet::new();
    for attack in Attack::ALL {
        let rng = StdRng::from_rng(rng);
        attacks.spawn(async move { timeout(ATTACK, attack.run(address, rng)).await.is_ok() });
    }
    let ends = attacks.join_all().await;
    ends.into_iter().filter(|cut| *cut).count()
}

/// Storms for this long, beside honest callers; then all is as it was.
async fn weather(how_long: Duration) {
    const HOLDERS: usize = 10;
    const TTL: Duration = Duration::from_secs(5);
    let seed: u64 = rand::rng().random();
    println!("seed: {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let database = fresh_database().await;
    // Its allocator keeps little for later, so that what is in use shows.
    let server = Server::builder(&database.url())
        .env("MALLOC_ARENA_MAX", "1")
        .env("MALLOC_TRIM_THRESHOLD_", "65536")
        .ready()
        .await;
    storm(server.grpc(), &mut rng).await;
    let base = Usage::at_rest(&server, &database).await;

    let holders = Holders::start(&server, HOLDERS, TTL).await;
    let began = Instant::now();
    let (mut peers, mut cut) = (0, 0);
    while began.elapsed() < how_long {
        cut += storm(server.grpc(), &mut rng).await;
        peers += Attack::ALL.len();
    }
    let took = began.elapsed();
    let after = Usage::of(&server, &database).await;
    let report = holders.end().await;
    println!("{peers} peers in {took:?}, {cut} cut off; beside them {report:?}");
    println!("{base:?} before, {after:?} after");
    let calm = base.back(&server, &database).await;
    println!("{calm:?} at rest");

    let tries = HOLDERS * usize::try_from(took.as_secs()).unwrap();
    assert!(report.grants > tries / 4, "{report:?} in {took:?}");
    assert!(server.process().exit_status().is_none());
    server.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_peers_cost_honest_callers_nothing() {
    weather(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "ten minutes: make soak"]
async fn hostile_peers_cost_honest_callers_nothing_for_ten_minutes() {
    weather(Duration::from_secs(600)).await;
}

/// A place is not kept for whoever has nothing to say, on any port. Who has
/// begun may be silent.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_does_not_begin_is_let_go() {
    let database = fresh_database().await;
    let health = free_address();
    let server = Server::builder(&database.url())
        .flag("--health-listen", &health.to_string())
        .ready()
        .await;
    let mut quiet = server.client().await;
    granted(&mut quiet, "before", "quiet", LONG).await;

    let mut peers = JoinSet::new();
    for address in [server.grpc(), health, server.http()] {
        for words in [&b""[..], b"P", b"GET / HTTP/1.1\r\n", &PREFACE[..23]] {
            peers.spawn(async move {
                let mut peer = Peer::connect(address).await.unwrap();
                // It may have had enough at the first byte.
                let _ = peer.send(words).await;
                peer.closed().await;
            });
        }
        peers.spawn(async move {
            let mut peer = Peer::connect(address).await.unwrap();
            let _ = peer.drip(&PREFACE[..23], Duration::from_millis(800)).await;
            peer.closed().await;
        });
    }
    let began = Instant::now();
    let all = timeout(Duration::from_secs(25), peers.join_all()).await;
    assert!(all.is_ok(), "somebody is still connected");
    println!("the last was let go after {:?}", began.elapsed());
    granted(&mut quiet, "after", "quiet", LONG).await;
}

/// The HTTP port has few places. Who sends a request in drips, or does not read its
/// answers, keeps none of them; who is silent between two requests does.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_takes_too_long_for_an_http_exchange_is_let_go() {
    const LIMIT: Duration = Duration::from_secs(10);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let http = server.http();
    let mut kept = TcpStream::connect(http).await.unwrap();
    assert_eq!(livez(&mut kept).await, 200);

    let mut peers = JoinSet::new();
    for _ in 0..20 {
        peers.spawn(async move {
            let began = Instant::now();
            let mut peer = Peer::connect(http).await.unwrap();
            // Enough for a connection to have begun.
            peer.send(b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Long: ")
                .await
                .unwrap();
            _ = peer.drip(&[b'x'; 60], Duration::from_millis(500)).await;
            peer.closed().await;
            began.elapsed()
        });
    }
    peers.spawn(async move {
        let began = Instant::now();
        let mut peer = Peer::connect(http).await.unwrap();
        let many = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n".repeat(1000);
        while peer.send(&many).await.is_ok() {}
        began.elapsed()
    });
    while let Some(took) = timeout(LIMIT * 2, peers.join_next())
        .await
        .expect("somebody is still there")
    {
        let took = took.unwrap();
        assert!(took + Duration::from_secs(1) > LIMIT, "{took:?}");
    }
    assert_eq!(livez(&mut kept).await, 200);
}

/// Asks on a connection that stays open; the code of the answer.
async fn livez(stream: &mut TcpStream) -> u16 {
    stream
        .write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok\n") {
        let byte = stream.read_u8().await.unwrap();
        answer.push(byte);
    }
    let answer = String::from_utf8(answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}
