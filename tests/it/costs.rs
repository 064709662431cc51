//! What one call costs: round trips, flushes, and space in the lock table.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server, calls, eventually,
    pgbouncer::PgBouncer,
    postgres::{Client, fresh_database},
    proxy::Proxy,
    server,
};

const MINUTE: Duration = Duration::from_secs(60);

/// A server with one connection to the database, so that a call finds it warm.
fn frugal(url: &str) -> server::Builder {
    Server::builder(url)
        .flag("--database-pool-size", "1")
        .flag("--drain-delay", "0s")
}

/// Ends a server, and waits until the database has counted what it did.
async fn end(server: Server, client: &Client) {
    server.sigterm();
    assert!(server.wait_exit().await.success());
    eventually("the server's sessions have ended", async || {
        let sessions: i64 = client
            .value(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE application_name = 'fencepostd' AND datname = current_database()",
            )
            .await;
        (sessions == 0).then_some(())
    })
    .await;
}

/// The quickest of some Acquires while each way to the database takes `way`.
async fn acquire_with_a_slow_database(builder: server::Builder, proxy: &Proxy) -> Duration {
    let way = Duration::from_millis(150);
    let server = builder.start().await;
    server.wait_ready().await;
    let mut client = server.client().await;
    // The first one prepares the statement.
    calls::granted(&mut client, "warm", "a", MINUTE).await;
    proxy.delay(way);
    let mut quickest = Duration::MAX;
    for n in 0..8 {
        let start = Instant::now();
        calls::granted(&mut client, &format!("cold {n}"), "a", MINUTE).await;
        quickest = quickest.min(start.elapsed());
    }
    assert!(
        quickest >= way * 2,
        "{quickest:?}: the proxy delays nothing"
    );
    quickest
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_is_one_round_trip_to_the_database() {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = Postgres::url_via(proxy.address(), database.name());
    let took = acquire_with_a_slow_database(frugal(&url), &proxy).await;
    assert!(took < Duration::from_millis(550), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_is_one_round_trip_to_the_pooler() {
    let database = fresh_database().await;
    let pooler = PgBouncer::start(database.postgres().address(), 2).await;
    let proxy = Proxy::start(pooler.address()).await;
    let url = Postgres::url_via(proxy.address(), database.name());
    let builder = frugal(&url).switch("--pgbouncer");
    let took = acquire_with_a_slow_database(builder, &proxy).await;
    assert!(took < Duration::from_millis(550), "{took:?}");
}

/// Flushes of the write-ahead log so far, all processes together.
async fn flushes(client: &Client) -> i64 {
    let counter = if client.major_version().await < 18 {
        "SELECT wal_sync FROM pg_stat_wal"
    } else {
        "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"
    };
    client.value(counter).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_is_one_flush_and_a_refused_one_none() {
    const CALLS: i64 = 400;
    let postgres = Postgres::builder()
        .setting("autovacuum", "off")
        .start()
        .await;
    let client = postgres.admin().await;
    end(frugal(&postgres.url()).start().await, &client).await;

    let before = flushes(&client).await;
    let server = frugal(&postgres.url()).start().await;
    let mut holder = server.client().await;
    for n in 0..CALLS {
        calls::granted(&mut holder, &format!("lock {n}"), "a", MINUTE).await;
    }
    end(server, &client).await;
    let granted = flushes(&client).await - before;
    assert!(
        (CALLS..=CALLS + CALLS / 4).contains(&granted),
        "{granted} flushes for {CALLS} grants"
    );

    let before = flushes(&client).await;
    let server = frugal(&postgres.url()).start().await;
    let mut contender = server.client().await;
    for n in 0..CALLS {
        calls::refused(&mut contender, &format!("lock {n}"), "b", MINUTE).await;
    }
    end(server, &client).await;
    let refused = flushes(&client).await - before;
    assert!(
        refused <= CALLS / 10,
        "{refused} flushes for {CALLS} refusals"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_stay_heap_only() {
    let began = Instant::now();
    let mut seen = Vec::new();
    // A session that a busy machine holds up keeps the dead rows of all.
    while began.elapsed() < MINUTE {
        let (hot, all) = heap_only_renewals().await;
        if hot * 100 >= all * 95 {
            return;
        }
        seen.push((hot, all));
    }
    panic!("heap-only updates, of all: {seen:?}");
}

/// How many updates were heap-only, and how many there were.
async fn heap_only_renewals() -> (i64, i64) {
    const RENEWERS: usize = 8;
    const LOCKS: usize = 8;
    const ROUNDS: usize = 56;
    let database = fresh_database().await;
    let client = database.client().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "0s")
        .start()
        .await;
    let mut renewers = Vec::new();
    for renewer in 0..RENEWERS {
        let mut client = server.client().await;
        renewers.push(tokio::spawn(async move {
            let mut locks = Vec::new();
            for n in 0..LOCKS {
                let name = format!("lock {renewer} {n}");
                locks.push(calls::granted(&mut client, &name, "a", MINUTE).await);
            }
            for lock in locks.iter().cycle().take(LOCKS * ROUNDS) {
                calls::renew(&mut client, &lock.resource, "a", lock.fencing_token, None)
                    .await
                    .unwrap();
            }
        }));
    }
    for renewer in renewers {
        renewer.await.unwrap();
    }
    end(server, &client).await;
    let updates = async |column: &str| -> i64 {
        let query = format!("SELECT {column} FROM pg_stat_user_tables WHERE relname = 'locks'");
        client.value(&query).await
    };
    let expected = i64::try_from(RENEWERS * LOCKS * ROUNDS).unwrap();
    let all = eventually("the updates are counted", async || {
        let all = updates("n_tup_upd").await;
        (all >= expected).then_some(all)
    })
    .await;
    (updates("n_tup_hot_upd").await, all)
}
