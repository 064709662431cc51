//! Acquire, row by row of the contract's first table.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use fencepost_proto::v1::AcquireRequest;
use fencepost_support::{
    calls::{
        self, acquire, expect_error, expect_final, expect_resource, get, grant_in, granted,
        refusal_in, refused, release, renew, request, request_with_id, send, span,
    },
    row_lock::RowLock,
    server::Client,
};
use tonic::Code;

use crate::world::{
    LONG, SHORT, assert_full_ttl, assert_same_lease, assert_token, client, expired, fresh, outlive,
    released, shared,
};

#[tokio::test]
async fn none_is_granted_with_a_new_token_and_the_full_ttl() {
    let (mut client, name) = (client().await, fresh("none"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    assert_eq!((lock.resource.as_str(), lock.owner.as_str()), (&*name, "a"));
    assert_token(lock.fencing_token);
    assert_full_ttl(&lock, LONG);
    assert!(lock.labels.is_empty());
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn released_is_granted_with_a_new_token_and_the_full_ttl() {
    let (mut client, name) = (client().await, fresh("released"));
    let before = released(&mut client, &name, "a").await;
    for owner in ["b", "a"] {
        let lock = granted(&mut client, &name, owner, LONG).await;
        assert!(lock.fencing_token > before.fencing_token);
        assert_full_ttl(&lock, LONG);
        release(&mut client, &name, owner, lock.fencing_token)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn expired_is_granted_with_a_new_token_and_the_full_ttl() {
    let (mut client, name) = (client().await, fresh("expired"));
    for owner in ["b", "a"] {
        let before = expired(&mut client, &name, "a").await;
        let lock = granted(&mut client, &name, owner, SHORT).await;
        assert!(lock.fencing_token > before.fencing_token);
        assert_full_ttl(&lock, SHORT);
        outlive(SHORT).await;
    }
}

#[tokio::test]
async fn a_lease_ends_at_its_ttl_and_not_before() {
    let (mut client, name) = (client().await, fresh("takeover"));
    let asked = Instant::now();
    let first = granted(&mut client, &name, "a", Duration::from_secs(1)).await;
    let answered = Instant::now();
    let second = loop {
        let answer = acquire(&mut client, &name, "b", LONG).await.unwrap();
        match answer.lock {
            Some(lock) => break lock,
            None => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let taken = Instant::now();
    assert!(taken - asked >= Duration::from_secs(1), "too early");
    assert!(taken - answered < Duration::from_secs(2), "too late");
    assert!(second.fencing_token > first.fencing_token);
}

#[tokio::test]
async fn live_same_owner_without_or_with_another_request_id_is_a_new_acquisition() {
    let mut client = client().await;
    for (before_id, id) in [("", ""), ("one", ""), ("", "two"), ("one", "two")] {
        let name = fresh("same-owner");
        let ask = request_with_id(&name, "a", LONG, before_id);
        let before = grant_in(send(&mut client, ask).await);
        let ask = request_with_id(&name, "a", Duration::from_secs(30), id);
        let lock = grant_in(send(&mut client, ask).await);
        assert!(lock.fencing_token > before.fencing_token);
        assert!(calls::time(lock.acquired_at) > calls::time(before.acquired_at));
        assert_full_ttl(&lock, Duration::from_secs(30));

        // The old token is dead from then on.
        let old = renew(&mut client, &name, "a", before.fencing_token, None).await;
        expect_error(old, Code::Aborted, "TOKEN_SUPERSEDED");
        let old = release(&mut client, &name, "a", before.fencing_token).await;
        expect_error(old, Code::Aborted, "TOKEN_SUPERSEDED");
        renew(&mut client, &name, "a", lock.fencing_token, None)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn live_never_renewed_same_owner_and_request_id_is_the_same_lease_not_extended() {
    let (mut client, name) = (client().await, fresh("replay"));
    let labels = HashMap::from([("host".to_owned(), "one".to_owned())]);
    let ask = AcquireRequest {
        labels,
        ..request_with_id(&name, "a", LONG, "id")
    };
    let first = grant_in(send(&mut client, ask.clone()).await);
    let end = Instant::now() + LONG;
    // A retry may come more than once, over another connection, and with
    // another TTL: it is still about the lease that was granted.
    for ttl in [LONG, SHORT, LONG * 2] {
        let mut other = shared().await.server.client().await;
        let ask = AcquireRequest {
            ttl: Some(calls::duration(ttl)),
            ..ask.clone()
        };
        let asked = Instant::now();
        let again = grant_in(send(&mut other, ask).await);
        assert_same_lease(&again, &first);
        assert!(span(again.remaining) <= end - asked);
    }
}

#[tokio::test]
async fn a_request_id_is_spent_once_its_lease_was_renewed() {
    let (mut client, name) = (client().await, fresh("spent-renewed"));
    let ask = request_with_id(&name, "a", LONG, "id");
    let lock = grant_in(send(&mut client, ask.clone()).await);
    let renewed = renew(&mut client, &name, "a", lock.fencing_token, None)
        .await
        .unwrap();
    expect_spent(&mut client, ask).await;
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &renewed);
}

#[tokio::test]
async fn a_request_id_is_spent_once_its_lease_was_released() {
    let (mut client, name) = (client().await, fresh("spent-released"));
    let ask = request_with_id(&name, "a", LONG, "id");
    let lock = grant_in(send(&mut client, ask.clone()).await);
    release(&mut client, &name, "a", lock.fencing_token)
        .await
        .unwrap();
    expect_spent(&mut client, ask).await;
    let gone = get(&mut client, &name).await;
    expect_error(gone, Code::NotFound, "LOCK_NOT_FOUND");
}

#[tokio::test]
async fn a_request_id_is_spent_once_its_lease_has_expired() {
    let (mut client, name) = (client().await, fresh("spent-expired"));
    let ask = request_with_id(&name, "a", SHORT, "id");
    grant_in(send(&mut client, ask.clone()).await);
    outlive(SHORT).await;
    expect_spent(&mut client, ask).await;
}

/// Expects that a request is spent, time and again, and that a new id works.
async fn expect_spent(client: &mut Client, ask: AcquireRequest) {
    for _ in 0..3 {
        let answer = send(client, ask.clone()).await;
        let status = expect_error(answer, Code::Aborted, "REQUEST_SPENT");
        expect_resource(&status, &ask.resource);
        expect_final(&status);
    }
    // Looked at through a request of another name: the row is as it was.
    let other = AcquireRequest {
        resource: fresh("unspent"),
        ..ask
    };
    grant_in(send(client, other).await);
}

#[tokio::test]
async fn after_a_spent_request_id_a_new_one_works() {
    let (mut client, name) = (client().await, fresh("respent"));
    let ask = request_with_id(&name, "a", LONG, "one");
    let lock = grant_in(send(&mut client, ask.clone()).await);
    release(&mut client, &name, "a", lock.fencing_token)
        .await
        .unwrap();
    let spent = send(&mut client, ask).await;
    expect_error(spent, Code::Aborted, "REQUEST_SPENT");
    let ask = request_with_id(&name, "a", LONG, "two");
    let next = grant_in(send(&mut client, ask).await);
    assert!(next.fencing_token > lock.fencing_token);
}

#[tokio::test]
async fn only_the_latest_acquisition_of_a_resource_is_remembered() {
    let (mut client, name) = (client().await, fresh("latest"));
    let one = request_with_id(&name, "a", LONG, "one");
    let two = request_with_id(&name, "a", LONG, "two");
    let first = grant_in(send(&mut client, one.clone()).await);
    let second = grant_in(send(&mut client, two).await);
    let third = grant_in(send(&mut client, one).await);
    assert!(first.fencing_token < second.fencing_token);
    assert!(second.fencing_token < third.fencing_token);
}

#[tokio::test]
async fn a_request_id_belongs_to_its_owner() {
    let (mut client, name) = (client().await, fresh("foreign-id"));
    let ask = |owner: &str| request_with_id(&name, owner, LONG, "id");
    let lock = grant_in(send(&mut client, ask("a")).await);
    // While it is held: contention, whatever the id.
    assert_eq!(refusal_in(send(&mut client, ask("b")).await).owner, "a");
    release(&mut client, &name, "a", lock.fencing_token)
        .await
        .unwrap();
    // Spent for one owner, new for the other.
    let lock = grant_in(send(&mut client, ask("b")).await);
    // The row's latest acquisition is now another's: a late duplicate of the
    // first is refused like anybody.
    assert_eq!(refusal_in(send(&mut client, ask("a")).await).owner, "b");
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn live_another_owner_is_an_answer_with_the_holder_and_no_lock() {
    let (mut client, name) = (client().await, fresh("held"));
    let labels = HashMap::from([
        ("host".to_owned(), "büro-7".to_owned()),
        ("note".to_owned(), "two\nlines".to_owned()),
    ]);
    let ask = AcquireRequest {
        labels: labels.clone(),
        ..request(&name, "a", LONG)
    };
    let lock = grant_in(send(&mut client, ask).await);
    let granted = Instant::now();
    assert_eq!(lock.labels, labels);

    let (end, asked) = (granted + LONG, Instant::now());
    let holder = refused(&mut client, &name, "b", SHORT).await;
    assert_eq!(holder.owner, "a");
    assert_eq!(holder.labels, labels);
    assert_eq!(holder.acquired_at, lock.acquired_at);
    let remaining = span(holder.remaining);
    assert!(remaining > LONG / 2 && remaining <= end - asked);
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn a_refusal_never_waits_for_the_row() {
    let (mut client, name) = (client().await, fresh("never-waits"));
    granted(&mut client, &name, "a", LONG).await;
    let held = RowLock::hold(&shared().await.database.url(), &name).await;
    let asked = Instant::now();
    refused(&mut client, &name, "b", LONG).await;
    assert!(asked.elapsed() < Duration::from_millis(500), "it waited");
    assert_eq!(held.waiters().await, 0);
    held.rollback().await;
}

#[tokio::test]
async fn a_shorter_ttl_of_the_challenger_does_not_shorten_the_lease() {
    let (mut client, name) = (client().await, fresh("challenger"));
    granted(&mut client, &name, "a", Duration::from_secs(2)).await;
    outlive(SHORT).await;
    assert_eq!(refused(&mut client, &name, "b", SHORT).await.owner, "a");
}

#[tokio::test]
async fn tokens_of_a_resource_only_rise() {
    let (mut client, name) = (client().await, fresh("rising"));
    let mut latest = 0;
    for round in 0..20 {
        let owner = format!("owner-{}", round % 3);
        let lock = granted(&mut client, &name, &owner, LONG).await;
        assert!(lock.fencing_token > latest);
        latest = lock.fencing_token;
        release(&mut client, &name, &owner, latest).await.unwrap();
    }
}

#[tokio::test]
async fn labels_are_those_of_the_latest_acquisition() {
    let (mut client, name) = (client().await, fresh("labels"));
    let with = |labels: &[(&str, &str)]| AcquireRequest {
        labels: labels
            .iter()
            .map(|&(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
        ..request(&name, "a", LONG)
    };
    let first = grant_in(send(&mut client, with(&[("a", "1"), ("b", "2")])).await);
    assert_eq!(first.labels.len(), 2);
    let second = grant_in(send(&mut client, with(&[("c", "")])).await);
    assert_eq!(
        second.labels,
        HashMap::from([("c".to_owned(), String::new())])
    );
    let third = grant_in(send(&mut client, with(&[])).await);
    assert!(third.labels.is_empty());
}
