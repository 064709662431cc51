//! Replicas restarted one after the other under clients that retry elsewhere.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    calls::{granted, reason, release, renew, request_with_id, send},
    postgres::fresh_database,
    server::Client,
};
use tokio::task::{JoinSet, LocalSet};
use tonic::{Code, Status};

use super::{LONG, lazy, quick};

const TTL: Duration = Duration::from_secs(5);
const ROUNDS: usize = 3;
const CALLERS: usize = 20;
const HOLDERS: usize = 20;
/// How often a call may be tried, here and there in turn.
const TRIES: usize = 6;

/// Repeats a call, the next time elsewhere, as a client library does.
async fn retry<T>(
    clients: &mut [Client; 2],
    retries: &AtomicUsize,
    mut call: impl AsyncFnMut(&mut Client) -> Result<T, Status>,
) -> Result<T, Status> {
    let mut tries = 0;
    loop {
        tries += 1;
        match call(&mut clients[0]).await {
            // What is not ours is the end of a connection: transient.
            Err(status)
                if (reason(&status).is_none() || status.code() == Code::Unavailable)
                    && tries < TRIES =>
            {
                retries.fetch_add(1, Ordering::Relaxed);
                clients.swap(0, 1);
                tokio::time::sleep(Duration::from_millis(20 << tries)).await;
            }
            other => return other,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_loses_no_call_and_no_lock() {
    let database = fresh_database().await;
    let mut replicas = [
        quick(&database.url()).start().await,
        quick(&database.url()).start().await,
    ];
    for replica in &replicas {
        replica.wait_ready().await;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let retries = Arc::new(AtomicUsize::new(0));
    let sides = |n: usize| {
        let mut sides = [lazy(&replicas[0]), lazy(&replicas[1])];
        sides.rotate_left(n % 2);
        sides
    };

    let local = LocalSet::new();
    let mut work = JoinSet::new();
    for caller in 0..CALLERS {
        let (mut sides, stop, retries) = (sides(caller), Arc::clone(&stop), Arc::clone(&retries));
        work.spawn_local_on(
            async move {
                let name = format!("cycle-{caller}");
                let mut cycles = 0_usize;
                while !stop.load(Ordering::Relaxed) {
                    cycles += 1;
                    let request = request_with_id(&name, "owner", LONG, &format!("id-{cycles}"));
                    let mut lock = None;
                    let answer = retry(&mut sides, &retries, async |client| {
                        lock = send(client, request.clone()).await?.lock;
                        Ok(())
                    })
                    .await;
                    answer.unwrap_or_else(|status| panic!("acquire: {status:?}"));
                    let token = lock.expect("nobody else wants it").fencing_token;
                    let answer = retry(&mut sides, &retries, async |client| {
                        release(client, &name, "owner", token).await
                    })
                    .await;
                    match answer {
                        // After an unknown outcome: done.
                        Err(status) if status.code() == Code::NotFound => {}
                        other => other.unwrap_or_else(|status| panic!("release: {status:?}")),
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                cycles
            },
            &local,
        );
    }
    for holder in 0..HOLDERS {
        let (mut sides, stop, retries) = (sides(holder), Arc::clone(&stop), Arc::clone(&retries));
        work.spawn_local_on(
            async move {
                let name = format!("held-{holder}");
                let token = granted(&mut sides[0], &name, "holder", TTL)
                    .await
                    .fencing_token;
                let mut renewals = 0_usize;
                while !stop.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    retry(&mut sides, &retries, async |client| {
                        renew(client, &name, "holder", token, None).await
                    })
                    .await
                    .unwrap_or_else(|status| panic!("{name} is lost: {status:?}"));
                    renewals += 1;
                }
                renewals
            },
            &local,
        );
    }

    let start = Instant::now();
    let restarts = async {
        for _ in 0..ROUNDS {
            for replica in &mut replicas {
                replica.restart().await;
                replica.wait_ready().await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
        stop.store(true, Ordering::Relaxed);
        work.join_all().await
    };
    let done = local.run_until(restarts).await;
    let calls: usize = done.iter().sum();
    let retries = retries.load(Ordering::Relaxed);
    println!(
        "{calls} cycles and renewals, {retries} retries, in {:?}",
        start.elapsed()
    );
    assert!(done.iter().all(|count| *count > 0));
}
