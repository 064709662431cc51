//! A guard, or whoever waits for one, is dropped: the lock is free at once.

use std::{panic, thread, time::Duration};

use fencepost_client::{Client, Guard};
use tokio::{runtime, select, task, time::timeout};

use super::{free_within, hold, lease_of, ours};
use crate::world::{LONG, fresh};

const SOON: Duration = Duration::from_secs(1);

/// Takes a lock, has something done to its guard, and expects the lock free.
async fn free_after(what: &str, done: impl AsyncFnOnce(Guard)) {
    let client = ours().await;
    let name = fresh("dropped");
    done(hold(&client, &name, LONG).await).await;
    let took = free_within(&client, &name, SOON).await;
    println!("{what}: free after {took:?}");
}

#[tokio::test]
async fn on_a_thread_without_a_runtime() {
    free_after("plain thread", async |guard| {
        thread::spawn(move || drop(guard)).join().unwrap();
    })
    .await;
}

#[tokio::test]
async fn while_panicking() {
    free_after("panic", async |guard| {
        let panicked = thread::spawn(move || {
            let _guard = guard;
            panic::resume_unwind(Box::new("on purpose"));
        });
        panicked.join().unwrap_err();
    })
    .await;
}

#[tokio::test]
async fn by_a_task_that_is_aborted() {
    free_after("aborted task", async |guard| {
        let task = task::spawn(async move {
            guard.lost().await;
        });
        task::yield_now().await;
        task.abort();
        task.await.unwrap_err();
    })
    .await;
}

#[tokio::test]
async fn by_a_time_limit() {
    free_after("time limit", async |guard| {
        let work = async move {
            guard.lost().await;
        };
        timeout(Duration::from_millis(50), work).await.unwrap_err();
    })
    .await;
}

#[tokio::test]
async fn with_the_runtime_that_it_lived_in() {
    free_after("runtime shut down", async |guard| {
        thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().build().unwrap();
            runtime.spawn(async move {
                guard.lost().await;
            });
            runtime.block_on(task::yield_now());
            drop(runtime);
        })
        .join()
        .unwrap();
    })
    .await;
}

#[tokio::test]
async fn with_the_last_handle_of_its_client() {
    let other = ours().await;
    let name = fresh("dropped");
    let client = ours().await;
    let guard = hold(&client, &name, LONG).await;
    drop(client);
    drop(guard);
    free_within(&other, &name, SOON).await;
}

/// As the last thing that a program does.
#[tokio::test]
async fn and_the_client_is_waited_for() {
    let other = ours().await;
    let name = fresh("dropped");
    let client = ours().await;
    drop(hold(&client, &name, LONG).await);
    client.released().await;
    assert_eq!(other.get(&name).await.unwrap(), None);
}

/// Whoever waits goes away, at any moment of the call.
#[tokio::test]
async fn while_it_is_being_acquired() {
    let client = ours().await;
    let other = ours().await;
    for moment in 0..200 {
        let name = fresh("dropped");
        select! {
            biased;
            () = tokio::time::sleep(Duration::from_micros(moment * 20)) => {}
            guard = client.acquire(&name, lease_of(LONG)) => drop(guard),
        }
        client.released().await;
        assert_eq!(other.get(&name).await.unwrap(), None, "moment {moment}");
    }
}

/// An owner of the caller's own: whoever gave up must not take the lock from whoever
/// came after.
#[tokio::test]
async fn while_it_is_being_acquired_by_an_owner_that_comes_back() {
    let client = ours().await;
    for moment in 0..100 {
        let name = fresh("dropped");
        let options = || lease_of(LONG).owner("fixed");
        select! {
            biased;
            () = tokio::time::sleep(Duration::from_micros(moment * 40)) => {}
            guard = client.acquire(&name, options()) => drop(guard),
        }
        let guard = client
            .acquire(&name, options())
            .await
            .expect("its own lock");
        client.released().await;
        let seen = client.get(&name).await.unwrap().expect("a live lease");
        assert_eq!(seen.fencing_token, guard.fencing_token(), "moment {moment}");
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
}

#[test]
fn a_client_needs_no_runtime() {
    let client = Client::connect_lazy("http://127.0.0.1:1").unwrap();
    drop(client);
}
