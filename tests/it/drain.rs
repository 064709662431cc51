//! The orderly stop: announced first, finished within its budget whatever
//! clients do, and with every lock still there.

mod frozen;
mod rolling;

use std::time::{Duration, Instant};

use fencepost_proto::v1::LOCK_SERVICE;
use fencepost_support::{
    Postgres, Server,
    calls::{acquire, get, granted, reason, renew},
    postgres::fresh_database,
    process::Process,
    proxy::Proxy,
    row_lock::RowLock,
    server::{Builder, Client},
    wait::within,
};
use rustix::process::Signal;
use tokio::net::TcpStream;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

const LONG: Duration = Duration::from_secs(600);

/// A server that stops fast.
fn quick(url: &str) -> Builder {
    Server::builder(url)
        .flag("--drain-delay", "300ms")
        .flag("--drain-timeout", "8s")
}

/// Waits for the end, which must be code 0 and within the budget; says how
/// long it took.
async fn assert_ends(process: &Process, signalled: Instant, budget: Duration) -> Duration {
    let status = process
        .wait_exit_within(budget + Duration::from_secs(2))
        .await;
    let took = signalled.elapsed();
    assert!(took < budget + Duration::from_millis(500), "{took:?}");
    assert_eq!(status.code(), Some(0), "{status}\n{}", process.tail());
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn health_says_so_while_calls_are_still_taken() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "3s")
        .flag("--drain-timeout", "8s")
        .ready()
        .await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "holder", LONG).await;

    let signalled = Instant::now();
    server.sigterm();
    within(Duration::from_secs(1), "health says it", async || {
        let both = (server.health("").await, server.health(LOCK_SERVICE).await);
        (both
            == (
                Some(ServingStatus::NotServing),
                Some(ServingStatus::NotServing),
            ))
            .then_some(())
    })
    .await;
    assert_eq!(
        server.health("liveness").await,
        Some(ServingStatus::Serving)
    );

    // New calls work for the delay, on old and on new connections.
    while signalled.elapsed() < Duration::from_millis(2500) {
        let mut fresh = server.client().await;
        granted(&mut fresh, "b", "late", LONG).await;
        renew(&mut client, "a", "holder", lock.fencing_token, None)
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took = assert_ends(server.process(), signalled, Duration::from_secs(8)).await;
    println!(
        "ended {took:?} after the signal, {:?} of it the delay",
        Duration::from_secs(3)
    );
    assert!(took > Duration::from_secs(3));
    assert!(TcpStream::connect(server.grpc()).await.is_err());

    // Locks stay.
    let next = Server::start(&database.url()).await;
    let seen = get(&mut next.client().await, "a").await.unwrap();
    assert_eq!(seen.fencing_token, lock.fencing_token);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_in_flight_are_finished() {
    let database = fresh_database().await;
    let server = quick(&database.url()).ready().await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "holder", LONG)
        .await
        .fencing_token;
    let row = RowLock::hold(&database.url(), "a").await;
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { renew(&mut client, "a", "holder", token, None).await })
        })
        .collect();
    row.wait_for_waiters(1).await;

    let signalled = Instant::now();
    server.sigterm();
    // Past the delay, when the port is closed.
    within(Duration::from_secs(4), "the port is closed", async || {
        TcpStream::connect(server.grpc()).await.err()
    })
    .await;
    // Long after the last idle connection has been closed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    row.commit().await;
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().fencing_token, token);
    }
    assert_ends(server.process(), signalled, Duration::from_secs(8)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_of_the_last_moment_is_given_back_before_the_end() {
    let database = fresh_database().await;
    let server = quick(&database.url()).ready().await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "holder", LONG)
        .await
        .fencing_token;
    fencepost_support::calls::release(&mut client, "a", "holder", token)
        .await
        .unwrap();
    let row = RowLock::hold(&database.url(), "a").await;
    let call = tokio::spawn(async move { acquire(&mut client, "a", "gone", LONG).await });
    row.wait_for_waiters(1).await;
    call.abort();
    let _ = call.await;
    let signalled = Instant::now();
    server.sigterm();
    tokio::time::sleep(Duration::from_millis(500)).await;
    row.rollback().await;
    assert_ends(server.process(), signalled, Duration::from_secs(8)).await;

    let next = Server::start(&database.url()).await;
    granted(&mut next.client().await, "a", "another", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_at_once() {
    let database = fresh_database().await;
    for (first, second) in [
        (Signal::TERM, Signal::TERM),
        (Signal::TERM, Signal::INT),
        (Signal::INT, Signal::TERM),
    ] {
        let server = Server::builder(&database.url())
            .flag("--drain-delay", "20s")
            .flag("--drain-timeout", "40s")
            .ready()
            .await;
        let mut client = server.client().await;
        // Something to wait for: a call that hangs at a row.
        let token = granted(&mut client, "a", "holder", LONG)
            .await
            .fencing_token;
        let row = RowLock::hold(&database.url(), "a").await;
        let call =
            tokio::spawn(async move { renew(&mut client, "a", "holder", token, None).await });
        row.wait_for_waiters(1).await;
        server.process().signal(first);
        server
            .wait_for_log("it drains", |line| line["message"] == "draining")
            .await;
        let signalled = Instant::now();
        server.process().signal(second);
        let took = assert_ends(server.process(), signalled, Duration::from_secs(1)).await;
        println!("{first:?}, {second:?}: ended after {took:?}");
        let status = call.await.unwrap().unwrap_err();
        assert!(
            matches!(
                status.code(),
                Code::Unavailable | Code::Unknown | Code::Cancelled
            ),
            "{status:?}"
        );
        row.rollback().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_holed_database_does_not_hold_the_end_up() {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let server = Server::builder(&Postgres::url_via(proxy.address(), database.name()))
        .flag("--drain-delay", "300ms")
        .flag("--drain-timeout", "3s")
        .ready()
        .await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "holder", LONG)
        .await
        .fencing_token;
    proxy.black_hole();
    let calls: Vec<_> = (0..8)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let renewed = renew(&mut client, "a", "holder", token, None).await;
                let taken = acquire(&mut client, &format!("n-{n}"), "owner", LONG).await;
                (renewed.is_err(), taken.is_err())
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let signalled = Instant::now();
    server.sigterm();
    let took = assert_ends(server.process(), signalled, Duration::from_secs(3)).await;
    println!("black hole: ended after {took:?}");
    for call in calls {
        assert_eq!(call.await.unwrap(), (true, true));
    }
}

/// Expects the retryable end of something that a draining server refuses.
#[track_caller]
fn assert_elsewhere(status: &tonic::Status) {
    let ours = reason(status);
    // A connection that is closed under a call is told by the transport.
    let fits = status.code() == Code::Unavailable
        || ours.is_none() && matches!(status.code(), Code::Unknown | Code::Cancelled);
    assert!(fits, "{status:?}");
}

/// A connection that is made when it is needed, and again after a restart.
fn lazy(server: &Server) -> Client {
    Client::new(server.endpoint().connect_lazy())
}
