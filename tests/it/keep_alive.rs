//! KeepAlive: the pace of the renewals, what each of them says, and what a
//! stream may ask for. How streams end is next door, in [`ends`].

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

pub(crate) mod command;
mod deadlines;
mod ends;
mod input;
mod races;
pub(crate) mod stage;

use std::time::{Duration, Instant};

use fencepost_proto::v1::KeepAliveRequest;
use fencepost_support::{
    Server,
    calls::{duration, get, granted, reason, refused, renew, span, time},
    postgres::fresh_database,
};
use tokio::task::JoinSet;
use tonic::Code;

use self::stage::{Stream, request, request_for};
use crate::world::{LONG, SHORT, client, fresh};

const MINUTE: Duration = Duration::from_secs(60);

/// What the way to the database and back may add to an interval on a machine
/// that is busy with other tests.
const TOLERANCE: Duration = Duration::from_millis(150);

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_kept_over_a_hundred_intervals_at_the_right_pace() {
    let (mut client, name) = (client().await, fresh("kept"));
    let lock = granted(&mut client, &name, "a", SHORT).await;
    let mut stream = Stream::open(&mut client, request_for(&lock, MINUTE)).await;
    let opened = Instant::now();
    let first = stream.next().await;
    assert!(first.stream_remaining <= MINUTE);
    assert!(first.stream_remaining > MINUTE - Duration::from_secs(5));
    let mut before = first.clone();
    let mut gaps = Vec::new();
    while opened.elapsed() < SHORT / 3 * 100 || gaps.len() < 100 {
        let now = stream.next().await;
        assert_eq!(now.lock.fencing_token, lock.fencing_token);
        assert_eq!(now.lock.acquired_at, lock.acquired_at);
        assert_eq!(now.lock.ttl, lock.ttl);
        assert!(span(now.lock.remaining) <= SHORT);

        // By the database's clock alone, so exact to its microsecond.
        let gap = now.landed().duration_since(before.landed()).unwrap();
        // A reader that was late has missed some: not a pair to measure with.
        let slack = time(before.lock.expires_at).duration_since(now.landed());
        if slack.is_ok_and(|slack| slack.abs_diff(now.slack) < Duration::from_millis(2)) {
            gaps.push(gap);
        }
        assert!(now.slack > Duration::ZERO && now.slack < SHORT);

        // Counted down by our clock, less the way here.
        let passed = now.at - first.at;
        let counted = first.stream_remaining - now.stream_remaining;
        assert!(
            passed.abs_diff(counted) < Duration::from_secs(1),
            "{passed:?}, {counted:?}"
        );
        before = now;
    }
    gaps.sort();
    let [least, median, most] = [0, gaps.len() / 2, gaps.len() - 1].map(|n| gaps[n]);
    let late = gaps.iter().filter(|gap| **gap > SHORT / 3 + TOLERANCE);
    let late = late.count();
    println!(
        "{} renewals every {least:?} to {most:?}, half of them {median:?}; {late} late",
        gaps.len()
    );
    // A little early by chance; early ones are not all alike. The least is after
    // one that landed late.
    assert!(least > SHORT / 3 / 2, "{least:?}");
    assert!(median > SHORT / 3 * 8 / 10, "{median:?}");
    assert!(median < SHORT / 3 + TOLERANCE / 3, "{median:?}");
    assert!(late * 20 <= gaps.len(), "{late} late");
    assert!(gaps[gaps.len() / 10] + Duration::from_millis(2) < gaps[gaps.len() * 9 / 10]);

    refused(&mut client, &name, "b", LONG).await;
    drop(stream);
    crate::world::outlive(SHORT).await;
    granted(&mut client, &name, "b", LONG).await;
}

/// Proxies cut a stream that stays quiet for a minute.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_lease_is_renewed_every_twenty_seconds() {
    let (mut client, name) = (client().await, fresh("long"));
    let hour = Duration::from_secs(3600);
    let lock = granted(&mut client, &name, "a", hour).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    let first = stream.next().await;
    let second = stream.next().await;
    let gap = second.landed().duration_since(first.landed()).unwrap();
    println!("renewed again after {gap:?}");
    let twenty = Duration::from_secs(20);
    assert!(gap > twenty * 8 / 10 - TOLERANCE, "{gap:?}");
    assert!(gap < twenty + TOLERANCE, "{gap:?}");
    // Ten minutes are the limit, whatever the lease's TTL is.
    assert!(first.stream_remaining <= MINUTE * 10);
    assert!(first.stream_remaining > MINUTE * 10 - Duration::from_secs(5));
}

/// A second stream must not wait for an interval either.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_renewal_comes_at_once() {
    let (mut client, name) = (client().await, fresh("at-once"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for _ in 0..3 {
        // Something to gain, or the slack would be a whole TTL.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = get(&mut client, &name).await.unwrap();
        let asked = Instant::now();
        let mut stream = Stream::open(&mut client, request(&lock)).await;
        let first = stream.next().await;
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
        let slack = time(before.expires_at)
            .duration_since(first.landed())
            .unwrap();
        assert!(
            slack.abs_diff(first.slack) < Duration::from_millis(2),
            "{slack:?}, {:?}",
            first.slack
        );
        assert!(time(first.lock.expires_at) > time(before.expires_at));
        // Five times the TTL, since nothing else was asked for.
        assert!(first.stream_remaining <= LONG * 5);
        assert!(first.stream_remaining > LONG * 5 - Duration::from_secs(5));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ttl_that_is_set_becomes_the_leases_and_never_shortens_it() {
    let (mut client, name) = (client().await, fresh("ttl"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let with_ttl = |ttl| KeepAliveRequest {
        ttl: Some(duration(ttl)),
        ..request(&lock)
    };

    let mut longer = Stream::open(&mut client, with_ttl(LONG * 2)).await;
    let now = longer.next().await;
    assert_eq!(span(now.lock.ttl), LONG * 2);
    assert!(span(now.lock.remaining) > LONG);
    drop(longer);

    // The times it had stay; the pace is that of the new TTL.
    let ends = time(now.lock.expires_at);
    let second = Duration::from_secs(1);
    let mut shorter = Stream::open(&mut client, with_ttl(second)).await;
    let mut last = shorter.next().await;
    for _ in 0..3 {
        let now = shorter.next().await;
        let gap = now.at - last.at;
        assert!(gap < second / 3 + Duration::from_secs(1), "{gap:?}");
        assert_eq!(span(now.lock.ttl), second);
        assert_eq!(time(now.lock.expires_at), ends);
        assert!(now.slack > LONG, "{:?}", now.slack);
        last = now;
    }
    drop(shorter);

    // Unset: the lease's own, which is the last one set.
    let mut own = Stream::open(&mut client, request(&lock)).await;
    assert_eq!(span(own.next().await.lock.ttl), second);
    let renewed = renew(&mut client, &name, "a", lock.fencing_token, None).await;
    assert_eq!(time(renewed.unwrap().expires_at), ends);
}

/// The holder opens the next stream before this one ends. Both renew for a
/// while, neither takes anything from the other, and there is no gap.
#[tokio::test(flavor = "multi_thread")]
async fn streams_that_overlap_hand_a_lease_on() {
    const TTL: Duration = Duration::from_secs(1);
    const STREAM: Duration = Duration::from_secs(2);
    let (mut client, name) = (client().await, fresh("overlap"));
    let lock = granted(&mut client, &name, "a", TTL).await;
    let mut stream = Stream::open(&mut client, request_for(&lock, STREAM)).await;
    let mut tightest = stream.next().await.slack;
    for _ in 0..3 {
        loop {
            let now = stream.next().await;
            tightest = tightest.min(now.slack);
            if now.stream_remaining < TTL {
                break;
            }
        }
        let mut next = Stream::open(&mut client, request_for(&lock, STREAM)).await;
        let first = next.next().await;
        assert!(first.stream_remaining > STREAM - TTL);
        let opened = Instant::now();
        let (renewals, status) = stream.end().await;
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(reason(&status).as_deref(), Some("REOPEN"));
        println!(
            "overlapped for {:?}, {renewals} renewals by the old one meanwhile",
            opened.elapsed()
        );
        stream = next;
    }
    println!("never less than {tightest:?} left of {TTL:?}");
    assert!(tightest > TTL / 4, "{tightest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_renews_no_longer_than_it_asked_or_the_server_allows() {
    let database = fresh_database().await;
    let limit = Duration::from_secs(3);
    let server = Server::builder(&database.url())
        .flag("--keepalive-max-duration", "3s")
        .ready()
        .await;
    let mut streams = JoinSet::new();
    // Asked for and TTL; what it comes to.
    let cases = [
        (Some(Duration::from_secs(1)), LONG, Duration::from_secs(1)),
        (Some(Duration::from_secs(3600)), LONG, limit),
        (Some(Duration::MAX), LONG, limit),
        (None, LONG, limit),
        (None, SHORT, SHORT * 5),
        // Shorter than an interval, and all the same renewed once.
        (Some(SHORT), LONG, SHORT),
    ];
    for (n, (asked, ttl, expected)) in cases.into_iter().enumerate() {
        let mut client = server.client().await;
        streams.spawn(async move {
            let lock = granted(&mut client, &format!("{n}"), "a", ttl).await;
            let max_duration = asked.map(|asked| prost_types::Duration {
                seconds: i64::try_from(asked.as_secs()).unwrap_or(i64::MAX),
                nanos: asked.subsec_nanos().cast_signed(),
            });
            let opened = Instant::now();
            let asks = KeepAliveRequest {
                max_duration,
                ..request(&lock)
            };
            let mut stream = Stream::open(&mut client, asks).await;
            let first = stream.next().await;
            assert!(first.stream_remaining <= expected);
            let status = stream.expect_end(Code::Unavailable, "REOPEN").await;
            let took = opened.elapsed();
            fencepost_support::calls::expect_retryable(&status);
            println!("asked for {asked:?} with a TTL of {ttl:?}: {took:?}");
            assert!(
                took >= expected && took < expected + Duration::from_secs(1),
                "{took:?}"
            );
            // The lease lives on.
            let name = lock.resource;
            refused(&mut client, &name, "b", LONG).await;
        });
    }
    while let Some(done) = streams.join_next().await {
        done.unwrap();
    }
}
