//! How streams end: within one interval of the loss, with its reason, and
//! never OK.

use std::time::{Duration, Instant};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server,
    calls::{expect_error, expect_final, expect_resource, expect_retryable, get, granted, release},
    postgres::fresh_database,
    row_lock::RowLock,
    server::Client,
};
use tokio::task::JoinSet;
use tonic::Code;

use super::stage::{Stream, request, request_for};
use crate::world::{LONG, client, expired, fresh, outlive, released, shared};

/// Of the leases that are lost here; an interval is a third of it.
const TTL: Duration = Duration::from_secs(6);

/// How a lease is lost while a stream renews it.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Its own owner acquires again.
    Superseded,
    Released,
    Sql(&'static str),
}

impl Way {
    async fn lose(self, client: &mut Client, lock: &Lock) {
        let name = &lock.resource;
        match self {
            Self::Superseded => drop(granted(client, name, "a", TTL).await),
            Self::Released => release(client, name, "a", lock.fencing_token)
                .await
                .unwrap(),
            Self::Sql(sql) => {
                let admin = shared().await.database.client().await;
                admin.run(&sql.replace("$R", name)).await;
            }
        }
    }
}

/// It ends early, and somebody takes the lock.
const TAKEN: &str = "UPDATE fencepost.locks SET owner = 'another',
    prev_token = fencing_token, fencing_token = nextval('fencepost.fencing_tokens'),
    acquired_at = clock_timestamp(), expires_at = clock_timestamp() + interval '60 s'
    WHERE resource = '$R'";
const EXPIRED: &str = "UPDATE fencepost.locks
    SET expires_at = clock_timestamp() - interval '1 ms' WHERE resource = '$R'";
const DELETED: &str = "DELETE FROM fencepost.locks WHERE resource = '$R'";
/// As after a failover that forgot the lease.
const FORGOTTEN: &str = "UPDATE fencepost.locks SET fencing_token = fencing_token - 1
    WHERE resource = '$R'";

/// Loses a lease while a stream renews it, and expects the stream to say so.
async fn expect_lost(way: Way, code: Code, reason: &str) {
    let (mut client, name) = (client().await, fresh("lost"));
    let lock = granted(&mut client, &name, "a", TTL).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    stream.next().await;
    way.lose(&mut client, &lock).await;
    let lost = Instant::now();
    let (renewals, status) = stream.end().await;
    let took = lost.elapsed();
    println!("{reason} after {took:?}");
    let status = expect_error(Err::<(), _>(status), code, reason);
    expect_resource(&status, &name);
    expect_final(&status);
    assert_eq!(renewals, 0, "{reason}: renewed after its end");
    // Two intervals would be more.
    let bound = TTL / 3 + Duration::from_secs(1);
    assert!(took < bound, "{reason} after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_lease_ends_its_stream_within_one_interval() {
    expect_lost(Way::Superseded, Code::Aborted, "TOKEN_SUPERSEDED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_lease_ends_its_stream_within_one_interval() {
    expect_lost(Way::Released, Code::NotFound, "LOCK_NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_taken_by_another_ends_its_stream_within_one_interval() {
    expect_lost(Way::Sql(TAKEN), Code::Aborted, "NOT_OWNER").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lease_ends_its_stream_within_one_interval() {
    expect_lost(Way::Sql(EXPIRED), Code::Aborted, "LOCK_EXPIRED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_deleted_by_hand_ends_its_stream_within_one_interval() {
    expect_lost(Way::Sql(DELETED), Code::NotFound, "LOCK_NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_lease_ends_its_stream_within_one_interval() {
    expect_lost(Way::Sql(FORGOTTEN), Code::Aborted, "TOKEN_UNKNOWN").await;
}

/// That a caller shows a token which was never given is an alarm.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_lease_is_logged_as_an_alarm() {
    let world = shared().await;
    let (mut client, name) = (client().await, fresh("alarm"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let admin = world.database.client().await;
    admin.run(&FORGOTTEN.replace("$R", &name)).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    stream.expect_end(Code::Aborted, "TOKEN_UNKNOWN").await;
    world.wait_for_alarm(&name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_on_a_dead_lease_fails_at_once() {
    let mut client = client().await;
    let [never, ended, given, newer, others] =
        ["never", "ended", "given", "newer", "others"].map(fresh);
    let gone = expired(&mut client, &ended, "a").await;
    let back = released(&mut client, &given, "a").await;
    let old = granted(&mut client, &newer, "a", LONG).await;
    granted(&mut client, &newer, "a", LONG).await;
    let before = granted(&mut client, &others, "a", Duration::from_millis(500)).await;
    outlive(Duration::from_millis(500)).await;
    granted(&mut client, &others, "b", LONG).await;
    let absent = Lock {
        resource: never,
        ..back.clone()
    };
    for (lock, code, reason) in [
        (absent, Code::NotFound, "LOCK_NOT_FOUND"),
        (gone, Code::Aborted, "LOCK_EXPIRED"),
        (back, Code::NotFound, "LOCK_NOT_FOUND"),
        (old, Code::Aborted, "TOKEN_SUPERSEDED"),
        (before, Code::Aborted, "NOT_OWNER"),
    ] {
        let asked = Instant::now();
        let ended = match Stream::try_open(&mut client, request(&lock)).await {
            Ok(mut stream) => stream.end().await,
            Err(status) => (0, status),
        };
        let took = asked.elapsed();
        let status = expect_error(Err::<(), _>(ended.1), code, reason);
        expect_resource(&status, &lock.resource);
        assert_eq!(ended.0, 0);
        assert!(took < Duration::from_secs(2), "{reason} after {took:?}");
    }
}

/// Streams renew while health already says NOT_SERVING, then all end; the
/// leases live, and the next server goes on with them.
#[tokio::test(flavor = "multi_thread")]
async fn draining_ends_every_stream_and_no_lease() {
    const STREAMS: usize = 200;
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "1s")
        .flag("--drain-timeout", "8s")
        .ready()
        .await;
    let next = Server::start(&database.url()).await;
    let mut streams = JoinSet::new();
    let (opened, mut all_open) = tokio::sync::mpsc::channel(STREAMS);
    for n in 0..STREAMS {
        // Some share a connection, some have their own.
        let mut client = server.client().await;
        let mut elsewhere = next.client().await;
        let opened = opened.clone();
        streams.spawn(async move {
            let lock = granted(&mut client, &format!("{n}"), "a", LONG).await;
            let with_ttl = fencepost_proto::v1::KeepAliveRequest {
                ttl: Some(fencepost_support::calls::seconds(1)),
                ..request(&lock)
            };
            let mut stream = Stream::open(&mut client, with_ttl).await;
            stream.next().await;
            opened.send(()).await.unwrap();
            let (renewals, status) = stream.end().await;
            let status = expect_error(Err::<(), _>(status), Code::Unavailable, "DRAINING");
            expect_retryable(&status);
            expect_resource(&status, &lock.resource);
            let mut again = Stream::open(&mut elsewhere, request(&lock)).await;
            assert_eq!(again.next().await.lock.fencing_token, lock.fencing_token);
            renewals
        });
    }
    for _ in 0..STREAMS {
        all_open.recv().await.unwrap();
    }
    let told = Instant::now();
    server.sigterm();
    let status = server.wait_exit().await;
    println!("ended {:?} after the signal", told.elapsed());
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(told.elapsed() < Duration::from_secs(6));
    let renewals = streams.join_all().await;
    // For the whole delay.
    assert!(
        renewals.iter().all(|renewals| *renewals >= 2),
        "{renewals:?}"
    );
    let mut client = next.client().await;
    get(&mut client, "0").await.unwrap();
}

/// A server that dies says nothing; its end is an error all the same, and
/// nothing is lost but the stream.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_is_an_error_too() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let next = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "a", LONG).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    stream.next().await;
    server.kill9().await;
    let (_, status) = stream.end().await;
    assert!(
        matches!(status.code(), Code::Unavailable | Code::Unknown),
        "{status:?}"
    );
    assert_eq!(fencepost_support::reason(&status), None);
    let mut stream = Stream::open(&mut next.client().await, request(&lock)).await;
    assert_eq!(stream.next().await.lock.fencing_token, lock.fencing_token);
}

/// Its renewal waits in the database, for a lease that has long to live.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_stays_locked_does_not_hold_the_drain_up() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "0s")
        .ready()
        .await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "a", LONG).await;
    let often = fencepost_proto::v1::KeepAliveRequest {
        ttl: Some(fencepost_support::calls::seconds(1)),
        ..request_for(&lock, LONG)
    };
    let mut stream = Stream::open(&mut client, often).await;
    stream.next().await;
    let row = RowLock::hold(&database.url(), "a").await;
    row.wait_for_waiters(1).await;
    let told = Instant::now();
    server.sigterm();
    stream.expect_end(Code::Unavailable, "DRAINING").await;
    let status = server.wait_exit().await;
    let took = told.elapsed();
    println!("ended {took:?} after the signal");
    assert_eq!(status.code(), Some(0), "{status}");
    // One wait for a row, and neither what a call may take nor what is left of
    // the lease.
    assert!(took < Duration::from_millis(3500), "{took:?}");
    row.rollback().await;
}
