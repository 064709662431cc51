//! What becomes of calls that wait for the next round: a crowd on one name, who
//! asks again, whose order counts, and who has left.

use std::time::Duration;

use fencepost_proto::v1::AcquireRequest;
use fencepost_support::calls::{
    acquire, expect_error, get, grant_in, granted, refusal_in, release, request, send,
};
use tonic::{Code, Request};

use super::stage::{LONG, Stage};

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_is_answered_by_few_statements_and_writes_one_row_once() {
    let stage = Stage::start().await;
    let crowd = |prefix: &'static str| {
        (0..100).map(move |n| {
            (
                format!("{prefix} {n}"),
                with_a_label(format!("{prefix} {n}")),
            )
        })
    };
    let ask = |(_, request): (String, AcquireRequest)| {
        let mut client = stage.client.clone();
        async move { send(&mut client, request).await }
    };
    let held = stage.hold_round("!").await;
    let sent = stage.send(crowd("first").map(ask)).await;
    let before = stage.statements().await;
    stage.open("!").await;
    held.await.unwrap();
    let (grants, refusals): (Vec<_>, Vec<_>) = sent
        .answers()
        .await
        .into_iter()
        .map(Result::unwrap)
        .partition(|answer| answer.acquired);
    let lock = grant_in(Ok(grants.into_iter().next().unwrap()));
    assert_eq!(refusals.len(), 99);
    for refused in refusals {
        let holder = refusal_in(Ok(refused));
        assert_eq!(holder.owner, lock.owner);
        assert_eq!(holder.acquired_at, lock.acquired_at);
        assert_eq!(holder.labels, lock.labels);
    }
    let statements = stage.statements().await - before;
    assert!(statements <= 10, "{statements} statements");

    // Refused one and all, the holder in their midst.
    let version = "SELECT concat_ws(' ', ctid, xmin, xmax) FROM fencepost.locks
                    WHERE resource = 'hot'";
    let row: String = stage.psql.value(version).await;
    let held = stage.hold_round("!").await;
    let sent = stage.send(crowd("second").map(ask)).await;
    let before = stage.statements().await;
    stage.open("!").await;
    held.await.unwrap();
    for answer in sent.answers().await {
        assert_eq!(refusal_in(answer).owner, lock.owner);
    }
    let statements = stage.statements().await - before;
    assert!(statements <= 10, "{statements} statements");
    assert_eq!(stage.psql.value::<String>(version).await, row);
}

fn with_a_label(owner: String) -> AcquireRequest {
    AcquireRequest {
        labels: [("who".to_owned(), owner.clone())].into(),
        ..request("hot", &owner, LONG)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_again_is_never_answered_from_the_result_of_another() {
    let stage = Stage::start().await;
    let ask = |(owner, id): (&'static str, &'static str)| {
        let mut client = stage.client.clone();
        let request = AcquireRequest {
            request_id: id.to_owned(),
            ..request("hot", owner, LONG)
        };
        async move { send(&mut client, request).await }
    };
    let mut client = stage.client.clone();
    let first = AcquireRequest {
        request_id: "one".to_owned(),
        ..request("hot", "a", LONG)
    };
    let first = grant_in(send(&mut client, first).await);
    let held = stage.hold_round("!").await;
    // The holder's retry behind another's call, and then its new acquisition,
    // behind one more.
    let other = stage.send([ask(("b", ""))]).await;
    let replay = stage.send([ask(("a", "one"))]).await;
    let third = stage.send([ask(("c", ""))]).await;
    let anew = stage.send([ask(("a", "two"))]).await;
    stage.open("!").await;
    held.await.unwrap();
    assert_eq!(refusal_in(other.answers().await.remove(0)).owner, "a");
    assert_eq!(refusal_in(third.answers().await.remove(0)).owner, "a");
    let anew = grant_in(anew.answers().await.remove(0));
    assert!(anew.fencing_token > first.fencing_token);
    match replay.answers().await.remove(0) {
        // After the new one, its id is forgotten, and it is one of its own.
        Ok(answer) => {
            let lock = grant_in(Ok(answer));
            assert!(lock.fencing_token >= first.fencing_token);
            assert_ne!(lock.fencing_token, anew.fencing_token);
        }
        Err(status) => panic!("{status:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_one_name_keep_their_order() {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    let lock = granted(&mut client, "name", "a", LONG).await;
    let ask = |owner: &'static str| {
        let mut client = stage.client.clone();
        async move { acquire(&mut client, "name", owner, LONG).await }
    };
    let give = |token| {
        let mut client = stage.client.clone();
        async move { release(&mut client, "name", "a", token).await }
    };
    let held = stage.hold_round("!").await;
    let early = stage.send([ask("early")]).await;
    let anew = stage.send([ask("a")]).await;
    stage.open("!").await;
    held.await.unwrap();
    assert_eq!(refusal_in(early.answers().await.remove(0)).owner, "a");
    let newer = grant_in(anew.answers().await.remove(0));

    let held = stage.hold_round("!").await;
    let old = stage.send([give(lock.fencing_token)]).await;
    let released = stage.send([give(newer.fencing_token)]).await;
    let again = stage.send([give(newer.fencing_token)]).await;
    let late = stage.send([ask("late")]).await;
    stage.open("!").await;
    held.await.unwrap();
    let old = old.answers().await.remove(0);
    expect_error(old, Code::Aborted, "TOKEN_SUPERSEDED");
    released.answers().await.remove(0).unwrap();
    let again = again.answers().await.remove(0);
    expect_error(again, Code::NotFound, "LOCK_NOT_FOUND");
    assert_eq!(grant_in(late.answers().await.remove(0)).owner, "late");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_waits_for_any_more_is_not_begun_but_for_a_release() {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    let lock = granted(&mut client, "left", "owner", LONG).await;
    let held = stage.hold_round("!").await;

    let mut late = Request::new(request("late", "owner", LONG));
    late.set_timeout(Duration::from_millis(50));
    let mut cancelled = client.clone();
    let cancelled =
        tokio::spawn(async move { acquire(&mut cancelled, "cancelled", "owner", LONG).await });
    let mut releasing = client.clone();
    let releasing =
        tokio::spawn(
            async move { release(&mut releasing, "left", "owner", lock.fencing_token).await },
        );
    // By the server, or by our own transport, which says so in other words.
    let answer = client.acquire(late).await.unwrap_err();
    assert!(
        matches!(answer.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{answer:?}"
    );
    stage.settle().await;
    cancelled.abort();
    releasing.abort();
    assert!(cancelled.await.unwrap_err().is_cancelled());
    assert!(releasing.await.unwrap_err().is_cancelled());
    stage.settle().await;

    stage.open("!").await;
    held.await.unwrap();
    // In the same round as they would be, or in a later one.
    granted(&mut client, "after", "owner", LONG).await;
    assert!(!stage.is_there("late").await);
    assert!(!stage.is_there("cancelled").await);
    let read = get(&mut client, "left").await;
    expect_error(read, Code::NotFound, "LOCK_NOT_FOUND");
}
