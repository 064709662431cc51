//! Calls whose callers leave before they are answered.

use fencepost_proto::v1::GetRequest;
use fencepost_support::{
    calls::{acquire, granted, release},
    frames::{
        END_HEADERS, END_STREAM, Peer, call, frame,
        kind::{DATA, HEADERS, RST_STREAM},
        message,
    },
    row_lock::RowLock,
};

use super::{scrape::Scrape, wait_for};
use crate::world::{LONG, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_counts_as_cancelled() {
    let World { server, database } = &World::start().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "before", LONG).await;
    release(&mut client, "a", "before", lock.fencing_token)
        .await
        .unwrap();
    let row = RowLock::hold(&database.url(), "a").await;
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { acquire(&mut client, "a", "gone", LONG).await }
    });
    row.wait_for_waiters(1).await;
    let waiting = Scrape::of(server).await;
    assert_eq!(waiting.value("fencepost_calls_in_flight", &[]), 1.0);
    let in_use = &[("pool", "calls"), ("state", "in_use")];
    assert!(waiting.value("fencepost_pool_connections", in_use) >= 1.0);
    call.abort();
    let cancelled = &[("method", "Acquire"), ("code", "CANCELLED")];
    let after = wait_for(server, "fencepost_rpcs_total", cancelled, 1.0).await;
    // Its duration would be that of its caller's patience.
    let acquires = &[("method", "Acquire")];
    assert_eq!(
        after.value("fencepost_rpc_duration_seconds_count", acquires),
        1.0
    );
    assert_eq!(after.value("fencepost_acquires_total", &[]), 1.0);
    row.rollback().await;
    wait_for(server, "fencepost_calls_in_flight", &[], 0.0).await;
    wait_for(server, "fencepost_orphans", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_leaves_within_its_request_has_cancelled() {
    const CANCEL: u32 = 8;
    const INTERNAL_ERROR: u32 = 2;
    let World { server, .. } = &World::start().await;
    let head = |flags, stream| frame(HEADERS, END_HEADERS | flags, stream, &call("Get"));
    let reset = |stream, code: u32| frame(RST_STREAM, 0, stream, &code.to_be_bytes());
    let whole = message(&GetRequest {
        resource: "a".into(),
    });
    let mut peer = Peer::greet(server.grpc(), &[]).await.unwrap();
    let leaving = [
        head(0, 1),
        reset(1, CANCEL),
        head(0, 3),
        frame(DATA, 0, 3, &whole[..3]),
        reset(3, CANCEL),
        head(0, 5),
        frame(DATA, 0, 5, &whole),
        reset(5, INTERNAL_ERROR),
        // Who sends nothing, and says so, has made a mistake.
        head(END_STREAM, 7),
        head(0, 9),
    ];
    peer.send(&leaving.concat()).await.unwrap();
    let wrong = &[("method", "Get"), ("code", "INVALID_ARGUMENT")];
    wait_for(server, "fencepost_rpcs_total", wrong, 1.0).await;
    drop(peer);
    let gets = &[("method", "Get")];
    let after = wait_for(server, "fencepost_rpcs_total", gets, 5.0).await;
    let cancelled = &[("method", "Get"), ("code", "CANCELLED")];
    assert_eq!(after.value("fencepost_rpcs_total", cancelled), 4.0);
    assert_eq!(
        after.value("fencepost_rpc_duration_seconds_count", gets),
        1.0
    );
}
