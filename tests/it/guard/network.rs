//! A network that breaks: what is lost on the way is tried again, and nothing is
//! left behind.

use std::time::{Duration, Instant};

use fencepost_client::{Client, Error};
use fencepost_support::proxy::{Flow, Proxy};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{client_of, hold, lease_of, process::server};
use crate::world::LONG;

const SEED: &str = "FENCEPOST_TEST_SEED";

/// Printed, so that a run can be had again.
fn seed() -> u64 {
    let given = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random);
    println!("{SEED}={seed}");
    seed
}

/// Released at any moment of its keeping, a lock is free at once and stays it.
#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_releases_at_any_moment_leave_nothing() {
    const LANES: u64 = 20;
    let ttl = Duration::from_secs(2);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    proxy.delay(Duration::from_millis(10));
    let holder = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    let second = client_of(&server);
    let seed = seed();
    let mut lanes = JoinSet::new();
    for lane in 0..LANES {
        let (holder, second) = (holder.clone(), second.clone());
        let mut rng = StdRng::seed_from_u64(seed ^ lane);
        lanes.spawn(async move {
            let name = format!("lane-{lane}");
            for round in 0..2000 / LANES {
                let guard = hold(&holder, &name, ttl).await;
                let calls = holder.calls();
                let (owner, token) = (guard.owner().to_owned(), guard.fencing_token());
                let by_hand = {
                    let name = name.clone();
                    tokio::spawn(async move { calls.renew(&name, &owner, token, None).await })
                };
                sleep(Duration::from_micros(rng.random_range(0..60_000))).await;
                if rng.random() {
                    guard.release().await.expect("to be given back");
                } else {
                    drop(guard);
                    holder.released().await;
                }
                let next = second.acquire(&name, lease_of(LONG)).await;
                let next = next.unwrap_or_else(|error| panic!("{name}, round {round}: {error}"));
                next.release().await.expect("to be given back");
                by_hand.abort();
            }
        });
    }
    while let Some(lane) = lanes.join_next().await {
        lane.unwrap();
    }
    // What was on its way.
    sleep(Duration::from_millis(200)).await;
    proxy.forward().await;
    let before = proxy.passed_up();
    sleep(ttl * 3).await;
    // Answers to the server's pings have 17 bytes, a call has more than 100.
    let after = proxy.passed_up() - before;
    assert!(after < 100, "{after} bytes for locks that nobody has");
}

/// Connections that are cut again and again, as by a proxy with a limit.
#[tokio::test]
async fn a_lease_outlives_its_connections() {
    let ttl = Duration::from_secs(2);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    let guard = hold(&client, "a", ttl).await;
    let mut least = ttl;
    for _ in 0..20 {
        proxy.reset().await;
        let until = Instant::now() + Duration::from_millis(700);
        while Instant::now() < until {
            least = least.min(guard.remaining());
            sleep(Duration::from_millis(10)).await;
        }
        assert!(guard.is_held());
    }
    println!("cut every 0.7 s, the least that was left of {ttl:?}: {least:?}");
    guard.release().await.unwrap();
}

/// Answers are lost for a while, less than the lease: it is kept.
#[tokio::test]
async fn a_lease_outlives_lost_answers() {
    let ttl = Duration::from_secs(4);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    let guard = hold(&client, "a", ttl).await;
    for _ in 0..4 {
        sleep(ttl / 2).await;
        proxy.swallow_down();
        sleep(ttl / 3).await;
        // A connection that has lost bytes is of no use.
        proxy.reset().await;
        proxy.forward().await;
        assert!(guard.is_held());
    }
    guard.release().await.unwrap();
}

/// Slow is not gone.
#[tokio::test]
async fn a_lease_is_kept_over_a_slow_network() {
    let ttl = Duration::from_secs(10);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    let guard = hold(&client, "a", ttl).await;
    proxy.set_down(Flow::Delay(Duration::from_millis(2500)));
    let end = Instant::now() + ttl * 2;
    let mut least = ttl;
    while Instant::now() < end {
        assert!(guard.is_held());
        least = least.min(guard.remaining());
        sleep(Duration::from_millis(50)).await;
    }
    println!("answers 2.5 s late, the least that was left of {ttl:?}: {least:?}");
    proxy.forward().await;
    guard.release().await.unwrap();
}

/// The server grants, and its answer never arrives.
#[tokio::test]
async fn an_answer_that_is_lost_is_found_again_or_undone() {
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::builder(format!("http://{}", proxy.address()))
        .timeout(Duration::from_millis(600))
        .build()
        .unwrap();
    let direct = client_of(&server);
    for round in 0..20 {
        let name = format!("a-{round}");
        // A connection that is there already.
        client.get(&name).await.unwrap();
        proxy.swallow_down();
        let acquired = {
            let (client, name) = (client.clone(), name.clone());
            let wait = Duration::from_secs(if round % 2 == 0 { 5 } else { 0 });
            tokio::spawn(async move {
                client
                    .acquire_with_retry(&name, lease_of(LONG).wait(wait))
                    .await
            })
        };
        let granted = timeout(Duration::from_secs(3), async {
            while direct.get(&name).await.unwrap().is_none() {
                sleep(Duration::from_millis(2)).await;
            }
        });
        granted.await.expect("a grant whose answer is lost");
        proxy.reset().await;
        proxy.forward().await;
        match acquired.await.unwrap() {
            Ok(guard) => {
                let seen = direct.get(&name).await.unwrap().expect("a live lease");
                assert_eq!(seen.fencing_token, guard.fencing_token());
                guard.release().await.unwrap();
            }
            Err(Error::Unavailable { .. } | Error::TimedOut) => client.released().await,
            Err(other) => panic!("{other}"),
        }
        assert_eq!(direct.get(&name).await.unwrap(), None, "round {round}");
    }
}

/// Many at a server that is slow, and then is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_is_not_stormed() {
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::builder(format!("http://{}", proxy.address()))
        .timeout(Duration::from_millis(500))
        .build()
        .unwrap();
    proxy.delay(Duration::from_millis(400));
    let mut callers = JoinSet::new();
    for number in 0..100 {
        let client = client.clone();
        callers.spawn(async move {
            let options = lease_of(LONG).wait(Duration::from_secs(30));
            let name = format!("a-{number}");
            let guard = client.acquire_with_retry(&name, options).await;
            let guard = guard.expect("a lock in the end");
            guard.release().await
        });
    }
    sleep(Duration::from_secs(5)).await;
    let asked = proxy.passed_up();
    proxy.forward().await;
    let healed = Instant::now();
    while let Some(caller) = callers.join_next().await {
        // Its own answer may have been too late, too.
        let _: Result<(), Error> = caller.unwrap();
    }
    println!(
        "{asked} bytes in 5 s of 100 callers; all served {:?} after",
        healed.elapsed()
    );
    assert!(healed.elapsed() < Duration::from_secs(10));
    client.released().await;
}

/// Something else answers where a replica was: the others are asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_kind_hides_no_replica() {
    let (_database, server) = server().await;
    let (_reporter, health) = tonic_health::server::health_reporter();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let other = tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(health)
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    let ttl = Duration::from_secs(2);
    let both = format!("http://{address},{}", server.url());
    let client = Client::connect_lazy(both).unwrap();
    let guard = hold(&client, "a", ttl).await;
    sleep(ttl * 2).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();

    let alone = Client::connect_lazy(format!("http://{address}")).unwrap();
    let begun = Instant::now();
    let rejected = alone.acquire("a", lease_of(LONG)).await;
    assert!(
        matches!(rejected, Err(Error::Rejected { .. })),
        "{rejected:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(1));
    other.abort();
}
