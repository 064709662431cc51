//! A database that answers, and must not be used.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Postgres, Server,
    calls::{get, granted, release},
    eventually,
    postgres::fresh_database,
};
use tokio::task::JoinSet;
use tonic::Code;

use super::{LONG, Patient};

#[tokio::test(flavor = "multi_thread")]
async fn a_database_made_read_only_and_back() {
    let postgres = Postgres::start().await;
    let mut patient = Patient::new(Server::start(&postgres.url()).await).await;
    let changed = Instant::now();
    postgres
        .configure("default_transaction_read_only", "on")
        .await;
    patient.falls_ill("read-only", changed).await;
    // Reads too: this may be yesterday's primary.
    let status = get(&mut patient.server.client().await, "load").await;
    assert_eq!(status.unwrap_err().code(), Code::Unavailable);
    let back = Instant::now();
    postgres
        .configure("default_transaction_read_only", "off")
        .await;
    patient.recovers("read-only", back).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_turned_off_under_the_server_and_on_again() {
    let postgres = Postgres::start().await;
    let mut patient = Patient::new(Server::start(&postgres.url()).await).await;
    let changed = Instant::now();
    postgres.configure("fsync", "off").await;
    patient.falls_ill("fsync off", changed).await;
    let mut client = patient.server.client().await;
    let refused = fencepost_support::calls::acquire(&mut client, "toy", "owner", LONG).await;
    super::assert_outage(&refused.unwrap_err());
    let back = Instant::now();
    postgres.configure("fsync", "on").await;
    patient.recovers("fsync off", back).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_made_unlogged_and_logged_again() {
    let database = fresh_database().await;
    let mut patient = Patient::new(Server::start(&database.url()).await).await;
    let admin = database.client().await;
    for table in ["locks", "identity"] {
        let changed = Instant::now();
        admin
            .run(&format!("ALTER TABLE fencepost.{table} SET UNLOGGED"))
            .await;
        patient.falls_ill("unlogged", changed).await;
        let back = Instant::now();
        admin
            .run(&format!("ALTER TABLE fencepost.{table} SET LOGGED"))
            .await;
        patient.recovers("unlogged", back).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_table_renamed_away_and_back() {
    let database = fresh_database().await;
    let mut patient = Patient::new(Server::start(&database.url()).await).await;
    let admin = database.client().await;
    let renamed = Instant::now();
    admin
        .run("ALTER TABLE fencepost.locks RENAME TO elsewhere")
        .await;
    patient.falls_ill("no table", renamed).await;
    let back = Instant::now();
    admin
        .run("ALTER TABLE fencepost.elsewhere RENAME TO locks")
        .await;
    patient.recovers("no table", back).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serializable_database_answers_contention_with_answers() {
    let database = fresh_database().await;
    let admin = database.client().await;
    let name = database.name();
    admin
        .run(&format!(
            "ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
        ))
        .await;
    let mut replicas = Vec::new();
    for _ in 0..3 {
        replicas.push(Server::start(&database.url()).await);
    }
    let counts = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for caller in 0..64_usize {
        let mut client = replicas[caller % 3].client().await;
        let (counts, over) = (Arc::clone(&counts), Arc::clone(&over));
        callers.spawn(async move {
            let owner = format!("owner-{caller}");
            let (grants, refusals) = &*counts;
            for n in 0.. {
                if over.load(Relaxed) {
                    break;
                }
                let name = format!("name-{}", (caller + n) % 8);
                // Any error at all is one too many.
                let answer = fencepost_support::calls::acquire(&mut client, &name, &owner, LONG)
                    .await
                    .unwrap();
                match answer.lock {
                    Some(lock) => {
                        grants.fetch_add(1, Relaxed);
                        let token = lock.fencing_token;
                        release(&mut client, &name, &owner, token).await.unwrap();
                    }
                    None => _ = refusals.fetch_add(1, Relaxed),
                }
            }
        });
    }
    // For a while, and for as long as a busy machine takes to do enough.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let (grants, refusals) = eventually("enough is granted and refused", async || {
        let (grants, refusals) = (counts.0.load(Relaxed), counts.1.load(Relaxed));
        (grants > 100 && refusals > 100).then_some((grants, refusals))
    })
    .await;
    over.store(true, Relaxed);
    callers.join_all().await;
    println!("serializable: {grants} grants, {refusals} refusals, no error");
    // Not even ones that were repeated out of sight.
    let refused: i64 = admin
        .value("SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()")
        .await;
    assert!(refused < 20, "{refused} statements were rolled back");
    // Every release that was sent took effect.
    let mut client = replicas[0].client().await;
    for n in 0..8 {
        granted(&mut client, &format!("name-{n}"), "last", LONG).await;
    }
}
