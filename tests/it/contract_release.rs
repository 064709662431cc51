//! Release, row by row of the contract's first table.

use fencepost_support::calls::{
    expect_error, expect_final, expect_resource, get, granted, refused, release,
};
use tonic::Code;

use crate::world::{
    LONG, SHORT, assert_same_lease, client, expired, fresh, in_each_state, outlive, released,
    shared,
};

#[tokio::test]
async fn live_this_owner_and_token_is_released() {
    let (mut client, name) = (client().await, fresh("release"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    // Nothing needs the connection that acquired it.
    let mut other = shared().await.server.client().await;
    release(&mut other, &name, "a", lock.fencing_token)
        .await
        .unwrap();
    let gone = get(&mut client, &name).await;
    expect_error(gone, Code::NotFound, "LOCK_NOT_FOUND");
    granted(&mut client, &name, "b", LONG).await;
}

#[tokio::test]
async fn none_is_not_found() {
    let (mut client, name) = (client().await, fresh("release-none"));
    let answer = release(&mut client, &name, "a", 1).await;
    let status = expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
    expect_resource(&status, &name);
    expect_final(&status);
}

#[tokio::test]
async fn none_is_not_found_whatever_the_token() {
    let (mut client, name) = (client().await, fresh("release-none"));
    let answer = release(&mut client, &name, "a", i64::MAX).await;
    expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
}

#[tokio::test]
async fn released_is_not_found() {
    let (mut client, name) = (client().await, fresh("release-twice"));
    let lock = released(&mut client, &name, "a").await;
    for owner in ["a", "b"] {
        let answer = release(&mut client, &name, owner, lock.fencing_token).await;
        let status = expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
        expect_resource(&status, &name);
    }
}

#[tokio::test]
async fn expired_is_not_found() {
    let (mut client, name) = (client().await, fresh("release-expired"));
    let lock = expired(&mut client, &name, "a").await;
    for owner in ["a", "b"] {
        let answer = release(&mut client, &name, owner, lock.fencing_token).await;
        expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
    }
}

#[tokio::test]
async fn live_another_owner_is_permission_denied() {
    let (mut client, name) = (client().await, fresh("release-foreign"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    // The token is readable with Get: with another owner it is worth nothing.
    for token in [lock.fencing_token, lock.fencing_token - 1, 1] {
        let answer = release(&mut client, &name, "b", token).await;
        let status = expect_error(answer, Code::PermissionDenied, "NOT_OWNER");
        expect_resource(&status, &name);
        expect_final(&status);
    }
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn a_late_holder_does_not_release_somebody_elses_lock() {
    let (mut client, name) = (client().await, fresh("release-late"));
    let old = granted(&mut client, &name, "a", SHORT).await;
    outlive(SHORT).await;
    let new = granted(&mut client, &name, "b", LONG).await;
    let answer = release(&mut client, &name, "a", old.fencing_token).await;
    expect_error(answer, Code::PermissionDenied, "NOT_OWNER");
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &new);
    assert_eq!(refused(&mut client, &name, "c", LONG).await.owner, "b");
}

#[tokio::test]
async fn live_same_owner_newer_token_is_superseded_and_the_newer_lease_untouched() {
    let (mut client, name) = (client().await, fresh("release-superseded"));
    let old = granted(&mut client, &name, "a", LONG).await;
    let new = granted(&mut client, &name, "a", LONG).await;
    let answer = release(&mut client, &name, "a", old.fencing_token).await;
    let status = expect_error(answer, Code::Aborted, "TOKEN_SUPERSEDED");
    expect_resource(&status, &name);
    expect_final(&status);
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &new);
}

#[tokio::test]
async fn a_token_greater_than_the_stored_one_is_unknown_in_every_state_but_none() {
    let mut client = client().await;
    let leases = in_each_state(&mut client, "release-unknown", "a").await;
    for lock in &leases {
        let name = &lock.resource;
        for owner in ["a", "b"] {
            let answer = release(&mut client, name, owner, lock.fencing_token + 1).await;
            let status = expect_error(answer, Code::Aborted, "TOKEN_UNKNOWN");
            expect_resource(&status, name);
            expect_final(&status);
        }
        shared().await.wait_for_alarm(name).await;
    }
    let live = &leases[0];
    assert_same_lease(&get(&mut client, &live.resource).await.unwrap(), live);
}
