//! Tokens and leases while idle names are purged.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server, calls, eventually,
    postgres::{Client as Session, Database, fresh_database},
    reason,
    server::Client,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::task::JoinSet;

use crate::tokens::{LONG, Record, purge};

const RETENTION: Duration = Duration::from_secs(5);

async fn purging_server(database: &Database) -> Server {
    let server = Server::builder(&database.url())
        .flag("--request-timeout", "500ms")
        .flag("--purge-retention", "5s")
        .flag("--purge-retention-floor", "1s")
        .flag("--log", "info,fencepostd=debug")
        .start()
        .await;
    server.wait_ready().await;
    server
}

/// Rows as they are after `idle` since the end of their leases.
async fn make_idle(session: &Session, names: &str) {
    session
        .run(&format!(
            "UPDATE fencepost.locks
                SET acquired_at = acquired_at - interval '1 hour', expires_at = now() - interval '50 minutes'
              WHERE resource LIKE '{names}%'"
        ))
        .await;
}

async fn rows(session: &Session, names: &str) -> i64 {
    session
        .value(&format!(
            "SELECT count(*) FROM fencepost.locks WHERE resource LIKE '{names}%'"
        ))
        .await
}

/// Renews until told otherwise; panics when the lease is lost.
async fn hold(mut client: Client, name: String, owner: &str, token: i64, ttl: Duration) {
    let mut confirmed = Instant::now();
    loop {
        let asked = Instant::now();
        match calls::renew(&mut client, &name, owner, token, None).await {
            Ok(lock) => {
                assert_eq!(lock.fencing_token, token);
                confirmed = asked;
            }
            Err(status) => {
                let lost = [
                    "LOCK_NOT_FOUND",
                    "NOT_OWNER",
                    "TOKEN_UNKNOWN",
                    "TOKEN_SUPERSEDED",
                ];
                let reason = reason(&status).unwrap_or_default();
                assert!(
                    confirmed.elapsed() > ttl || !lost.contains(&reason.as_str()),
                    "{name} was lost: {status:?}"
                );
                // A machine that was too slow for a short TTL proves nothing.
                if reason == "LOCK_EXPIRED" {
                    return;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
}

#[tokio::test]
async fn purge_takes_idle_names_only_and_tokens_go_on_above_them() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    // Names from before, by a server that does not purge for an hour.
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    for n in 0..50 {
        record.burst(&mut client, &format!("idle-{n}"), 1).await;
    }
    record
        .granted(&mut client, "idle-abandoned", "gone", LONG)
        .await;
    make_idle(&session, "idle-").await;
    // More than one page of names, as idle as those.
    session
        .run(
            "INSERT INTO fencepost.locks
             SELECT 'idle-many-' || i, owner, released, fencing_token, prev_token, ttl_ms, acquired_at, expires_at,
                    renewed, request_id, attempt, claims, labels
               FROM fencepost.locks, generate_series(1, 2500) AS i WHERE resource = 'idle-1'",
        )
        .await;
    let before = rows(&session, "").await;
    assert_eq!(before, 2551);

    let start = Instant::now();
    let (one, two) = tokio::join!(purging_server(&database), purging_server(&database));
    let mut holders = JoinSet::new();
    for n in 0..20 {
        // Live for long, and live by renewal alone.
        let (name, ttl) = (format!("live-{n}"), [LONG, Duration::from_secs(3)][n % 2]);
        let mut client = one.client().await;
        let lock = record.granted(&mut client, &name, "holder", ttl).await;
        if n % 2 == 1 {
            let client = two.client().await;
            holders.spawn(hold(client, name, "holder", lock.fencing_token, ttl));
        }
    }
    // Ended, but not for as long as the retention.
    let mut recent = Vec::new();
    eventually("the idle names are gone", async || {
        let name = format!("recent-{}", recent.len());
        record.burst(&mut client, &name, 1).await;
        recent.push((name, Instant::now()));
        let left = rows(&session, "idle-").await;
        assert!(
            left == before || start.elapsed() >= RETENTION,
            "purged {:?} after the start",
            start.elapsed()
        );
        // Nothing that ended a moment ago is gone.
        for (name, ended) in recent.iter().rev().take(5) {
            let there = rows(&session, name).await > 0;
            assert!(there || ended.elapsed() > RETENTION, "{name} is gone");
        }
        (left == 0).then_some(())
    })
    .await;
    while let Some(ended) = holders.try_join_next() {
        ended.unwrap();
    }
    holders.abort_all();
    for n in (0..20).step_by(2) {
        let lock = calls::get(&mut client, &format!("live-{n}")).await.unwrap();
        assert_eq!(lock.owner, "holder");
    }

    let highest = record.highest();
    for n in 0..50 {
        let name = format!("idle-{n}");
        let lock = record.granted(&mut client, &name, "next", LONG).await;
        assert!(lock.fencing_token > highest);
    }
    record.assert_rising();
    // Side by side, and neither in the other's way.
    let lines = [one.logs(), two.logs()].concat();
    assert!(lines.iter().any(|line| line.contains("purged idle names")));
    assert!(!lines.iter().any(|line| line.contains("deadlock")));
    assert!(
        !lines
            .iter()
            .any(|line| line.contains("purge will try again"))
    );
}

/// Purge looks at a page of names first and deletes afterwards. Here it runs
/// without pause and with no retention to speak of, next to clients that take
/// the names again the moment they are free.
#[tokio::test]
async fn purge_never_takes_a_name_that_was_taken_again_meanwhile() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let record = Record::new();
    let purge_on = async |session: Session| -> i32 {
        let mut purged = 0;
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            purged += purge(&session, Duration::from_millis(1)).await;
        }
        purged
    };
    let mut clients = JoinSet::new();
    for n in 0..12 {
        let mut client = server.client().await;
        let record = std::sync::Arc::clone(&record);
        clients.spawn(async move {
            let owner = format!("client-{n}");
            for round in 0_u32.. {
                let name = format!("name-{n}-{}", round % 40);
                let lock = record.granted(&mut client, &name, &owner, LONG).await;
                let token = lock.fencing_token;
                let renewed = calls::renew(&mut client, &name, &owner, token, None).await;
                renewed.unwrap();
                calls::release(&mut client, &name, &owner, token)
                    .await
                    .unwrap();
            }
        });
    }
    let (one, two) = (database.client().await, database.client().await);
    let (one, two) = tokio::join!(purge_on(one), purge_on(two));
    assert!(one > 0 && two > 0, "{one}, {two}");
    if let Some(ended) = clients.try_join_next() {
        ended.unwrap();
    }
    clients.abort_all();
}

/// A name is taken again between purge's look at it and its deletion: purge is
/// held up at the name before.
#[tokio::test]
async fn purge_judges_a_name_again_under_its_lock() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let record = Record::new();
    for name in ["idle-a", "idle-b", "idle-c"] {
        record.burst(&mut client, name, 1).await;
    }
    let (gate, session) = tokio::join!(database.client(), database.client());
    make_idle(&gate, "idle-").await;
    gate.run(
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN OLD; END';
         CREATE TRIGGER wait BEFORE DELETE ON fencepost.locks FOR EACH ROW
             WHEN (OLD.resource = 'idle-a') EXECUTE FUNCTION public.wait();
         SELECT pg_advisory_lock(1)",
    )
    .await;
    let purged = purge(&session, Duration::from_secs(60));
    let meanwhile = async {
        eventually("purge waits at the first name", async || {
            let waiting = "SELECT count(*) FROM pg_locks
                            WHERE locktype = 'advisory' AND NOT granted
                              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            (gate.value::<i64>(waiting).await == 1).then_some(())
        })
        .await;
        let lock = record.granted(&mut client, "idle-b", "next", LONG).await;
        gate.run("SELECT pg_advisory_unlock(1)").await;
        lock
    };
    let (purged, lock) = tokio::join!(purged, meanwhile);
    assert_eq!(purged, 2, "the first and the last");
    let found = calls::get(&mut client, "idle-b").await.unwrap();
    assert_eq!(found.fencing_token, lock.fencing_token);
}

/// A replica that was frozen wakes up with what it believed before, and purges.
#[tokio::test]
async fn a_replica_that_was_frozen_takes_no_lease_that_was_renewed_elsewhere() {
    let database = fresh_database().await;
    let record = Record::new();
    let (awake, frozen) = tokio::join!(purging_server(&database), purging_server(&database));
    let ttl = Duration::from_secs(3);
    let mut holders = JoinSet::new();
    let mut leases = Vec::new();
    for n in 0..10 {
        // Granted by the one, kept by the other.
        let name = format!("live-{n}");
        let mut client = frozen.client().await;
        let lock = record.granted(&mut client, &name, "holder", ttl).await;
        let client = awake.client().await;
        holders.spawn(hold(client, name, "holder", lock.fencing_token, ttl));
        leases.push(lock);
    }
    let seed = rand::rng().random();
    println!("seed: {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..4 {
        frozen.sigstop();
        tokio::time::sleep(Duration::from_millis(rng.random_range(500..3000))).await;
        frozen.sigcont();
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..1500))).await;
    }
    frozen.wait_ready().await;
    while let Some(ended) = holders.try_join_next() {
        ended.unwrap();
    }
    assert!(holders.len() >= 9, "leases expired: a machine too slow");
    let mut client = awake.client().await;
    for lock in leases {
        let found = calls::get(&mut client, &lock.resource).await;
        if let Ok(found) = found {
            assert_eq!(found.fencing_token, lock.fencing_token);
        }
    }
    holders.abort_all();
}
