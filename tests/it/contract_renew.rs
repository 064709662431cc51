//! Renew, row by row of the contract's first table.

use std::time::Duration;

use fencepost_support::{
    calls::{
        expect_error, expect_final, expect_resource, get, granted, refused, release, renew, span,
        time,
    },
    row_lock::RowLock,
};
use tonic::Code;

use crate::world::{
    LONG, SHORT, assert_same_lease, client, expired, fresh, in_each_state, outlive, released,
    shared,
};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn live_this_owner_and_token_is_extended_and_keeps_token_and_acquired_at() {
    let (mut client, name) = (client().await, fresh("renew"));
    let mut before = granted(&mut client, &name, "a", LONG).await;
    for _ in 0..10 {
        let now = renew(&mut client, &name, "a", before.fencing_token, None)
            .await
            .unwrap();
        assert_eq!(now.fencing_token, before.fencing_token);
        assert_eq!(now.acquired_at, before.acquired_at);
        assert_eq!(now.ttl, before.ttl);
        assert!(time(now.expires_at) > time(before.expires_at));
        assert!(span(now.remaining) <= LONG);
        before = now;
    }
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &before);
}

#[tokio::test]
async fn a_lease_lives_as_long_as_it_is_renewed() {
    let (mut client, name) = (client().await, fresh("renew-on"));
    let lock = granted(&mut client, &name, "a", SECOND).await;
    for _ in 0..6 {
        tokio::time::sleep(SECOND / 3).await;
        renew(&mut client, &name, "a", lock.fencing_token, None)
            .await
            .unwrap();
    }
    assert_eq!(refused(&mut client, &name, "b", LONG).await.owner, "a");
}

#[tokio::test]
async fn a_renewal_never_shortens() {
    let (mut client, name) = (client().await, fresh("renew-shorter"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let now = renew(&mut client, &name, "a", lock.fencing_token, Some(SECOND))
        .await
        .unwrap();
    assert_eq!(now.expires_at, lock.expires_at);
    assert!(span(now.remaining) > LONG / 2);
}

#[tokio::test]
async fn a_ttl_that_is_set_becomes_the_leases() {
    let (mut client, name) = (client().await, fresh("renew-ttl"));
    let token = granted(&mut client, &name, "a", SECOND).await.fencing_token;
    let longer = renew(&mut client, &name, "a", token, Some(LONG))
        .await
        .unwrap();
    assert_eq!(span(longer.ttl), LONG);
    assert!(span(longer.remaining) > LONG / 2);
    // Unset from then on means this one.
    let again = renew(&mut client, &name, "a", token, None).await.unwrap();
    assert_eq!(span(again.ttl), LONG);
    assert!(time(again.expires_at) > time(longer.expires_at));
    // A shorter one counts as well, though it shortens nothing now.
    let shorter = renew(&mut client, &name, "a", token, Some(SECOND))
        .await
        .unwrap();
    assert_eq!(span(shorter.ttl), SECOND);
    assert_eq!(shorter.expires_at, again.expires_at);
    let last = renew(&mut client, &name, "a", token, None).await.unwrap();
    assert_eq!(span(last.ttl), SECOND);
    assert_eq!(last.expires_at, again.expires_at);
}

#[tokio::test]
async fn expired_this_owner_and_token_is_expired_even_when_nobody_took_it() {
    let (mut client, name) = (client().await, fresh("renew-expired"));
    let lock = expired(&mut client, &name, "a").await;
    for ttl in [None, Some(LONG)] {
        let answer = renew(&mut client, &name, "a", lock.fencing_token, ttl).await;
        let status = expect_error(answer, Code::Aborted, "LOCK_EXPIRED");
        expect_resource(&status, &name);
        expect_final(&status);
    }
    let gone = get(&mut client, &name).await;
    expect_error(gone, Code::NotFound, "LOCK_NOT_FOUND");
    granted(&mut client, &name, "b", LONG).await;
}

#[tokio::test]
async fn live_another_owner_is_not_owner() {
    let (mut client, name) = (client().await, fresh("renew-foreign"));
    let old = expired(&mut client, &name, "a").await;
    let lock = granted(&mut client, &name, "b", LONG).await;
    for token in [old.fencing_token, lock.fencing_token] {
        let answer = renew(&mut client, &name, "a", token, Some(LONG * 2)).await;
        let status = expect_error(answer, Code::Aborted, "NOT_OWNER");
        expect_resource(&status, &name);
        expect_final(&status);
    }
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn live_same_owner_newer_token_is_superseded() {
    let (mut client, name) = (client().await, fresh("renew-superseded"));
    let old = granted(&mut client, &name, "a", LONG).await;
    let new = granted(&mut client, &name, "a", LONG).await;
    let answer = renew(&mut client, &name, "a", old.fencing_token, Some(LONG * 2)).await;
    let status = expect_error(answer, Code::Aborted, "TOKEN_SUPERSEDED");
    expect_resource(&status, &name);
    expect_final(&status);
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &new);
}

#[tokio::test]
async fn none_is_not_found() {
    let (mut client, name) = (client().await, fresh("renew-none"));
    for token in [1, i64::MAX] {
        let answer = renew(&mut client, &name, "a", token, None).await;
        let status = expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
        expect_resource(&status, &name);
        expect_final(&status);
    }
}

#[tokio::test]
async fn released_is_not_found() {
    let (mut client, name) = (client().await, fresh("renew-released"));
    let lock = released(&mut client, &name, "a").await;
    for owner in ["a", "b"] {
        let answer = renew(&mut client, &name, owner, lock.fencing_token, None).await;
        expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
    }
    let gone = get(&mut client, &name).await;
    expect_error(gone, Code::NotFound, "LOCK_NOT_FOUND");
}

#[tokio::test]
async fn released_stays_not_found_when_its_time_would_have_been_over() {
    let (mut client, name) = (client().await, fresh("renew-released"));
    let token = granted(&mut client, &name, "a", SHORT).await.fencing_token;
    release(&mut client, &name, "a", token).await.unwrap();
    outlive(SHORT).await;
    let answer = renew(&mut client, &name, "a", token, None).await;
    expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
}

#[tokio::test]
async fn an_ended_lease_that_is_not_this_one_is_not_found() {
    let mut client = client().await;
    // Expired, of the same owner with a newer token; or of another owner.
    for owner in ["a", "b"] {
        let name = fresh("renew-ended");
        let old = released(&mut client, &name, "a").await;
        let ended = expired(&mut client, &name, owner).await;
        let answer = renew(&mut client, &name, "a", old.fencing_token, None).await;
        expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
        let answer = renew(&mut client, &name, "c", ended.fencing_token, None).await;
        expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
    }
    // Taken by another and released since.
    let name = fresh("renew-ended");
    let old = expired(&mut client, &name, "a").await;
    released(&mut client, &name, "b").await;
    let answer = renew(&mut client, &name, "a", old.fencing_token, None).await;
    expect_error(answer, Code::NotFound, "LOCK_NOT_FOUND");
}

#[tokio::test]
async fn a_token_greater_than_the_stored_one_is_unknown_in_every_state_but_none() {
    let mut client = client().await;
    for lock in in_each_state(&mut client, "renew-unknown", "a").await {
        let name = &lock.resource;
        for owner in ["a", "b"] {
            let token = lock.fencing_token + 1;
            let answer = renew(&mut client, name, owner, token, None).await;
            let status = expect_error(answer, Code::Aborted, "TOKEN_UNKNOWN");
            expect_resource(&status, name);
            expect_final(&status);
        }
        shared().await.wait_for_alarm(name).await;
    }
}

/// The clock is read after the row lock is there: a plain `UPDATE … WHERE`
/// would judge by the moment before it had to wait.
#[tokio::test]
async fn a_lease_that_expires_while_its_renewal_waits_for_the_row_is_expired() {
    for commit in [false, true] {
        let (mut client, name) = (client().await, fresh("renew-waits"));
        let token = granted(&mut client, &name, "a", SHORT).await.fencing_token;
        let held = RowLock::hold(&shared().await.database.url(), &name).await;
        let renewal = tokio::spawn({
            let (mut client, name) = (client.clone(), name.clone());
            async move { renew(&mut client, &name, "a", token, Some(LONG)).await }
        });
        held.wait_for_waiters(1).await;
        outlive(SHORT).await;
        if commit {
            held.commit().await;
        } else {
            held.rollback().await;
        }
        expect_error(renewal.await.unwrap(), Code::Aborted, "LOCK_EXPIRED");
        granted(&mut client, &name, "b", LONG).await;
    }
}

/// And by the row as it is then, not as it was.
#[tokio::test]
async fn a_renewal_that_waited_judges_the_row_as_it_is_now() {
    let (mut client, name) = (client().await, fresh("renew-sees"));
    let token = granted(&mut client, &name, "a", LONG).await.fencing_token;
    let held = RowLock::hold(&shared().await.database.url(), &name).await;
    let renewal = tokio::spawn({
        let (mut client, name) = (client.clone(), name.clone());
        async move { renew(&mut client, &name, "a", token, None).await }
    });
    held.wait_for_waiters(1).await;
    let release = "UPDATE fencepost.locks SET released = true, expires_at = clock_timestamp()
                   WHERE resource = $1";
    held.client().execute(release, &[&name]).await.unwrap();
    held.commit().await;
    expect_error(renewal.await.unwrap(), Code::NotFound, "LOCK_NOT_FOUND");
}
