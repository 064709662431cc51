//! Behind PgBouncer in transaction mode, where a connection is another
//! client's from one transaction to the next: all works, and nothing is left
//! behind. And what is set for each write, with a pooler and without.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Postgres, Server, calls, eventually,
    history::{Held, History, deadline},
    pgbouncer::PgBouncer,
    postgres::{Client, fresh_database},
    server,
    wait::within,
};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::{programs::expect_no_start, settings};

const LONG: Duration = Duration::from_secs(60);

/// Takes and releases a lock, with 29 others after the same few, and records
/// what it held. Returns how often the servers were away.
async fn contend(
    mut client: server::Client,
    n: usize,
    over: Arc<AtomicBool>,
    history: Arc<History>,
) -> u32 {
    const TTL: Duration = Duration::from_secs(2);
    let mut away = 0;
    let owner = format!("owner {n}");
    let resource = format!("lock {}", n % 3);
    while !over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let lock = match calls::acquire(&mut client, &resource, &owner, TTL).await {
            Ok(answer) => answer.lock,
            Err(status) => {
                // The pooler is restarted under way; nothing else may happen.
                assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                away += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let Some(lock) = lock else { continue };
        let start = Instant::now();
        tokio::time::sleep(Duration::from_millis(2)).await;
        history.record(Held {
            resource: resource.clone(),
            holder: owner.clone(),
            asked,
            start,
            end: deadline(asked, calls::span(lock.remaining)).min(Instant::now()),
            token: lock.fencing_token,
        });
        // Lost with the pooler, it ends by itself.
        let _ = calls::release(&mut client, &resource, &owner, lock.fencing_token).await;
    }
    away
}

/// Grants so far after `start`.
async fn wait_for_grants(history: &History, count: usize) {
    let start = history.len();
    eventually("locks are granted", async || {
        (history.len() >= start + count).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_clients_on_a_pool_of_two_survive_a_restart_of_the_pooler() {
    let database = fresh_database().await;
    let mut pooler = PgBouncer::start(database.postgres().address(), 2).await;
    let url = pooler.url_of(database.name());
    let mut replicas = Vec::new();
    for _ in 0..2 {
        let builder = Server::builder(&url).switch("--pgbouncer");
        replicas.push(builder.flag("--drain-delay", "0s").start().await);
    }
    for replica in &replicas {
        replica.wait_ready().await;
    }
    let history = Arc::new(History::new());
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for n in 0..30 {
        let client = replicas[n % 2].client().await;
        clients.spawn(contend(client, n, Arc::clone(&over), Arc::clone(&history)));
    }
    wait_for_grants(&history, 30).await;
    pooler.restart().await;
    wait_for_grants(&history, 30).await;
    over.store(true, Ordering::Relaxed);
    let away: u32 = clients.join_all().await.into_iter().sum();
    println!("{} grants, {away} calls refused", history.len());
    history.assert_sound();
    for replica in &replicas {
        let log = replica.logs().concat();
        assert!(!log.contains("prepared statement"), "{log}");
        replica.wait_ready().await;
    }
    let left: i64 = database
        .client()
        .await
        .value(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND state LIKE 'idle in transaction%'",
        )
        .await;
    assert_eq!(left, 0);
}

/// What another application relies on.
const DEFAULTS: [(&str, &str); 6] = [
    ("synchronous_commit", "off"),
    ("statement_timeout", "77s"),
    ("lock_timeout", "66s"),
    ("search_path", "public"),
    ("enable_seqscan", "on"),
    ("default_transaction_isolation", "serializable"),
];

async fn set_defaults(client: &Client, database: &str) {
    for (name, value) in DEFAULTS {
        let set = format!("ALTER DATABASE {database} SET {name} = '{value}'");
        client.run(&set).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_client_of_the_pooler_sees_none_of_our_settings() {
    let database = fresh_database().await;
    let admin = database.client().await;
    set_defaults(&admin, database.name()).await;
    let pooler = PgBouncer::start(database.postgres().address(), 1).await;
    let url = pooler.url_of(database.name());
    let server = Server::builder(&url).switch("--pgbouncer").start().await;
    server.wait_ready().await;
    settings::record(&admin).await;

    let mut client = server.client().await;
    let other = Client::connect(&url).await.unwrap();
    for n in 0..50 {
        // Calls of all kinds, some of which fail in the database.
        let lock = calls::granted(&mut client, "a", &format!("owner {n}"), LONG).await;
        calls::refused(&mut client, "a", "b", LONG).await;
        let (owner, token) = (&lock.owner, lock.fencing_token);
        calls::renew(&mut client, "a", owner, token, None)
            .await
            .unwrap();
        calls::get(&mut client, "a").await.unwrap();
        calls::release(&mut client, "a", owner, token)
            .await
            .unwrap();
        calls::release(&mut client, "a", owner, token)
            .await
            .unwrap_err();
        for (name, value) in DEFAULTS {
            let shown = other.simple_query(&format!("SHOW {name}")).await.unwrap();
            let shown = shown.iter().find_map(|message| match message {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
                _ => None,
            });
            assert_eq!(shown, Some(value), "{name}");
        }
    }
    assert_set_for_every_write(&admin).await;
}

/// Whatever the defaults were, writes had what they need.
async fn assert_set_for_every_write(admin: &Client) {
    for (name, value) in [
        ("synchronous_commit", "on"),
        ("transaction_isolation", "read committed"),
        ("enable_seqscan", "off"),
        ("search_path", "pg_catalog"),
    ] {
        assert_eq!(settings::seen(admin, name).await, [value], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_are_durable_and_read_committed_whatever_the_defaults_become() {
    let postgres = Postgres::start().await;
    let admin = postgres.admin().await;
    set_defaults(&admin, "postgres").await;
    let server = Server::builder(&postgres.url())
        .flag("--database-pool-size", "2")
        .start()
        .await;
    server.wait_ready().await;
    settings::record(&admin).await;
    let mut client = server.client().await;
    let mut all_writes = async |name: &str| {
        let token = calls::granted(&mut client, name, "a", LONG)
            .await
            .fencing_token;
        calls::renew(&mut client, name, "a", token, None)
            .await
            .unwrap();
        calls::release(&mut client, name, "a", token).await.unwrap();
    };
    all_writes("before").await;
    // Under connections that are open already.
    postgres.configure("synchronous_commit", "off").await;
    postgres
        .configure("default_transaction_isolation", "serializable")
        .await;
    let seen_by_others = async || -> String {
        admin.value("SELECT setting FROM pg_file_settings WHERE name = 'synchronous_commit' ORDER BY seqno DESC LIMIT 1").await
    };
    assert_eq!(seen_by_others().await, "off");
    for n in 0..20 {
        all_writes(&format!("after {n}")).await;
    }
    assert_set_for_every_write(&admin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_told_of_the_pooler_does_not_start() {
    let database = fresh_database().await;
    let target = database.postgres().address();
    // One that refuses what we set at the start, and one that drops it.
    for ignored in ["extra_float_digits", "extra_float_digits, options"] {
        let pooler = PgBouncer::start_ignoring(target, 2, ignored).await;
        let url = pooler.url_of(database.name());
        let line = expect_no_start(Server::builder(&url), 78).await;
        assert!(line.contains("--pgbouncer"), "{line}");
        let told = Server::builder(&url).switch("--pgbouncer").start().await;
        told.wait_ready().await;
    }
}

/// Sessions that the pooler opens meanwhile stay read-only when the default is not
/// any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_full_of_sessions_born_read_only_is_good_again_in_seconds() {
    const POOL: u32 = 20;
    let database = fresh_database().await;
    let admin = database.client().await;
    let pooler = PgBouncer::start(database.postgres().address(), POOL).await;
    let url = pooler.url_of(database.name());
    let server = Server::builder(&url).switch("--pgbouncer").start().await;
    server.wait_ready().await;

    let default = format!("ALTER DATABASE {} SET", database.name());
    admin
        .run(&format!(
            "{default} default_transaction_read_only = on;
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity
              WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ))
        .await;
    eventually("health says so", async || {
        let health = server.health("").await;
        (health == Some(ServingStatus::NotServing)).then_some(())
    })
    .await;
    let mut client = server.client().await;
    calls::acquire(&mut client, "a", "b", LONG)
        .await
        .expect_err("it is meant to be read-only");
    // As many as the pooler may have, all at once.
    let mut others = Vec::new();
    while others.len() < POOL as usize - 4 {
        if let Ok(other) = Client::connect(&url).await
            && other.batch_execute("BEGIN").await.is_ok()
        {
            others.push(other);
        }
    }
    admin
        .run(&format!(
            "SET default_transaction_read_only = off; {default} default_transaction_read_only = off"
        ))
        .await;
    for other in others {
        other.run("COMMIT").await;
    }

    within(Duration::from_secs(10), "all is granted", async || {
        for _ in 0..5 {
            let mut burst = JoinSet::new();
            for n in 0..24 {
                let mut client = client.clone();
                burst.spawn(async move {
                    calls::acquire(&mut client, &format!("lock {n}"), "b", LONG).await
                });
            }
            if burst.join_all().await.iter().any(Result::is_err) {
                return None;
            }
        }
        Some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_the_pooler_cannot_find_is_named() {
    let database = fresh_database().await;
    let pooler = PgBouncer::start(database.postgres().address(), 2).await;
    let no_such = Server::builder(&pooler.url_of("no_such_database")).switch("--pgbouncer");
    let line = expect_no_start(no_such, 69).await;
    assert!(line.contains("no_such_database"), "{line}");
    assert!(!line.contains("--pgbouncer"), "{line}");
}
