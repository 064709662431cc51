//! Every connection of the pool waits for a row that somebody has locked.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{acquire, get, granted, renew},
    eventually,
    postgres::fresh_database,
    row_lock::RowLock,
};

use super::{BOUND, FOLLOW, LONG, RECOVERY, assert_outage, watch::Watch};

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_waits_for_rows_answers_the_others_in_time() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "2")
        .start()
        .await;
    server.wait_ready().await;
    let mut watch = Watch::start(&server).await;
    let mut client = server.client().await;
    let token = granted(&mut client, "blocked", "holder", LONG)
        .await
        .fencing_token;
    let row = RowLock::hold(&database.url(), "blocked").await;

    // Holders that repeat their renewals keep both connections waiting.
    let renewals: Vec<_> = (0..6)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move {
                loop {
                    let sent = Instant::now();
                    match renew(&mut client, "blocked", "holder", token, None).await {
                        Ok(_) => return,
                        Err(status) => assert_outage(&status),
                    }
                    assert!(sent.elapsed() < BOUND, "{:?}", sent.elapsed());
                }
            })
        })
        .collect();
    row.wait_for_waiters(1).await;
    let blocked = Instant::now();
    let admin = database.client().await;
    eventually("both connections wait", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (admin.value::<i64>(waiting).await == 2).then_some(())
    })
    .await;

    // No lock can be taken here, so calls should go elsewhere.
    let ill = watch.wait_for(false, blocked, FOLLOW).await;
    println!("pool blocked: not ready after {ill:?}");

    // Other names: an answer, or an error in time.
    let mut outcomes = Vec::new();
    while blocked.elapsed() < Duration::from_secs(8) {
        let sent = Instant::now();
        let (mut a, mut b) = (client.clone(), client.clone());
        let (taken, read) = tokio::join!(
            acquire(&mut a, "other", "owner", LONG),
            get(&mut b, "blocked")
        );
        assert!(sent.elapsed() < BOUND, "{:?}", sent.elapsed());
        for error in [taken.err(), read.err()] {
            outcomes.push(error.is_none());
            if let Some(status) = error {
                assert_outage(&status);
            }
        }
    }
    let failed = outcomes.iter().filter(|good| !**good).count();
    println!("pool blocked: {failed} of {} calls failed", outcomes.len());

    let free = Instant::now();
    row.commit().await;
    for renewal in renewals {
        renewal.await.unwrap();
    }
    granted(&mut client, "other", "owner", LONG).await;
    let well = free.elapsed();
    let ready = watch.wait_for(true, free, RECOVERY).await;
    println!("pool blocked: works {well:?} after, ready {ready:?} after");
    assert!(well < RECOVERY);
    watch.assert_sound();
}
