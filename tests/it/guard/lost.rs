//! A lease is lost: its guard says so in time, with the reason, and for good.

use std::time::{Duration, Instant};

use fencepost_client::{Client, Error, LostReason};
use fencepost_support::{
    Postgres, Server,
    calls::{self, granted},
    network::Network,
    postgres::{Stop, fresh_database},
    proxy::Proxy,
};
use tokio::{task::JoinSet, time::timeout};

use super::{client_of, free_within, hold, ours};
use crate::world::{LONG, SHORT, World, fresh, shared};

const TTL: Duration = Duration::from_secs(1);
/// A ping after five seconds of silence, which has five seconds to be answered.
const PINGS: Duration = Duration::from_secs(10);

/// Expects a loss, after which nothing brings the guard back.
async fn lost_by(
    reason: LostReason,
    take: impl AsyncFnOnce(&World, &str, &fencepost_client::Guard),
) {
    let client = ours().await;
    let name = fresh("lost");
    let guard = hold(&client, &name, TTL).await;
    let token = guard.lost_token();
    take(shared().await, &name, &guard).await;
    let begun = Instant::now();
    let said = timeout(TTL / 2, guard.lost()).await;
    assert_eq!(said, Ok(reason));
    println!("{reason:?} after {:?}", begun.elapsed());
    assert!(token.is_cancelled() && guard.lost_token().is_cancelled());
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(guard.ensure_held(), Err(Error::Lost { reason }));
    assert_eq!(guard.release().await, Err(Error::Lost { reason }));
}

#[tokio::test]
async fn released_by_somebody_else() {
    lost_by(LostReason::NotFound, async |world, name, guard| {
        let mut raw = world.server.client().await;
        calls::release(&mut raw, name, guard.owner(), guard.fencing_token())
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn acquired_again_by_the_same_owner() {
    lost_by(LostReason::TokenSuperseded, async |world, name, guard| {
        let mut raw = world.server.client().await;
        granted(&mut raw, name, guard.owner(), LONG).await;
    })
    .await;
}

#[tokio::test]
async fn taken_by_another_owner() {
    lost_by(LostReason::NotOwner, async |world, name, _| {
        // In one step: else it is gone first.
        let statement =
            format!("UPDATE fencepost.locks SET owner = 'another' WHERE resource = '{name}'");
        world.database.client().await.run(&statement).await;
    })
    .await;
}

#[tokio::test]
async fn deleted_by_hand() {
    lost_by(LostReason::NotFound, async |world, name, _| {
        let statement = format!("DELETE FROM fencepost.locks WHERE resource = '{name}'");
        world.database.client().await.run(&statement).await;
    })
    .await;
}

/// In every way a network can be gone, the verdict is the clock's.
#[tokio::test]
async fn nothing_is_heard_any_longer() {
    for (way, begin) in [
        ("swallowed", Proxy::black_hole as fn(&Proxy)),
        ("swallowed on its way up", Proxy::swallow_up),
        ("swallowed on its way down", Proxy::swallow_down),
        ("held", Proxy::hold),
    ] {
        let database = fresh_database().await;
        let server = Server::start(&database.url()).await;
        let proxy = Proxy::start(server.grpc()).await;
        let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
        let direct = client_of(&server);
        let guard = hold(&client, "a", TTL).await;
        tokio::time::sleep(TTL).await;

        begin(&proxy);
        let begun = Instant::now();
        // One way only, renewals are still heard of, until the server's pings have
        // no answer.
        let reason = timeout(TTL + PINGS, guard.lost()).await;
        assert_eq!(reason, Ok(LostReason::Unconfirmed), "{way}");
        assert!(!guard.is_held());
        let lost = begun.elapsed();
        // Not before, and the next holder not before that.
        let next = direct
            .acquire_with_retry("a", super::lease_of(LONG))
            .await
            .expect("the lock of a lease that has ended");
        let taken = begun.elapsed();
        assert!(
            lost < taken,
            "{way}: lost after {lost:?}, taken after {taken:?}"
        );
        println!("{way}: lost after {lost:?}, taken after {taken:?}");

        // What is heard from now on does not bring it back.
        proxy.forward().await;
        next.release().await.unwrap();
        tokio::time::sleep(TTL / 2).await;
        assert!(!guard.is_held(), "{way}");
        assert!(guard.release().await.is_err());
    }
}

/// The server sees it go at once, so the next holder comes as early as can be: the
/// one before has known for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_heard_and_somebody_waits() {
    async fn round() -> Option<Duration> {
        let server = &shared().await.server;
        let network = Network::to(server).await;
        let client = Client::connect_lazy(network.url()).unwrap();
        let direct = client_of(server);
        let name = fresh("lost");
        let guard = hold(&client, &name, TTL).await;
        tokio::time::sleep(TTL / 2).await;
        network.swallow().await;
        let next = tokio::spawn(async move {
            loop {
                let asked = direct.acquire(&name, super::lease_of(LONG)).await;
                if let Ok(next) = asked {
                    return (Instant::now(), next);
                }
                tokio::time::sleep(TTL / 200).await;
            }
        });
        assert_eq!(guard.lost().await, LostReason::Unconfirmed);
        let lost = Instant::now();
        assert!(!guard.is_held());
        let (taken, next) = next.await.unwrap();
        next.release().await.unwrap();
        taken.checked_duration_since(lost)
    }
    let mut rounds = JoinSet::new();
    for _ in 0..20 {
        let runtime = tokio::runtime::Handle::current();
        rounds.spawn_blocking(move || runtime.block_on(round()));
    }
    let gaps = rounds.join_all().await;
    let least = gaps.into_iter().min().flatten();
    println!("between a loss and the next holder, at least {least:?}");
    // None is an overlap, and the least of all.
    assert!(least.is_some());
}

/// The same client, again and again: each hold as solid as the first.
#[tokio::test]
async fn and_acquired_anew() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let proxy = Proxy::start(server.grpc()).await;
    let client = Client::connect_lazy(format!("http://{}", proxy.address())).unwrap();
    let mut before = 0;
    for round in 0..20 {
        let guard = client
            .acquire_with_retry("a", super::lease_of(SHORT).wait(Duration::from_secs(20)))
            .await
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(guard.fencing_token() > before);
        before = guard.fencing_token();
        let lost = timeout(SHORT * 3, guard.lost()).await;
        assert!(lost.is_err(), "round {round}: {lost:?}");
        proxy.refuse().await;
        proxy.reset().await;
        guard.lost().await;
        proxy.forward().await;
        drop(guard);
    }
    free_within(&client, "a", Duration::from_secs(5)).await;
}

/// The database is away for longer than the lease: the holder knows in time, and
/// the next one starts after that.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_is_away() {
    let mut postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let client = client_of(&server);
    let guard = hold(&client, "a", TTL).await;
    let (ends, token) = (guard.lost_token(), guard.fencing_token());
    let lost = tokio::spawn(async move {
        ends.cancelled().await;
        Instant::now()
    });
    let next = {
        let client = client_of(&server);
        tokio::spawn(async move {
            let guard = client.acquire_with_retry("a", super::lease_of(LONG)).await;
            (Instant::now(), guard)
        })
    };
    postgres.stop(Stop::Fast).await;
    let reason = timeout(TTL * 2, guard.lost()).await;
    assert_eq!(reason, Ok(LostReason::Unconfirmed));
    postgres.start_again().await;
    let (started, next) = next.await.unwrap();
    let next = next.expect("the lock of a lease that has ended");
    assert!(lost.await.unwrap() < started);
    assert!(next.fencing_token() > token);
    assert!(!guard.is_held());
    next.release().await.unwrap();
}

/// One bad heartbeat is not a loss, nor are many: while there is time, it is tried.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_the_database_are_killed_again_and_again() {
    let world = World::start().await;
    let client = client_of(&world.server);
    let guard = hold(&client, "a", TTL * 2).await;
    let admin = world.database.client().await;
    for _ in 0..50 {
        admin
            .run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
            .await;
        tokio::time::sleep(TTL / 5).await;
        assert!(guard.is_held());
    }
    guard.release().await.unwrap();
}
