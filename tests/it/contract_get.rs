//! Get, row by row of the contract's first table.

use std::time::Instant;

use fencepost_support::{
    calls::{expect_error, expect_final, expect_resource, get, granted, renew, span},
    row_lock::RowLock,
};
use tonic::Code;

use crate::{
    plans::statements,
    world::{LONG, SHORT, assert_same_lease, client, expired, fresh, released, shared},
};

#[tokio::test]
async fn live_is_the_lock() {
    let (mut client, name) = (client().await, fresh("get"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for _ in 0..3 {
        let seen = get(&mut client, &name).await.unwrap();
        assert_eq!(seen.resource, name);
        assert_same_lease(&seen, &lock);
    }
}

#[tokio::test]
async fn none_is_not_found() {
    let (mut client, name) = (client().await, fresh("get-none"));
    let status = expect_error(
        get(&mut client, &name).await,
        Code::NotFound,
        "LOCK_NOT_FOUND",
    );
    expect_resource(&status, &name);
    expect_final(&status);
}

#[tokio::test]
async fn released_is_not_found() {
    let (mut client, name) = (client().await, fresh("get-released"));
    released(&mut client, &name, "a").await;
    expect_error(
        get(&mut client, &name).await,
        Code::NotFound,
        "LOCK_NOT_FOUND",
    );
}

#[tokio::test]
async fn expired_is_not_found() {
    let (mut client, name) = (client().await, fresh("get-expired"));
    expired(&mut client, &name, "a").await;
    expect_error(
        get(&mut client, &name).await,
        Code::NotFound,
        "LOCK_NOT_FOUND",
    );
}

/// Asked all along, what remains falls from the TTL to nothing. It is never
/// negative, and never more than is left.
#[tokio::test]
async fn remaining_is_never_more_than_what_is_left() {
    let (mut client, name) = (client().await, fresh("get-falls"));
    granted(&mut client, &name, "a", SHORT).await;
    // The lease ends before this, on the clock of this process.
    let end = Instant::now() + SHORT;
    let mut latest = SHORT;
    loop {
        let asked = Instant::now();
        let Ok(lock) = get(&mut client, &name).await else {
            break;
        };
        // `span` refuses what is negative. Nothing is left where the lease ended
        // after the look, on the answer's way out.
        latest = span(lock.remaining);
        let left = end.saturating_duration_since(asked);
        assert!(latest <= left, "{latest:?} of {left:?}");
    }
    assert!(latest < SHORT / 2, "ended with {latest:?} left");
}

#[tokio::test]
async fn a_look_does_not_wait_for_the_row() {
    let (mut client, name) = (client().await, fresh("get-waits"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let held = RowLock::hold(&shared().await.database.url(), &name).await;
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
    held.rollback().await;
}

/// A renewal may be committed between the snapshot of a look and its end.
#[tokio::test]
async fn a_lease_that_is_renewed_during_a_look_is_not_shown_as_over() {
    let session = shared().await.database.client().await;
    let statements = statements();
    for (look, many) in [("get", false), ("get_all", true)] {
        let (mut client, name) = (client().await, fresh("get-renewed"));
        let lock = granted(&mut client, &name, "a", SHORT).await;
        // From its first SELECT on, this session sees the row as it was then.
        session.run("BEGIN ISOLATION LEVEL REPEATABLE READ").await;
        let rest = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
                    FROM fencepost.locks WHERE resource = ";
        let rest: f64 = session.value(&format!("{rest}'{name}'")).await;
        assert!(rest > 0.0);
        renew(&mut client, &name, "a", lock.fencing_token, None)
            .await
            .unwrap();
        session.run(&format!("SELECT pg_sleep({rest})")).await;
        let names = [name.as_str()];
        let sql = &statements[look];
        let row = if many {
            session.query_one(sql, &[&&names[..]]).await
        } else {
            session.query_one(sql, &[&name]).await
        };
        let owner: Option<String> = row.unwrap().get("owner");
        session.run("COMMIT").await;
        assert_eq!(owner.as_deref(), Some("a"), "{look}");
    }
}
