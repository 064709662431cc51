//! What is sent, and how often.

use std::{collections::HashSet, time::Instant};

use crate::{
    fencepost, finish, run,
    stub::{Call, Stub},
};

fn acquires(stub: &Stub) -> Vec<fencepost_proto::v1::AcquireRequest> {
    let calls = stub.calls().into_iter();
    calls
        .filter_map(|call| match call {
            Call::Acquire(request) => Some(request),
            Call::Renew(_) | Call::Release(_) | Call::Get(_) => None,
        })
        .collect()
}

#[tokio::test]
async fn an_acquire_carries_what_was_given() {
    let (stub, server) = Stub::start().await;
    run(
        server,
        "acquire r --owner me --ttl 1500ms --label a=b=c --label d= --request-id id-1",
    )
    .await;
    let request = &acquires(&stub)[0];
    assert_eq!(
        (request.resource.as_str(), request.owner.as_str()),
        ("r", "me")
    );
    let ttl = request.ttl.unwrap();
    assert_eq!((ttl.seconds, ttl.nanos), (1, 500_000_000));
    assert_eq!(request.labels["a"], "b=c");
    assert_eq!(request.labels["d"], "");
    assert_eq!(request.request_id, "id-1");
}

#[tokio::test]
async fn every_acquire_is_an_acquisition_and_a_holder_of_its_own() {
    let (stub, server) = Stub::start().await;
    run(server, "acquire r").await;
    run(server, "acquire r").await;
    let requests = acquires(&stub);
    let ids: HashSet<_> = requests.iter().map(|r| &r.request_id).collect();
    let owners: HashSet<_> = requests.iter().map(|r| &r.owner).collect();
    assert_eq!((ids.len(), owners.len()), (2, 2), "{requests:?}");
    assert!(requests.iter().all(|r| r.request_id.len() == 36));
}

#[tokio::test]
async fn a_repeated_acquire_is_the_same_call() {
    let (stub, server) = Stub::start().await;
    assert_eq!(run(server, "acquire draining-once").await.code, 0);
    let requests = acquires(&stub);
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0], requests[1]);
}

#[tokio::test]
async fn what_is_final_is_not_repeated() {
    let (stub, server) = Stub::start().await;
    for (count, resource) in (1..).zip(["expired", "invalid", "bug", "no-such-service", "spent"]) {
        run(server, &format!("renew {resource} --owner me --token 7")).await;
        assert_eq!(stub.calls().len(), count, "{resource}");
    }
}

#[tokio::test]
async fn a_release_that_finds_nothing_after_a_lost_answer_is_done() {
    let (stub, server) = Stub::start().await;
    let run = run(server, "release gone-after-retry --owner me --token 7").await;
    assert_eq!((run.code, stub.calls().len()), (0, 2), "{run:?}");
}

#[tokio::test]
async fn the_next_server_is_tried() {
    let (stub, server) = Stub::start().await;
    let endpoints = format!("http://127.0.0.1:1,http://{server}");
    let run = finish(fencepost(&format!("get r --endpoint {endpoints}"))).await;
    assert_eq!((run.code, stub.calls().len()), (0, 1), "{run:?}");
}

#[tokio::test]
async fn a_server_that_hangs_leaves_time_for_the_next() {
    // Takes connections and says nothing, as a frozen process does.
    let frozen = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let frozen_address = frozen.local_addr().unwrap();
    let (_, server) = Stub::start().await;
    let endpoints = format!("http://{frozen_address},http://{server}");
    let run = finish(fencepost(&format!(
        "get r --timeout 1s --endpoint {endpoints}"
    )))
    .await;
    assert_eq!(run.code, 0, "{run:?}");
}

#[tokio::test]
async fn one_that_is_away_may_come_back_beside_one_that_is_no_fencepost() {
    let (_, server) = Stub::start().await;
    let endpoints = format!("http://127.0.0.1:1,http://{server}");
    let start = Instant::now();
    let get = format!("get no-such-service --timeout 400ms --endpoint {endpoints}");
    finish(fencepost(&get)).await;
    assert!(start.elapsed().as_millis() >= 100, "{:?}", start.elapsed());
    // With nobody else there is nothing to wait for.
    let run = run(server, "get no-such-service --timeout 60s").await;
    assert_eq!(run.code, 78, "{run:?}");
}

#[tokio::test]
async fn a_release_that_never_left_is_not_done() {
    let (_, server) = Stub::start().await;
    let endpoints = format!("http://127.0.0.1:1,http://{server}");
    let release = "release not-found --owner me --token 7 --endpoint";
    let run = finish(fencepost(&format!("{release} {endpoints}"))).await;
    assert_eq!(run.code, 76, "{run:?}");
}

#[tokio::test]
async fn the_time_given_is_kept() {
    let (_, server) = Stub::start().await;
    for resource in ["hangs", "down"] {
        let start = Instant::now();
        let run = run(server, &format!("get {resource} --timeout 400ms")).await;
        assert_eq!(run.code, 69);
        let taken = start.elapsed().as_millis();
        assert!(taken < 2000, "{resource}: {taken} ms");
    }
    let run = run(server, "get r --timeout 0s").await;
    assert_eq!(run.code, 69);
}

#[tokio::test]
async fn the_environment_stands_in() {
    let (stub, server) = Stub::start().await;
    let mut command = fencepost("renew r");
    command
        .env("FENCEPOST_ENDPOINT", format!("http://{server}"))
        .env("FENCEPOST_OWNER", "me")
        .env("FENCEPOST_TOKEN", "42");
    assert_eq!(finish(command).await.code, 0);
    let calls = stub.calls();
    let [Call::Renew(request)] = calls.as_slice() else {
        panic!("{calls:?}");
    };
    assert_eq!((request.owner.as_str(), request.fencing_token), ("me", 42));
    assert_eq!(request.ttl, None, "the lease's own");
}
