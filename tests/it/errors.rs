//! The contract's second table, row by row, on a healthy database. Rows that
//! need a broken one are in `outages`.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{
        acquire, assert_no_secrets, expect_error, expect_resource, expect_retryable,
        expect_violation, get, grant_in, granted, reason, refused, renew, request, request_with_id,
        send,
    },
    eventually,
    postgres::fresh_database,
    proxy::{Flow, Proxy},
    raw::{Body, unary},
    row_lock::RowLock,
    server::{Client, channel_at},
    wire::Wire,
};
use tonic::Code;

use crate::world::{LONG, World, client, fresh, shared};

#[tokio::test]
async fn a_bad_field_is_invalid_request_with_the_field_named() {
    let mut client = client().await;
    let answer = acquire(&mut client, "", "a", LONG).await;
    let status = expect_violation(answer, "resource");
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_unknown_method_is_unimplemented() {
    let channel = shared().await.server.channel().await;
    let answer = unary::<()>(&channel, "Steal", Body::new()).await;
    assert_eq!(answer.unwrap_err().code(), Code::Unimplemented);
    granted(&mut Client::new(channel), &fresh("after"), "a", LONG).await;
}

/// The caller's deadline, as the server keeps it: a call that must wait for a
/// row ends when its time is over, not when the row is free.
#[tokio::test]
async fn a_callers_deadline_is_deadline_exceeded() {
    let (mut client, name) = (client().await, fresh("deadline"));
    granted(&mut client, &name, "a", LONG).await;
    let world = shared().await;
    let held = RowLock::hold(&world.database.url(), &name).await;
    let mut wire = Wire::connect(world.server.grpc()).await;
    let ask = request(&name, "a", LONG);
    let asked = Instant::now();
    let answer = wire
        .call("Acquire", &[("grpc-timeout", "300m")], &ask)
        .await;
    let took = asked.elapsed();
    let status = expect_error(answer, Code::DeadlineExceeded, "DEADLINE");
    expect_retryable(&status);
    expect_resource(&status, &name);
    let promised = Duration::from_millis(250)..Duration::from_secs(1);
    assert!(promised.contains(&took), "after {took:?}");
    held.rollback().await;
}

/// "May have happened": the same call may be repeated, and the caller ends up
/// with one lease, not shut out by its own orphan.
#[tokio::test]
async fn after_a_deadline_the_same_call_may_be_repeated() {
    let (mut client, name) = (client().await, fresh("deadline-again"));
    granted(&mut client, &name, "a", LONG).await;
    let world = shared().await;
    let held = RowLock::hold(&world.database.url(), &name).await;
    let mut wire = Wire::connect(world.server.grpc()).await;
    let ask = request_with_id(&name, "a", LONG, "id");
    let answer = wire
        .call("Acquire", &[("grpc-timeout", "100m")], &ask)
        .await;
    expect_error(answer, Code::DeadlineExceeded, "DEADLINE");
    held.rollback().await;
    let lock = grant_in(send(&mut client, ask).await);
    let token = lock.fencing_token;
    renew(&mut client, &name, "a", token, None).await.unwrap();
    assert_eq!(get(&mut client, &name).await.unwrap().fencing_token, token);
}

/// A grant whose caller has gone is given back.
#[tokio::test]
async fn a_grant_whose_deadline_had_passed_leaves_the_lock_free() {
    let (mut client, name) = (client().await, fresh("orphan"));
    let token = granted(&mut client, &name, "a", LONG).await.fencing_token;
    let world = shared().await;
    let held = RowLock::hold(&world.database.url(), &name).await;
    let mut wire = Wire::connect(world.server.grpc()).await;
    let ask = request(&name, "a", LONG);
    let answer = wire
        .call("Acquire", &[("grpc-timeout", "100m")], &ask)
        .await;
    expect_error(answer, Code::DeadlineExceeded, "DEADLINE");
    held.rollback().await;
    // Granted late and given back, or not executed at all: nobody is shut out
    // for longer than the earlier lease, which its holder knows.
    eventually("the orphan is given back", async || {
        match get(&mut client, &name).await {
            Ok(lock) => (lock.fencing_token == token).then_some(()),
            Err(status) => (status.code() == Code::NotFound).then_some(()),
        }
    })
    .await;
}

#[tokio::test]
async fn a_deadline_that_has_passed_already_is_deadline_exceeded() {
    let mut wire = Wire::connect(shared().await.server.grpc()).await;
    for timeout in ["0S", "1n", "1u"] {
        let ask = request(&fresh("no-time"), "a", LONG);
        let answer = wire
            .call("Acquire", &[("grpc-timeout", timeout)], &ask)
            .await;
        expect_error(answer, Code::DeadlineExceeded, "DEADLINE");
    }
}

#[tokio::test]
async fn lock_wait_over_is_store_unavailable() {
    let (mut client, name) = (client().await, fresh("lock-wait"));
    let token = granted(&mut client, &name, "a", LONG).await.fencing_token;
    let held = RowLock::hold(&shared().await.database.url(), &name).await;
    let asked = Instant::now();
    let answer = renew(&mut client, &name, "a", token, None).await;
    let status = expect_error(answer, Code::Unavailable, "STORE_UNAVAILABLE");
    assert!(asked.elapsed() < Duration::from_secs(6));
    expect_retryable(&status);
    expect_resource(&status, &name);
    held.rollback().await;
    renew(&mut client, &name, "a", token, None).await.unwrap();
}

#[tokio::test]
async fn too_much_in_flight_is_overloaded() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--max-in-flight", "1")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let token = granted(&mut client, "busy", "a", LONG).await.fencing_token;
    let held = RowLock::hold(&database.url(), "busy").await;
    let mut other = client.clone();
    let waiting = tokio::spawn(async move { renew(&mut other, "busy", "a", token, None).await });
    held.wait_for_waiters(1).await;
    let answer = renew(&mut client, "busy", "a", token, None).await;
    let status = expect_error(answer, Code::ResourceExhausted, "OVERLOADED");
    expect_retryable(&status);
    held.rollback().await;
    waiting.await.unwrap().unwrap();
    renew(&mut client, "busy", "a", token, None).await.unwrap();
}

/// Two connections, both waiting for a row that somebody else holds.
#[tokio::test]
async fn pool_unavailable_ends_in_time_and_recovers() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "2")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let token = granted(&mut client, "busy", "a", LONG).await.fencing_token;
    let held = RowLock::hold(&database.url(), "busy").await;
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { renew(&mut client, "busy", "a", token, None).await })
        })
        .collect();
    // One name has at most half of the connections.
    held.wait_for_waiters(1).await;
    let asked = Instant::now();
    match acquire(&mut client, "another", "a", LONG).await {
        // A connection of its own, or one that became free: better still.
        Ok(answer) => assert!(answer.acquired),
        answer => expect_transient(answer),
    }
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(6), "after {took:?}");
    held.rollback().await;
    for answer in waiting {
        if let answer @ Err(_) = answer.await.unwrap() {
            expect_transient(answer);
        }
    }
    renew(&mut client, "busy", "a", token, None).await.unwrap();
    granted(&mut client, "another", "a", LONG).await;
}

/// An error that says: may have happened, repeat the same call.
#[track_caller]
pub(crate) fn expect_transient<T: std::fmt::Debug>(answer: Result<T, tonic::Status>) {
    let status = answer.expect_err("an outage");
    let (code, reason) = match status.code() {
        Code::DeadlineExceeded => (Code::DeadlineExceeded, "DEADLINE"),
        Code::ResourceExhausted => (Code::ResourceExhausted, "OVERLOADED"),
        _ => (Code::Unavailable, "STORE_UNAVAILABLE"),
    };
    let status = expect_error::<()>(Err(status), code, reason);
    expect_retryable(&status);
}

/// The table is gone, which nobody planned for. The caller hears nothing of
/// SQL, whichever row of the table this is; the log has the cause.
#[tokio::test]
async fn a_broken_schema_is_told_to_the_log_and_not_to_the_caller() {
    let world = World::start().await;
    let mut client = world.server.client().await;
    let token = granted(&mut client, "a", "a", LONG).await.fencing_token;
    let admin = world.database.client().await;
    admin
        .run("ALTER TABLE fencepost.locks RENAME TO mislaid")
        .await;
    let status = renew(&mut client, "a", "a", token, None).await.unwrap_err();
    let expected = match status.code() {
        Code::Internal => "INTERNAL",
        _ => "STORE_UNAVAILABLE",
    };
    assert_eq!(reason(&status).as_deref(), Some(expected));
    expect_resource(&status, "a");
    assert_no_secrets(&status);
    world
        .server
        .wait_for_log("the cause", |line| {
            let level = line["level"].as_str().unwrap_or_default();
            ["ERROR", "WARN"].contains(&level) && line.to_string().contains("locks")
        })
        .await;
    admin
        .run("ALTER TABLE fencepost.mislaid RENAME TO locks")
        .await;
    eventually("the lease can be renewed again", async || {
        renew(&mut client, "a", "a", token, None).await.ok()
    })
    .await;
}

/// The connection breaks while the answer is on its way. Whatever became of
/// the first try, its repetition is granted at once, and there is one lease.
#[tokio::test]
async fn a_lost_answer_is_repeated_with_the_same_request_id() {
    let server = &shared().await.server;
    let mut direct = server.client().await;
    let proxy = Proxy::start(server.grpc()).await;
    for round in 0..20 {
        let name = fresh("lost-answer");
        let mut client = Client::new(channel_at(proxy.address()).await);
        granted(&mut client, &fresh("warm"), "a", LONG).await;
        // Some frames of the answer pass, or none.
        proxy.set_down(Flow::ResetAfter(round * 4));
        let ask = request_with_id(&name, "a", LONG, "id");
        let first = send(&mut client, ask.clone()).await;
        proxy.forward().await;
        let lock = match first {
            Ok(answer) => answer.lock.unwrap(),
            Err(_) => grant_in(send(&mut direct, ask).await),
        };
        let token = lock.fencing_token;
        assert_eq!(refused(&mut direct, &name, "b", LONG).await.owner, "a");
        renew(&mut direct, &name, "a", token, None).await.unwrap();
        proxy.reset().await;
    }
}
