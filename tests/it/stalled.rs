//! A synchronous standby that does not answer, and a first host that hangs.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server,
    calls::{acquire, get, granted},
    eventually,
    postgres::Replication,
    proxy::Proxy,
};
use tokio::task::JoinSet;

use crate::errors::expect_transient;

const LONG: Duration = Duration::from_secs(60);
const POOL: i64 = 4;

/// Commits wait for ever, and a session in such a wait outlives its connection:
/// they must not pile up in a database that others use too.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_standby_costs_no_more_sessions_than_the_pool_has() {
    let primary = Postgres::start().await;
    let standby = primary.standby("strict", Replication::Synchronous).await;
    let server = Server::builder(&primary.url())
        .flag("--database-pool-size", &POOL.to_string())
        .flag("--request-timeout", "2s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    granted(&mut client, "before", "holder", LONG).await;
    standby.freeze();

    let mut callers = JoinSet::new();
    for n in 0..8 {
        let mut client = client.clone();
        callers.spawn(async move {
            for round in 0_u32.. {
                let name = format!("{n}-{round}");
                expect_transient(acquire(&mut client, &name, "caller", LONG).await);
            }
        });
    }
    let admin = primary.admin().await;
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencepostd'";
    let until = Instant::now() + Duration::from_secs(15);
    let mut unready = false;
    while Instant::now() < until {
        // One more asks how the database is.
        let now: i64 = admin.value(sessions).await;
        assert!(now <= POOL + 1, "{now} sessions");
        unready |= server.health("").await != server.health("liveness").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(unready, "health says that no lock can be taken");
    assert!(
        callers.try_join_next().is_none(),
        "no caller heard anything else"
    );
    callers.shutdown().await;

    standby.thaw();
    let awake = Instant::now();
    eventually("locks are granted again", async || {
        let answer = acquire(&mut client, "after", "holder", LONG).await;
        answer.is_ok_and(|answer| answer.acquired).then_some(())
    })
    .await;
    assert!(
        awake.elapsed() < Duration::from_secs(10),
        "{:?}",
        awake.elapsed()
    );
    server.wait_ready().await;
    // What nobody was told of is given back.
    eventually("the names of the stalled calls are free", async || {
        get(&mut client, "0-0").await.is_err().then_some(())
    })
    .await;
}

/// Of several hosts one may hang, before or after it accepts: the others are
/// found all the same, at the start and later.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_hangs_keeps_no_other_from_being_found() {
    let postgres = Postgres::start().await;
    let first = Proxy::start(postgres.address()).await;
    first.black_hole();
    let url = format!(
        "postgresql://postgres@{},{}/postgres",
        first.address(),
        postgres.address()
    );
    let server = Server::start(&url).await;
    server.wait_ready().await;
    granted(&mut server.client().await, "a", "holder", LONG).await;
}
