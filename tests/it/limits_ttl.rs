//! The limits of a TTL, and durations that are none.

use fencepost_proto::v1::{AcquireRequest, RenewRequest};
use fencepost_support::{
    Server,
    calls::{expect_error, expect_violation, get, grant_in, granted, refused, request, send, span},
};
use prost_types::Duration as Wire;
use tonic::Code;

use crate::world::{LONG, assert_same_lease, client, fresh, shared};

/// The longest TTL: a day.
const DAY: i64 = 24 * 3600;

fn ttl(seconds: i64, nanos: i32) -> Option<Wire> {
    Some(Wire { seconds, nanos })
}

fn ask() -> AcquireRequest {
    request(&fresh("ttl"), "a", LONG)
}

#[tokio::test]
async fn a_ttl_is_500_ms_to_24_h() {
    let mut client = client().await;
    for (seconds, nanos) in [
        (0, 500_000_000),
        (0, 500_000_001),
        (1, 0),
        (1, 999_999_999),
        (DAY - 1, 999_999_999),
        (DAY, 0),
    ] {
        let name = fresh("ttl");
        let ask = AcquireRequest {
            resource: name.clone(),
            ttl: ttl(seconds, nanos),
            ..ask()
        };
        let lock = grant_in(send(&mut client, ask.clone()).await);
        let asked = span(ask.ttl);
        // What counts is in the answer; the store keeps milliseconds.
        assert!(
            span(lock.ttl).abs_diff(asked).as_micros() <= 1000,
            "{lock:?}"
        );
        assert!(span(lock.remaining) <= span(lock.ttl));
        refused(&mut client, &name, "b", LONG).await;
    }
}

/// What no lease can have, and what a careless conversion makes of it.
fn bad_ttls() -> Vec<Option<Wire>> {
    vec![
        ttl(0, 0),
        ttl(0, 1),
        ttl(0, 1_000_000),
        ttl(0, 499_999_999),
        ttl(0, -1),
        ttl(-1, 0),
        ttl(-1, -500_000_000),
        ttl(DAY, 1),
        ttl(DAY + 1, 0),
        ttl(1 << 31, 0),
        ttl(1 << 32, 0),
        ttl(1 << 53, 0),
        ttl(i64::MAX / 1_000_000_000, 0),
        ttl(i64::MAX / 1000 + 1, 0),
        ttl(i64::MAX, 0),
        ttl(i64::MAX, 999_999_999),
        ttl(i64::MAX, i32::MAX),
        ttl(i64::MIN, 0),
        ttl(i64::MIN, i32::MIN),
        // Signs that differ, and nanos beyond a second: not a Duration.
        ttl(1, -1),
        ttl(2, -500_000_000),
        ttl(-1, 1),
        ttl(1, 1_000_000_000),
        ttl(0, 1_500_000_000),
        ttl(0, i32::MAX),
        ttl(1, i32::MIN),
    ]
}

#[tokio::test]
async fn a_ttl_outside_of_its_limits_is_refused_by_acquire() {
    let mut client = client().await;
    for ttl in bad_ttls().into_iter().chain([None]) {
        let ask = AcquireRequest { ttl, ..ask() };
        let answer = send(&mut client, ask.clone()).await;
        expect_violation(answer, "ttl");
        let nothing = get(&mut client, &ask.resource).await;
        expect_error(nothing, Code::NotFound, "LOCK_NOT_FOUND");
    }
}

#[tokio::test]
async fn a_ttl_outside_of_its_limits_is_refused_by_renew() {
    let (mut client, name) = (client().await, fresh("renew-limits"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for ttl in bad_ttls() {
        let ask = RenewRequest {
            resource: name.clone(),
            owner: "a".to_owned(),
            fencing_token: lock.fencing_token,
            ttl,
        };
        expect_violation(client.renew(ask).await, "ttl");
    }
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn limits_of_the_ttl_can_be_configured() {
    let server = Server::builder(&shared().await.database.url())
        .flag("--min-ttl", "2s")
        .flag("--max-ttl", "10s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    for (ttl, good) in [
        (ttl(1, 999_999_999), false),
        (ttl(2, 0), true),
        (ttl(10, 0), true),
        (ttl(10, 1), false),
    ] {
        let answer = send(&mut client, AcquireRequest { ttl, ..ask() }).await;
        if good {
            grant_in(answer);
        } else {
            expect_violation(answer, "ttl");
        }
    }
}
