//! Calls on a row that another session keeps locked for longer than the TTL.
//!
//! Whatever the other session does in the end, the answer is an error in time
//! or true at the moment it arrives. Every answer gets a second look through
//! another replica, and what it says of the time left is tried out by an owner
//! who wants the lock.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod stage;

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{
        acquire, expect_retryable, get, grant_in, granted, reason, release, renew, request_with_id,
        span,
    },
    eventually,
    postgres::fresh_database,
    row_lock::RowLock,
};
use tonic::{Code, Response};

use self::stage::Pair;

/// The TTL of the lease that is there before, where it runs out meanwhile.
const SHORT: Duration = Duration::from_millis(1000);
const LONG: Duration = Duration::from_secs(60);
/// Longer than `SHORT`, and shorter than the server waits for a row.
const HOLD: Duration = Duration::from_millis(1500);

/// What is there before the other session comes.
#[derive(Clone, Copy, Debug)]
enum Before {
    Nothing,
    Released,
    Expired,
    Live(Duration),
}

#[derive(Clone, Copy, Debug)]
enum Call {
    /// By an owner who holds nothing.
    Acquire(Duration),
    Renew(Option<Duration>),
    Release,
}

/// What the answer must be, unless it is an error in time.
#[derive(Clone, Copy, Debug)]
enum Truth {
    Granted,
    Held,
    Renewed,
    Released,
    Refused(Code, &'static str),
}

/// One session, one call: (before, what psql does, how it ends, call, truth).
type Case = (Before, &'static str, &'static str, Call, Truth);

const FOR_UPDATE: &str = "SELECT 1 FROM fencepost.locks WHERE resource = '$R' FOR UPDATE";
const FOR_SHARE: &str = "SELECT 1 FROM fencepost.locks WHERE resource = '$R' FOR SHARE";
/// Makes an ended lease, or one that ends, live for a minute.
const REVIVE: &str = "UPDATE fencepost.locks SET released = false,
    expires_at = clock_timestamp() + interval '60 s' WHERE resource = '$R'";
/// Ends a live lease.
const EXPIRE: &str = "UPDATE fencepost.locks
    SET expires_at = clock_timestamp() - interval '1 ms' WHERE resource = '$R'";
const RELEASE: &str = "UPDATE fencepost.locks SET released = true,
    expires_at = clock_timestamp() WHERE resource = '$R'";
/// Hands the lock to somebody else, as a grant would.
const TAKE: &str = "UPDATE fencepost.locks SET owner = 'psql', released = false,
    prev_token = fencing_token, fencing_token = nextval('fencepost.fencing_tokens'),
    expires_at = clock_timestamp() + interval '60 s' WHERE resource = '$R'";
/// A first lease of the name.
const INSERT: &str = "INSERT INTO fencepost.locks VALUES ('$R', 'psql', false,
    nextval('fencepost.fencing_tokens'), 0, 60000, clock_timestamp(),
    clock_timestamp() + interval '60 s', false, '', gen_random_uuid(), 1, '{}')";
/// A first lease that is over before the transaction is.
const INSERT_SHORT: &str = "INSERT INTO fencepost.locks VALUES ('$R', 'psql', false,
    nextval('fencepost.fencing_tokens'), 0, 1000, clock_timestamp(),
    clock_timestamp() + interval '1 s', false, '', gen_random_uuid(), 1, '{}')";
const COMMIT: &str = "COMMIT";
const ROLLBACK: &str = "ROLLBACK";

const EXPIRED: Truth = Truth::Refused(Code::Aborted, "LOCK_EXPIRED");
const TAKEN: Truth = Truth::Refused(Code::Aborted, "NOT_OWNER");
const NOT_FOUND: Truth = Truth::Refused(Code::NotFound, "LOCK_NOT_FOUND");
const NOT_YOURS: Truth = Truth::Refused(Code::PermissionDenied, "NOT_OWNER");

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_waits_and_answers_what_is_true_then() {
    let take = Call::Acquire(SHORT);
    Pair::start()
        .await
        .run(&[
            (Before::Released, FOR_UPDATE, COMMIT, take, Truth::Granted),
            (Before::Released, FOR_SHARE, COMMIT, take, Truth::Granted),
            (Before::Released, REVIVE, ROLLBACK, take, Truth::Granted),
            (Before::Released, REVIVE, COMMIT, take, Truth::Held),
            (Before::Released, TAKE, COMMIT, take, Truth::Held),
            (Before::Expired, FOR_UPDATE, ROLLBACK, take, Truth::Granted),
            (Before::Expired, FOR_SHARE, COMMIT, take, Truth::Granted),
            (Before::Expired, TAKE, ROLLBACK, take, Truth::Granted),
            (Before::Expired, TAKE, COMMIT, take, Truth::Held),
            (Before::Expired, REVIVE, COMMIT, take, Truth::Held),
            (Before::Nothing, INSERT, COMMIT, take, Truth::Held),
            (Before::Nothing, INSERT, ROLLBACK, take, Truth::Granted),
            (Before::Nothing, INSERT_SHORT, COMMIT, take, Truth::Granted),
            // A longer one must not have lost the wait out of what it promises.
            (
                Before::Nothing,
                INSERT,
                ROLLBACK,
                Call::Acquire(HOLD * 2),
                Truth::Granted,
            ),
            (
                Before::Released,
                FOR_UPDATE,
                COMMIT,
                Call::Acquire(HOLD * 2),
                Truth::Granted,
            ),
        ])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_waits_and_never_revives() {
    let short = Before::Live(SHORT);
    let long = Before::Live(LONG);
    let renew = Call::Renew(Some(LONG));
    let same = Call::Renew(None);
    Pair::start()
        .await
        .run(&[
            // It has expired while the row was locked.
            (short, FOR_UPDATE, COMMIT, renew, EXPIRED),
            (short, FOR_UPDATE, ROLLBACK, same, EXPIRED),
            (short, FOR_SHARE, COMMIT, renew, EXPIRED),
            (short, REVIVE, ROLLBACK, renew, EXPIRED),
            // Its newest version is live.
            (short, REVIVE, COMMIT, renew, Truth::Renewed),
            (long, EXPIRE, ROLLBACK, renew, Truth::Renewed),
            (long, RELEASE, ROLLBACK, same, Truth::Renewed),
            (long, FOR_UPDATE, COMMIT, renew, Truth::Renewed),
            // Its newest version is not, or is somebody else's.
            (long, EXPIRE, COMMIT, renew, EXPIRED),
            (long, RELEASE, COMMIT, renew, NOT_FOUND),
            (long, TAKE, COMMIT, renew, TAKEN),
            // A renewal for less time than it waits.
            (
                Before::Live(HOLD * 2),
                FOR_UPDATE,
                COMMIT,
                Call::Renew(Some(HOLD * 2)),
                Truth::Renewed,
            ),
        ])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_waits_and_answers_what_is_true_then() {
    let short = Before::Live(SHORT);
    let long = Before::Live(LONG);
    Pair::start()
        .await
        .run(&[
            (short, FOR_UPDATE, COMMIT, Call::Release, NOT_FOUND),
            (short, FOR_SHARE, ROLLBACK, Call::Release, NOT_FOUND),
            (short, REVIVE, COMMIT, Call::Release, Truth::Released),
            (short, REVIVE, ROLLBACK, Call::Release, NOT_FOUND),
            (long, EXPIRE, ROLLBACK, Call::Release, Truth::Released),
            (long, RELEASE, COMMIT, Call::Release, NOT_FOUND),
            (long, TAKE, COMMIT, Call::Release, NOT_YOURS),
            (long, TAKE, ROLLBACK, Call::Release, Truth::Released),
            (long, FOR_SHARE, COMMIT, Call::Release, Truth::Released),
        ])
        .await;
}

/// A retry that waited for longer than what is then left: the lease lives, and its
/// request is not spent.
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_waited_long_is_the_same_lease() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let ask = || request_with_id("retried", "holder", Duration::from_millis(2500), "one");
    let first = grant_in(client.acquire(ask()).await.map(Response::into_inner));
    let row = RowLock::hold(&database.url(), "retried").await;
    let mut again = client.clone();
    let retry = tokio::spawn(async move { again.acquire(ask()).await });
    row.wait_for_waiters(1).await;
    eventually("less is left than was waited for", async || {
        let lock = get(&mut client, "retried").await.unwrap();
        (span(lock.remaining) < Duration::from_millis(1000)).then_some(())
    })
    .await;
    row.rollback().await;
    let same = grant_in(retry.await.unwrap().map(Response::into_inner));
    assert_eq!(same.fencing_token, first.fencing_token);
    assert_eq!(same.expires_at, first.expires_at);
    assert!(span(same.remaining) > Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_locked_beyond_the_budget_is_an_error_in_time() {
    let database = fresh_database().await;
    let budget = Duration::from_secs(2);
    let server = Server::builder(&database.url())
        .flag("--request-timeout", "2s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "long", "holder", LONG).await;
    let (name, token) = ("long", lock.fencing_token);
    let row = RowLock::hold(&database.url(), name).await;

    let sent = Instant::now();
    let (mut a, mut b, mut c) = (client.clone(), client.clone(), client.clone());
    let (renewed, released, taken, read) = tokio::join!(
        renew(&mut a, name, "holder", token, None),
        release(&mut b, name, "holder", token),
        // The holder itself, anew; another owner is refused without a wait.
        acquire(&mut c, name, "holder", LONG),
        get(&mut client, name),
    );
    assert!(sent.elapsed() < budget + Duration::from_secs(1));
    assert_eq!(read.unwrap().fencing_token, token, "readers do not wait");
    for status in [renewed.err(), released.err(), taken.err()] {
        let status = status.expect("nobody could have locked the row");
        expect_retryable(&status);
        match status.code() {
            Code::Unavailable => assert_eq!(reason(&status).unwrap(), "STORE_UNAVAILABLE"),
            code => assert_eq!(
                (code, reason(&status).as_deref()),
                (Code::DeadlineExceeded, Some("DEADLINE"))
            ),
        }
    }
    // What was given up on may yet happen, so each is asked again; and the
    // three are answered by the row as it is when they are.
    row.rollback().await;
    let admin = database.client().await;
    eventually("no session of the server is busy", async || {
        let busy = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'fencepostd'
              AND state <> 'idle'";
        (admin.value::<i64>(busy).await == 0).then_some(())
    })
    .await;
    let lock = granted(&mut client, name, "holder", LONG).await;
    assert!(lock.fencing_token > token);
    renew(&mut client, name, "holder", lock.fencing_token, None)
        .await
        .unwrap();
    release(&mut client, name, "holder", lock.fencing_token)
        .await
        .unwrap();
}
