//! The schema is made by whoever starts first, whatever happens to the others.

use std::time::Duration;

use fencepost_support::{
    Postgres, Server, calls, eventually,
    pgbouncer::PgBouncer,
    postgres::{Client, Database, fresh_database},
    server::Builder,
    wait::within,
};
use rand::Rng as _;
use rustix::process::Signal;
use tokio::task::JoinSet;

/// What migrations lock each other out with.
const ADVISORY_LOCK: i64 = 0x6665_6e63_6570_6f73;

const TTL: Duration = Duration::from_secs(60);

/// The latest version of the schema.
async fn version(client: &Client) -> Option<i32> {
    client
        .value("SELECT max(version) FROM fencepost.migrations")
        .await
}

/// One row for each version, everything in its place, and nothing left over.
async fn assert_migrated(client: &Client) {
    let versions: Vec<i32> = client
        .value("SELECT array_agg(version ORDER BY version) FROM fencepost.migrations")
        .await;
    let expected: Vec<i32> = (1..=versions.len().try_into().unwrap()).collect();
    assert_eq!(versions, expected);
    let there: i64 = client
        .value(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'fencepost'::regnamespace
             AND relname IN ('locks', 'locks_pkey', 'identity', 'fencing_tokens', 'migrations')",
        )
        .await;
    assert_eq!(there, 5);
    let identities: i64 = client
        .value("SELECT count(*) FROM fencepost.identity")
        .await;
    assert_eq!(identities, 1);
    // A backend whose client was killed may take a moment to notice.
    eventually("no advisory lock and no open transaction is left", async || {
        let left: i64 = client
            .value(
                "SELECT (SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
                          WHERE l.locktype = 'advisory' AND d.datname = current_database())
                      + (SELECT count(*) FROM pg_stat_activity
                          WHERE datname = current_database() AND state LIKE 'idle in transaction%')",
            )
            .await;
        (left == 0).then_some(())
    })
    .await;
}

/// Three replicas start at once on an empty database; one of them is killed at
/// some moment and started again.
#[expect(clippy::print_stdout, reason = "for the reader of a failed test")]
async fn round(observer: &Client, builder: Builder, number: u64) {
    let mut rest = JoinSet::new();
    for _ in 0..2 {
        rest.spawn(builder.clone().start());
    }
    let victim = builder.spawn();
    // Half of them early, while the schema is made.
    let most = if number.is_multiple_of(2) { 2_000 } else { 150 };
    let wait = rand::rng().random_range(0..most);
    println!("killed after {wait} ms");
    tokio::time::sleep(Duration::from_millis(wait)).await;
    victim.signal(Signal::KILL);
    victim.wait_exit().await;

    rest.spawn(builder.start());
    let servers = rest.join_all().await;
    for server in &servers {
        server.wait_ready().await;
    }
    assert_migrated(observer).await;
    calls::granted(&mut servers[0].client().await, "a", "b", TTL).await;
    calls::refused(&mut servers[1].client().await, "a", "c", TTL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_start_at_once_and_are_killed_leave_a_good_schema() {
    for number in 0..5 {
        let database = fresh_database().await;
        let observer = database.client().await;
        round(&observer, Server::builder(&database.url()), number).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_start_at_once_behind_pgbouncer_leave_a_good_schema() {
    let mut pooler: Option<PgBouncer> = None;
    for number in 0..5 {
        let database = fresh_database().await;
        let observer = database.client().await;
        if pooler.is_none() {
            pooler = Some(PgBouncer::start(database.postgres().address(), 2).await);
        }
        let url = pooler.as_ref().unwrap().url_of(database.name());
        let builder = Server::builder(&url).switch("--pgbouncer");
        round(&observer, builder, number).await;
    }
}

/// A database where somebody holds a lock that the migration needs.
async fn blocked_database() -> (Database, Client) {
    let database = fresh_database().await;
    let blocker = database.client().await;
    blocker
        .run(
            "CREATE SCHEMA fencepost;
             CREATE TABLE fencepost.migrations (version integer PRIMARY KEY, name text NOT NULL,
                 applied_at timestamptz NOT NULL DEFAULT clock_timestamp())",
        )
        .await;
    blocker
        .run("BEGIN; LOCK TABLE fencepost.migrations IN SHARE MODE")
        .await;
    (database, blocker)
}

/// When the transaction of a migration that waits for a lock began.
async fn waiting(observer: &Client, at_least: usize) -> Vec<String> {
    let mut seen: Vec<String> = Vec::new();
    within(Duration::from_secs(15), "a migration waits", async || {
        let rows = observer
            .query(
                "SELECT xact_start::text FROM pg_stat_activity
                  WHERE datname = current_database() AND wait_event_type = 'Lock'",
                &[],
            )
            .await
            .unwrap();
        seen.extend(rows.iter().map(|row| row.get::<_, String>(0)));
        seen.sort();
        seen.dedup();
        (seen.len() >= at_least).then_some(())
    })
    .await;
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_gives_way_to_who_holds_a_lock_and_tries_again() {
    let (database, blocker) = blocked_database().await;
    let observer = database.client().await;
    let starting = tokio::spawn(Server::builder(&database.url()).start());
    // It waits in one transaction after the other, not in one all the time.
    waiting(&observer, 3).await;
    blocker.run("COMMIT").await;
    starting.await.unwrap().wait_ready().await;
    assert_migrated(&observer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_cannot_read_the_schemas_version_tries_again() {
    let (database, blocker) = blocked_database().await;
    let observer = database.client().await;
    blocker.run("LOCK TABLE fencepost.migrations").await;
    let starting = tokio::spawn(Server::builder(&database.url()).start());
    waiting(&observer, 2).await;
    blocker.run("COMMIT").await;
    starting.await.unwrap().wait_ready().await;
    assert_migrated(&observer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_survives_somebody_who_makes_the_same_schema() {
    let database = fresh_database().await;
    let observer = database.client().await;
    let other = database.client().await;
    other.run("BEGIN").await;
    other.run("CREATE SCHEMA fencepost").await;
    let starting = tokio::spawn(Server::builder(&database.url()).start());
    waiting(&observer, 1).await;
    other.run("COMMIT").await;
    starting.await.unwrap().wait_ready().await;
    assert_migrated(&observer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_killed_in_the_middle_of_its_migration_blocks_nobody() {
    let (database, blocker) = blocked_database().await;
    let observer = database.client().await;
    let victim = Server::builder(&database.url()).spawn();
    waiting(&observer, 1).await;
    let held: i64 = observer
        .value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")
        .await;
    assert!(held > 0, "it is in the middle of its migration");
    victim.signal(Signal::KILL);
    victim.wait_exit().await;
    blocker.run("COMMIT").await;
    let server = Server::builder(&database.url()).start().await;
    server.wait_ready().await;
    assert_migrated(&observer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_wait_for_a_migration_hold_up_no_index_build() {
    let database = fresh_database().await;
    let observer = database.client().await;
    // Another's migration, which takes its time.
    let lock = format!("SELECT pg_advisory_lock({ADVISORY_LOCK})");
    observer.run(&lock).await;
    let mut starting = JoinSet::new();
    for _ in 0..3 {
        starting.spawn(Server::builder(&database.url()).start());
    }
    eventually("all three are there", async || {
        let sessions: i64 = observer
            .value(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = 'fencepostd'",
            )
            .await;
        (sessions == 3).then_some(())
    })
    .await;
    observer.run("CREATE TABLE public.other (a int)").await;
    observer.run("SET statement_timeout = '20s'").await;
    observer
        .run("CREATE INDEX CONCURRENTLY other_a ON public.other (a)")
        .await;
    assert!(starting.try_join_next().is_none(), "they wait");
    let unlock = format!("SELECT pg_advisory_unlock({ADVISORY_LOCK})");
    observer.run(&unlock).await;
    for server in starting.join_all().await {
        server.wait_ready().await;
    }
    assert_migrated(&observer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_built_while_clients_run() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut load = JoinSet::new();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    for n in 0..30 {
        let mut client = server.client().await;
        let stopped = stopped.clone();
        load.spawn(async move {
            let (owner, name) = (format!("owner {n}"), format!("lock {}", n % 10));
            let mut calls = 0;
            while !*stopped.borrow() {
                let answer = calls::acquire(&mut client, &name, &owner, TTL)
                    .await
                    .unwrap();
                if let Some(lock) = answer.lock {
                    calls::renew(&mut client, &name, &owner, lock.fencing_token, None)
                        .await
                        .unwrap();
                    calls::release(&mut client, &name, &owner, lock.fencing_token)
                        .await
                        .unwrap();
                }
                calls += 1;
            }
            calls
        });
    }
    let admin = database.client().await;
    admin.run("SET statement_timeout = '30s'").await;
    for n in 0..3 {
        admin
            .run(&format!(
                "CREATE INDEX CONCURRENTLY owners_{n} ON fencepost.locks (owner)"
            ))
            .await;
    }
    stop.send_replace(true);
    let calls: u32 = load.join_all().await.into_iter().sum();
    assert!(calls >= 30, "{calls}");
    let valid: i64 = admin
        .value("SELECT count(*) FROM pg_index WHERE indrelid = 'fencepost.locks'::regclass AND indisvalid")
        .await;
    assert_eq!(valid, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_alone_makes_the_schema_and_stops() {
    let database = fresh_database().await;
    let client = database.client().await;
    let nobody_listens = Postgres::url_via(fencepost_support::system::free_address(), "x");
    for _ in 0..2 {
        let migrate = Server::builder(&database.url()).switch("migrate").spawn();
        assert!(migrate.wait_exit().await.success(), "{}", migrate.tail());
        let log = migrate.log().lines().concat();
        assert!(!log.contains("serving"), "{log}");
        assert_migrated(&client).await;
    }
    let away = Server::builder(&nobody_listens).switch("migrate").spawn();
    assert_eq!(away.wait_exit().await.code(), Some(69));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_newer_than_the_server_is_accepted_and_left_alone() {
    let database = fresh_database().await;
    let client = database.client().await;
    let old = Server::start(&database.url()).await;
    client
        .run("INSERT INTO fencepost.migrations (version, name) VALUES (99, 'from the future')")
        .await;
    let migrate = Server::builder(&database.url()).switch("migrate").spawn();
    assert!(migrate.wait_exit().await.success(), "{}", migrate.tail());
    let new = Server::start(&database.url()).await;
    let lock = calls::granted(&mut new.client().await, "a", "b", TTL).await;
    let found = calls::get(&mut old.client().await, "a").await.unwrap();
    assert_eq!(found.fencing_token, lock.fencing_token);
    assert_eq!(version(&client).await, Some(99));
}
