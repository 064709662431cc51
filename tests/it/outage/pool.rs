//! Connections of the pool wait for rows that somebody has locked.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{acquire, get, granted, renew},
    eventually,
    postgres::fresh_database,
    row_lock::RowLock,
    server::Client,
};
use tokio::{task::JoinSet, time::timeout};

use super::{BOUND, LONG, RECOVERY, assert_outage, watch::Watch};

/// Six tasks that renew a lease until they are told to stop.
async fn crowd(client: &Client, name: &str) -> JoinSet<()> {
    let token = granted(&mut client.clone(), name, "holder", LONG)
        .await
        .fencing_token;
    let mut crowd = JoinSet::new();
    for _ in 0..6 {
        let (mut client, name) = (client.clone(), name.to_owned());
        crowd.spawn(async move {
            loop {
                let sent = Instant::now();
                if let Err(status) = renew(&mut client, &name, "holder", token, None).await {
                    assert_outage(&status);
                }
                assert!(sent.elapsed() < BOUND, "{:?}", sent.elapsed());
            }
        });
    }
    crowd
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_leaves_half_of_the_pool_to_the_others() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "2")
        .start()
        .await;
    server.wait_ready().await;
    let watch = Watch::start(&server).await;
    let mut client = server.client().await;
    let mut renewals = crowd(&client, "blocked").await;
    let row = RowLock::hold(&database.url(), "blocked").await;
    row.wait_for_waiters(1).await;

    // Names share lanes by chance: of a few, most have another than the row's.
    let blocked = Instant::now();
    let mut free = Vec::new();
    for name in ["a", "b", "c", "d"] {
        let mut client = client.clone();
        let taken = acquire(&mut client, name, "owner", LONG);
        if timeout(Duration::from_secs(1), taken).await.is_ok() {
            free.push(name);
        }
    }
    assert!(free.len() >= 3, "{free:?}");
    let mut grants = 0;
    while blocked.elapsed() < Duration::from_secs(5) {
        let sent = Instant::now();
        granted(&mut client, free[grants % free.len()], "owner", LONG).await;
        let took = sent.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        grants += 1;
    }
    println!("one row locked: {grants} grants of other names");
    assert!(watch.stayed_ready());
    row.commit().await;
    assert!(renewals.try_join_next().is_none());
    renewals.shutdown().await;
    watch.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_waits_for_rows_answers_the_others_in_time() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "2")
        .start()
        .await;
    server.wait_ready().await;
    let mut watch = Watch::start(&server).await;
    let client = server.client().await;
    // Enough names that some have different lanes.
    let names = ["blocked-0", "blocked-1", "blocked-2", "blocked-3"];
    let mut crowds = Vec::new();
    for name in names {
        crowds.push(crowd(&client, name).await);
    }
    let mut rows = Vec::new();
    for name in names {
        rows.push(RowLock::hold(&database.url(), name).await);
    }
    let blocked = Instant::now();
    let admin = database.client().await;
    // One connection is left to those that wait for no row.
    eventually("a connection waits", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'fencepostd'
              AND wait_event_type = 'Lock'";
        (admin.value::<i64>(waiting).await == 1).then_some(())
    })
    .await;

    // Other names, and a look at one that is locked.
    let mut outcomes = Vec::new();
    while blocked.elapsed() < Duration::from_secs(8) {
        let sent = Instant::now();
        let (mut a, mut b) = (client.clone(), client.clone());
        let (taken, read) = tokio::join!(
            acquire(&mut a, "other", "owner", LONG),
            get(&mut b, "blocked-0")
        );
        outcomes.push(sent.elapsed());
        assert!(taken.expect("no row is locked").acquired);
        assert_eq!(read.expect("it waits for no row").owner, "holder");
    }
    let longest = outcomes.iter().max();
    println!(
        "pool blocked: {} calls, {longest:?} at most",
        outcomes.len()
    );

    let free = Instant::now();
    for row in rows {
        row.commit().await;
    }
    for mut crowd in crowds {
        // None has failed: they go on until now.
        assert!(crowd.try_join_next().is_none());
        crowd.shutdown().await;
    }
    granted(&mut client.clone(), "other", "owner", LONG).await;
    let well = free.elapsed();
    let ready = watch.wait_for(true, free, RECOVERY).await;
    println!("pool blocked: works {well:?} after, ready {ready:?} after");
    assert!(well < RECOVERY);
    watch.assert_sound();
}
