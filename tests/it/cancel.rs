//! Calls whose caller goes away: cancelled, out of time, cut off.
//!
//! A grant that nobody was told of is given back at once; one that a retry was
//! told of is never taken back; and no database session is left in the middle
//! of something. What the server had answered before the caller left is the
//! caller's: it costs a replay, or one TTL.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod lost_answers;
mod random;

use std::{
    env,
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::{acquire, get, granted, renew, request_with_id, send},
    eventually,
    postgres::fresh_database,
    row_lock::RowLock,
    server::Client,
};
use rand::{SeedableRng as _, rngs::StdRng};
use tonic::Code;

const LONG: Duration = Duration::from_secs(60);

/// A generator for each worker, from one seed that is printed and can be given
/// again in `FENCEPOST_TEST_SEED`.
fn seed(test: &str) -> u64 {
    let given = env::var("FENCEPOST_TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |seed| seed.parse().unwrap());
    println!("{test}: FENCEPOST_TEST_SEED={seed}");
    seed
}

fn generator(seed: u64, worker: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_add(worker))
}

/// Waits until no session of the server is in a transaction or has been busy
/// for long, and expects at most the sessions of two servers' pools.
async fn assert_sessions_rest(url: &str, most: i64) {
    let admin = fencepost_support::postgres::Client::connect(url)
        .await
        .unwrap();
    let ours = "FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'fencepostd'";
    eventually("no session is in the middle of something", async || {
        let busy = format!("SELECT count(*) {ours} AND state <> 'idle'");
        (admin.value::<i64>(&busy).await == 0).then_some(())
    })
    .await;
    // Each server has one more for its health check, and one for renewals by calls.
    let sessions: i64 = admin.value(&format!("SELECT count(*) {ours}")).await;
    assert!(sessions <= most + 4, "{sessions} sessions");
}

/// Expects another owner to get the lock long before its time is over: in about a
/// second, on a machine that is not busy.
async fn assert_free_soon(client: &mut Client, name: &str) {
    let start = Instant::now();
    loop {
        if acquire(client, name, "another", LONG)
            .await
            .unwrap()
            .acquired
        {
            return;
        }
        assert!(start.elapsed() < LONG / 4, "{name} is held by nobody");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_comes_after_its_caller_left_is_given_back() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "3")
        .start()
        .await;
    server.wait_ready().await;
    let other = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let mut second = other.client().await;

    // A row that is free, and locked by somebody.
    granted(&mut second, "a", "before", LONG).await;
    let token = get(&mut second, "a").await.unwrap().fencing_token;
    fencepost_support::calls::release(&mut second, "a", "before", token)
        .await
        .unwrap();
    let row = RowLock::hold(&database.url(), "a").await;

    // Two wait for the row, more than which one name does not get, and the
    // others for their turn; all of them leave.
    let calls: Vec<_> = (0..12)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let request = request_with_id("a", &format!("gone-{n}"), LONG, &format!("id-{n}"));
                send(&mut client, request).await
            })
        })
        .collect();
    row.wait_for_waiters(2).await;
    for call in calls {
        call.abort();
        let _ = call.await;
    }
    row.rollback().await;

    assert_free_soon(&mut second, "a").await;
    // It stays with whom it was given to.
    assert_sessions_rest(&database.url(), 3 + 16).await;
    let held = get(&mut client, "a").await.unwrap();
    assert_eq!(held.owner, "another");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_ran_out_of_time_leaves_nothing_either() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let other = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let mut second = other.client().await;
    let token = granted(&mut second, "a", "before", LONG)
        .await
        .fencing_token;
    fencepost_support::calls::release(&mut second, "a", "before", token)
        .await
        .unwrap();
    let row = RowLock::hold(&database.url(), "a").await;

    let request = request_with_id("a", "late", LONG, "id");
    let mut timed = tonic::Request::new(request.clone());
    // Written by hand, so that no timer of the client's own answers first.
    timed
        .metadata_mut()
        .insert("grpc-timeout", "300m".parse().unwrap());
    let status = client.acquire(timed).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status:?}"
    );
    row.rollback().await;
    assert_sessions_rest(&database.url(), 32).await;
    eventually("the lock is free", async || {
        get(&mut second, "a").await.err()
    })
    .await;

    // Nobody was told of it, so its request id is good for another try.
    let again = send(&mut second, request).await.unwrap();
    assert!(again.acquired, "{again:?}");
    let token = again.lock.unwrap().fencing_token;
    renew(&mut client, "a", "late", token, None).await.unwrap();
}
