//! What a stream cannot be opened with: every bad field is named at once.

use std::time::Duration;

use fencepost_proto::v1::KeepAliveRequest;
use fencepost_support::calls::{expect_violation, granted, refused, violations};
use tonic::{Code, Status};

use super::stage::{Stream, request};
use crate::world::{LONG, client, fresh};

fn hostile(seconds: i64, nanos: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos })
}

async fn refusal(
    client: &mut fencepost_support::server::Client,
    request: KeepAliveRequest,
) -> Result<Stream, Status> {
    Stream::try_open(client, request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_field_is_named() {
    let (mut client, name) = (client().await, fresh("input"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let good = || request(&lock);
    let token = |fencing_token| KeepAliveRequest {
        fencing_token,
        ..good()
    };
    for asks in [token(0), token(-1), token(i64::MIN)] {
        expect_violation(refusal(&mut client, asks).await, "fencing_token");
    }
    for (seconds, nanos) in [
        (0, 0),
        (0, 499_999_999),
        (-1, 0),
        (0, -1),
        (1, -1),
        (-1, 999_999_999),
        (1, 1_000_000_000),
        (1, i32::MAX),
        (1, i32::MIN),
        (i64::MIN, 0),
        (i64::MIN, i32::MIN),
        (i64::MAX, i32::MAX),
    ] {
        let max_duration = KeepAliveRequest {
            max_duration: hostile(seconds, nanos),
            ..good()
        };
        expect_violation(refusal(&mut client, max_duration).await, "max_duration");
        let ttl = KeepAliveRequest {
            ttl: hostile(seconds, nanos),
            ..good()
        };
        expect_violation(refusal(&mut client, ttl).await, "ttl");
    }
    // Outside of the server's limits.
    for (seconds, nanos) in [(86_400, 1), (i64::MAX, 0)] {
        let ttl = KeepAliveRequest {
            ttl: hostile(seconds, nanos),
            ..good()
        };
        expect_violation(refusal(&mut client, ttl).await, "ttl");
    }
    for (resource, owner, field) in [
        (String::new(), "a".to_owned(), "resource"),
        ("x".repeat(513), "a".to_owned(), "resource"),
        ("a\nb".to_owned(), "a".to_owned(), "resource"),
        (name.clone(), String::new(), "owner"),
        (name.clone(), "x".repeat(257), "owner"),
    ] {
        let asks = KeepAliveRequest {
            resource,
            owner,
            ..good()
        };
        expect_violation(refusal(&mut client, asks).await, field);
    }
    // All of it at once, and no lease was touched.
    let all = KeepAliveRequest {
        resource: String::new(),
        owner: String::new(),
        fencing_token: 0,
        ttl: hostile(0, 0),
        max_duration: hostile(0, 0),
    };
    let status = refusal(&mut client, all).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let fields = ["resource", "owner", "fencing_token", "ttl", "max_duration"];
    assert_eq!(violations(&status), fields);
    refused(&mut client, &name, "b", LONG).await;
}

/// What is merely long is cut to the server's limit.
#[tokio::test(flavor = "multi_thread")]
async fn the_longest_durations_that_are_valid_are_taken() {
    let (mut client, name) = (client().await, fresh("longest"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for (seconds, nanos) in [(i64::MAX, 999_999_999), (1 << 53, 0), (86_400, 0)] {
        let asks = KeepAliveRequest {
            max_duration: hostile(seconds, nanos),
            ttl: hostile(86_400, 0),
            ..request(&lock)
        };
        let first = Stream::open(&mut client, asks).await.next().await;
        assert!(first.stream_remaining <= Duration::from_secs(600));
        assert!(first.stream_remaining > Duration::from_secs(590));
    }
}
