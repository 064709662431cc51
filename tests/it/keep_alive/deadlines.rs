//! The caller's deadline ends a stream; the server's own limit for calls does
//! not.

use std::time::{Duration, Instant};

use fencepost_proto::v1::KeepAliveRequest;
use fencepost_support::{
    Server,
    calls::{expect_error, expect_retryable, granted, refused, seconds},
    postgres::fresh_database,
    row_lock::RowLock,
};
use tonic::{Code, Request};

use super::stage::{Stream, request, request_for};
use crate::world::{LONG, client, fresh, shared};

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_deadline_ends_a_stream_and_not_its_lease() {
    let (mut client, name) = (client().await, fresh("deadline"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    // Within the time for a call, and beyond it; in the middle of an interval.
    for (timeout, limit) in [("700m", 700), ("7S", 7_000)] {
        let mut timed = Request::new(KeepAliveRequest {
            ttl: Some(seconds(1)),
            ..request_for(&lock, LONG)
        });
        // Written by hand, so that no timer of the client's own answers first.
        timed
            .metadata_mut()
            .insert("grpc-timeout", timeout.parse().unwrap());
        let opened = Instant::now();
        let mut stream = Stream::try_open(&mut client, timed).await.unwrap();
        stream.next().await;
        let status = stream.expect_end(Code::DeadlineExceeded, "DEADLINE").await;
        let took = opened.elapsed();
        println!("{timeout}: ended after {took:?}");
        expect_retryable(&status);
        let limit = Duration::from_millis(limit);
        assert!(took >= limit - Duration::from_millis(20), "{took:?}");
        assert!(took < limit + Duration::from_secs(1), "{took:?}");

        // The lease lives, and the next stream goes on with it.
        refused(&mut client, &name, "b", LONG).await;
        let mut next = Stream::open(&mut client, request(&lock)).await;
        assert_eq!(next.next().await.lock.fencing_token, lock.fencing_token);
    }
}

/// A deadline far away, as some libraries send it, is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_the_far_future_is_no_trouble() {
    let (mut client, name) = (client().await, fresh("far"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for timeout in ["99999999H", "99999999M", "99999999S", "86400S"] {
        let mut timed = Request::new(request(&lock));
        timed
            .metadata_mut()
            .insert("grpc-timeout", timeout.parse().unwrap());
        let mut stream = Stream::try_open(&mut client, timed).await.unwrap();
        stream.next().await;
    }
}

/// A renewal that waits for a row ends its wait, and does not begin another one.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_renewed_long_after_the_callers_deadline() {
    let (mut client, name) = (client().await, fresh("long-after"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let row = RowLock::hold(&shared().await.database.url(), &name).await;
    let mut timed = Request::new(request_for(&lock, LONG));
    timed
        .metadata_mut()
        .insert("grpc-timeout", "1S".parse().unwrap());
    let mut stream = Stream::try_open(&mut client, timed).await.unwrap();
    row.wait_for_waiters(1).await;
    stream.expect_end(Code::DeadlineExceeded, "DEADLINE").await;
    // Longer than the database waits for a row.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(row.waiters().await, 0);
    row.rollback().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_limit_for_calls_does_not_cut_a_stream() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--request-timeout", "1s")
        .ready()
        .await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "a", Duration::from_secs(2)).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    let opened = Instant::now();
    while opened.elapsed() < Duration::from_secs(4) {
        stream.next().await;
    }
}

/// Whose lease is over by then anyway need not wait for the time of a call.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_word_comes_within_the_ttl_that_is_asked_for() {
    let (mut client, name) = (client().await, fresh("first"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let url = shared().await.database.url();
    let row = RowLock::hold(&url, &name).await;
    let second = Duration::from_secs(1);
    let strict = Server::builder(&url)
        .flag("--keepalive-max-duration", "1s")
        .ready()
        .await;
    let budget = Duration::from_secs(5);
    let with_ttl = |ttl, max_duration| KeepAliveRequest {
        ttl,
        ..request_for(&lock, max_duration)
    };
    for (mut client, asks, limit) in [
        (client.clone(), with_ttl(Some(seconds(1)), LONG), second),
        (client.clone(), with_ttl(Some(seconds(60)), LONG), budget),
        (client.clone(), with_ttl(None, LONG), budget),
        // Nor is anything renewed once the stream's own time is over, whoever
        // set it.
        (client.clone(), with_ttl(None, second), second),
        (strict.client().await, with_ttl(None, LONG), second),
    ] {
        let opened = Instant::now();
        let mut stream = Stream::open(&mut client, asks.clone()).await;
        let (renewals, status) = stream.end().await;
        let took = opened.elapsed();
        println!("{:?}, {:?}: {took:?}", asks.ttl, asks.max_duration);
        let status = Err::<(), _>(status);
        expect_retryable(&expect_error(
            status,
            Code::Unavailable,
            "STORE_UNAVAILABLE",
        ));
        assert_eq!(renewals, 0);
        assert!(took >= limit && took < limit + second, "{took:?}");
    }
    row.rollback().await;
}
