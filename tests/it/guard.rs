//! The Rust client's guard: it holds, it knows when it does not, and it gives
//! back.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod dropped;
mod lost;
mod network;
mod process;
mod waiting;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fencepost_client::{AcquireOptions, Client, Error, Guard, LostReason};
use fencepost_support::{Server, calls, wait::within};
use tokio::{sync::oneshot, time::sleep};

use crate::world::{LONG, SHORT, fresh, shared};

/// A client of its own thread and connections.
fn client_of(server: &Server) -> Client {
    Client::connect_lazy(server.url()).expect("a client")
}

async fn ours() -> Client {
    client_of(&shared().await.server)
}

fn lease_of(ttl: Duration) -> AcquireOptions {
    AcquireOptions::default().ttl(ttl)
}

/// Takes a lock that must be free.
async fn hold(client: &Client, resource: &str, ttl: Duration) -> Guard {
    client
        .acquire(resource, lease_of(ttl))
        .await
        .expect("a free lock")
}

/// Waits until it can be taken by somebody else; how long that took.
async fn free_within(client: &Client, resource: &str, patience: Duration) -> Duration {
    let begun = Instant::now();
    let guard = within(patience, "the lock to be free", async || {
        client.acquire(resource, lease_of(LONG)).await.ok()
    })
    .await;
    let took = begun.elapsed();
    guard.release().await.expect("to be given back");
    took
}

#[tokio::test]
async fn a_guard_holds_and_gives_back() {
    let client = ours().await;
    let name = fresh("guard");
    let guard = hold(&client, &name, LONG).await;
    assert_eq!(guard.resource(), name);
    assert!(guard.is_held() && guard.ensure_held().is_ok());
    assert!(guard.remaining() > LONG - Duration::from_secs(5) && guard.remaining() < LONG);

    let seen = client.get(&name).await.unwrap().expect("a live lease");
    assert_eq!(seen.fencing_token, guard.fencing_token());
    assert_eq!(seen.owner, guard.owner());
    match client.acquire(&name, lease_of(LONG)).await {
        Err(Error::Refused { holder }) => {
            assert_eq!(holder.owner, guard.owner());
            assert!(holder.remaining > Duration::from_secs(50));
        }
        other => panic!("not refused: {other:?}"),
    }

    let first = guard.fencing_token();
    guard.release().await.expect("to be given back");
    assert_eq!(client.get(&name).await.unwrap(), None);
    let second = hold(&client, &name, LONG).await;
    assert!(second.fencing_token() > first);
    second.release().await.expect("to be given back");
}

#[tokio::test]
async fn a_lease_is_kept_over_many_intervals() {
    let client = ours().await;
    let name = fresh("guard");
    let guard = hold(&client, &name, SHORT).await;
    let end = Instant::now() + SHORT * 20;
    let mut least = SHORT;
    while Instant::now() < end {
        assert!(guard.is_held());
        least = least.min(guard.remaining());
        sleep(Duration::from_millis(5)).await;
    }
    println!("the least that was left of {SHORT:?}: {least:?}");
    let seen = client.get(&name).await.unwrap().expect("a live lease");
    assert_eq!(seen.fencing_token, guard.fencing_token());
    guard.release().await.expect("to be given back");
}

#[tokio::test]
async fn bad_input_names_its_field() {
    let client = ours().await;
    let fields = |error: Error| match error {
        Error::Invalid { violations } => violations.into_iter().map(|v| v.field).collect(),
        other => vec![format!("{other:?}")],
    };
    let no_name = client.acquire("", lease_of(LONG)).await;
    assert_eq!(fields(no_name.expect_err("no name")), ["resource"]);
    let too_short = client.acquire("a", lease_of(Duration::ZERO)).await;
    assert_eq!(fields(too_short.expect_err("no time")), ["ttl"]);
    let too_long = client.acquire("a", lease_of(Duration::MAX)).await;
    assert_eq!(fields(too_long.expect_err("no end")), ["ttl"]);
    let all_margin = client.acquire("a", lease_of(LONG).margin(LONG)).await;
    assert_eq!(fields(all_margin.expect_err("no trust")), ["margin"]);
}

/// The runtime of the caller has no time for anything.
#[test]
fn work_that_keeps_the_runtime_busy_starves_no_renewal() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    // The server is not a child of a runtime that is busy.
    let (server, _database) = runtime.block_on(async {
        let database = fencepost_support::postgres::fresh_database().await;
        (Server::start(&database.url()).await, database)
    });
    let client = client_of(&server);
    runtime.block_on(async {
        let guard = hold(&client, "busy", SHORT).await;
        let end = Instant::now() + SHORT * 3;
        while Instant::now() < end {
            assert!(guard.is_held());
            std::hint::spin_loop();
        }
        let refused = client.acquire("busy", lease_of(LONG)).await;
        assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
        guard.release().await.expect("to be given back");
    });
}

#[tokio::test]
async fn work_under_a_lock_ends_before_it_is_given_back() {
    let client = ours().await;
    let name = fresh("guard");
    let outcome = client
        .with_lock(&name, lease_of(LONG), async |guard| {
            assert!(guard.is_held());
            guard.fencing_token()
        })
        .await;
    assert!(outcome.expect("a token") > 0);
    assert_eq!(client.get(&name).await.unwrap(), None);
}

#[tokio::test]
async fn work_is_dropped_when_its_lease_is_lost() {
    struct Work(Arc<std::sync::atomic::AtomicBool>);
    impl Drop for Work {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }
    let client = ours().await;
    let name = fresh("guard");
    let dropped = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let work = Work(Arc::clone(&dropped));
    let outcome = client
        .with_lock(&name, lease_of(SHORT), async |guard| {
            let _work = work;
            let mut raw = shared().await.server.client().await;
            calls::release(&mut raw, &name, guard.owner(), guard.fencing_token())
                .await
                .expect("to be taken away");
            std::future::pending::<()>().await;
        })
        .await;
    let reason = LostReason::NotFound;
    assert_eq!(outcome, Err(Error::Lost { reason }));
    assert!(dropped.load(std::sync::atomic::Ordering::SeqCst));
}

/// What a server says only at the end counts as well.
#[tokio::test]
async fn work_whose_lease_was_lost_in_its_last_moment_has_failed() {
    let client = ours().await;
    let name = fresh("guard");
    let outcome = client
        .with_lock(&name, lease_of(LONG), async |guard| {
            let mut raw = shared().await.server.client().await;
            calls::granted(&mut raw, &name, guard.owner(), LONG).await;
        })
        .await;
    let reason = LostReason::TokenSuperseded;
    assert_eq!(outcome, Err(Error::Lost { reason }));
}

/// Whoever waits behind it starts only after the work has ended.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_is_cancelled_ends_before_its_lock_is_given_back() {
    /// Work that takes a while to be dropped.
    struct Winding(Arc<Mutex<Option<Instant>>>);
    impl Drop for Winding {
        fn drop(&mut self) {
            std::thread::sleep(SHORT);
            *self.0.lock().unwrap() = Some(Instant::now());
        }
    }
    let client = ours().await;
    let name = fresh("guard");
    let ended = Arc::new(Mutex::new(None));
    let (begin, begun) = oneshot::channel();
    let work = {
        let (client, name, winding) = (client.clone(), name.clone(), Winding(Arc::clone(&ended)));
        tokio::spawn(async move {
            client
                .with_lock(&name, lease_of(LONG), async move |_| {
                    let _winding = winding;
                    begin.send(()).unwrap();
                    std::future::pending::<()>().await;
                })
                .await
        })
    };
    begun.await.unwrap();
    let next = {
        let (client, name) = (client.clone(), name.clone());
        tokio::spawn(async move {
            let guard = client.acquire_with_retry(&name, lease_of(LONG)).await;
            (Instant::now(), guard)
        })
    };
    work.abort();
    let (started, guard) = next.await.unwrap();
    guard.expect("its turn").release().await.unwrap();
    let ended = ended.lock().unwrap().expect("the work has ended");
    assert!(started > ended);
}

/// For tasks that are spawned.
#[tokio::test]
async fn everything_can_be_spawned_and_shared() {
    fn sendable<T: Send>(it: T) -> T {
        it
    }
    let client = ours().await;
    let name = fresh("guard");
    let task = {
        let client = client.clone();
        let name = name.clone();
        tokio::spawn(sendable(async move {
            client
                .with_lock(&name, AcquireOptions::default(), async |guard| {
                    sleep(Duration::from_millis(1)).await;
                    guard.fencing_token()
                })
                .await
        }))
    };
    task.await.unwrap().expect("a token");
    let guard = Arc::new(hold(&client, &name, LONG).await);
    let there = Arc::clone(&guard);
    let lost = tokio::spawn(async move { there.lost().await });
    lost.abort();
    assert!(guard.is_held());
}
