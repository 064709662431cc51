//! Waiting for a lock that somebody else has.

use std::time::{Duration, Instant};

use fencepost_client::{Client, Error};
use fencepost_support::{
    calls::granted,
    proxy::{Flow, Proxy},
};
use tokio::{task::JoinSet, time::sleep};

use super::{hold, lease_of, ours, process::server};
use crate::world::{LONG, fresh, shared};

#[tokio::test]
async fn the_time_that_was_asked_for_is_kept() {
    let client = ours().await;
    let name = fresh("waiting");
    let guard = hold(&client, &name, LONG).await;
    for wait in [0, 300, 1000, 2500].map(Duration::from_millis) {
        let begun = Instant::now();
        let answer = client
            .acquire_with_retry(&name, lease_of(LONG).wait(wait))
            .await;
        let took = begun.elapsed();
        assert!(matches!(answer, Err(Error::Refused { .. })), "{answer:?}");
        assert!(
            took >= wait && took < wait + Duration::from_millis(300),
            "{took:?} instead of {wait:?}"
        );
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn no_server_is_waited_for_as_long() {
    let client = Client::connect_lazy("http://127.0.0.1:1").unwrap();
    let wait = Duration::from_secs(1);
    let begun = Instant::now();
    let answer = client
        .acquire_with_retry("a", lease_of(LONG).wait(wait))
        .await;
    let took = begun.elapsed();
    assert!(
        matches!(answer, Err(Error::Unavailable { .. })),
        "{answer:?}"
    );
    assert!(
        took >= wait && took < wait + Duration::from_millis(300),
        "{took:?}"
    );
}

/// A holder that has died is followed right after its lease.
#[tokio::test]
async fn a_dead_holder_is_followed_when_its_lease_ends() {
    let client = ours().await;
    let name = fresh("waiting");
    let ttl = Duration::from_secs(3);
    let mut raw = shared().await.server.client().await;
    let begun = Instant::now();
    granted(&mut raw, &name, "dead", ttl).await;
    let guard = client
        .acquire_with_retry(&name, lease_of(LONG))
        .await
        .expect("the lock of a dead holder");
    let took = begun.elapsed();
    assert!(
        took >= ttl && took < ttl + Duration::from_millis(500),
        "{took:?}"
    );
    // Its own time is not spent by the wait.
    assert!(guard.remaining() > LONG - Duration::from_secs(2));
    guard.release().await.unwrap();
}

/// Time that nobody has the lock does not grow with the number of waiters.
#[tokio::test]
async fn many_waiters_have_their_turns() {
    let client = ours().await;
    for waiters in [8, 32] {
        let name = fresh("waiting");
        let first = hold(&client, &name, LONG).await;
        let mut turns = JoinSet::new();
        for _ in 0..waiters {
            let (client, name) = (client.clone(), name.clone());
            turns.spawn(async move {
                let guard = client
                    .acquire_with_retry(&name, lease_of(LONG))
                    .await
                    .expect("a turn");
                sleep(Duration::from_millis(10)).await;
                guard.release().await.expect("to be given back");
            });
        }
        sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        first.release().await.unwrap();
        while let Some(turn) = turns.join_next().await {
            turn.unwrap();
        }
        let took = begun.elapsed();
        println!("{waiters} waiters, 10 ms each: {took:?}");
        // A quiet machine needs a tenth of it.
        assert!(took < Duration::from_millis(250) * waiters, "{took:?}");
    }
}

/// Answers that come after the lease they speak of are no grants.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_late_is_no_grant() {
    let ttl = Duration::from_secs(1);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    // A connection that is there already.
    client.get("a").await.unwrap();
    proxy.set_down(Flow::Delay(ttl * 2));
    let begun = Instant::now();
    let answer = client.acquire("a", lease_of(ttl)).await;
    assert_eq!(answer.map(|guard| guard.remaining()), Err(Error::TimedOut));
    println!("refused after {:?}", begun.elapsed());
    proxy.forward().await;
    client.released().await;
    let guard = client
        .acquire_with_retry("a", lease_of(ttl).wait(ttl * 5))
        .await
        .expect("a free lock");
    assert!(guard.remaining() > ttl / 2);
    guard.release().await.unwrap();
}
