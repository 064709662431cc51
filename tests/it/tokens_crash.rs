//! Tokens and leases across crashes: of Postgres as a whole, of one of its
//! backends, and of a server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use fencepost_support::{
    Server, calls, eventually,
    postgres::Client as Session,
    system::{self, children_of},
    wait::within,
};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::tokens::{LONG, Load, Record, quick_to_recover};

/// Takes one new name after the other and keeps them: what a crash must not
/// forget.
struct Keeper {
    kept: Arc<Mutex<BTreeMap<String, i64>>>,
    task: JoinHandle<()>,
}

impl Keeper {
    async fn start(record: &Arc<Record>, server: &Server, prefix: &'static str) -> Self {
        let mut client = server.client().await;
        let record = Arc::clone(record);
        let kept = Arc::<Mutex<BTreeMap<String, i64>>>::default();
        let all = Arc::clone(&kept);
        let task = tokio::spawn(async move {
            for n in 0_u64.. {
                let name = format!("{prefix}-{n}");
                match record.acquire(&mut client, &name, prefix, LONG).await {
                    Ok(Some(lock)) => {
                        all.lock().unwrap().insert(name, lock.fencing_token);
                    }
                    Ok(None) => panic!("{name} is taken by somebody else"),
                    // May have happened; the next name is as good.
                    Err(_) => {}
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self { kept, task }
    }

    fn kept(&self) -> BTreeMap<String, i64> {
        self.kept.lock().unwrap().clone()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Panics unless the database has each lease that was answered, as granted.
async fn assert_remembered(session: &Session, kept: &BTreeMap<String, i64>) {
    let (names, tokens): (Vec<&String>, Vec<i64>) = kept.iter().unzip();
    let lost = session
        .query(
            "SELECT k.resource, k.token, l.fencing_token, l.released
               FROM unnest($1::text[], $2::bigint[]) AS k (resource, token)
               LEFT JOIN fencepost.locks AS l ON l.resource = k.resource
              WHERE l.fencing_token IS DISTINCT FROM k.token
                 OR l.released OR l.expires_at <= clock_timestamp()",
            &[&names, &tokens],
        )
        .await
        .unwrap();
    assert!(lost.is_empty(), "{} forgotten: {:?}", lost.len(), lost[0]);
}

/// A fresh name is granted within ten seconds, through each server.
async fn serves_again(record: &Record, servers: &[&Server], round: usize) {
    for (n, server) in servers.iter().enumerate() {
        let mut client = server.client().await;
        let name = format!("again-{round}-{n}");
        let patience = Duration::from_secs(10);
        within(patience, "calls succeed again", async || {
            let answer = record.acquire(&mut client, &name, "probe", LONG).await;
            answer.ok().flatten()
        })
        .await;
    }
}

#[tokio::test]
async fn tokens_rise_and_leases_stay_when_postgres_is_killed_20_times_under_load() {
    let mut postgres = quick_to_recover().await;
    let url = postgres.url();
    let (one, two) = tokio::join!(Server::start(&url), Server::start(&url));
    let servers = [&one, &two];
    let record = Record::new();
    let load = Load::start(&record, &servers, 4, 10).await;
    let keepers = [
        Keeper::start(&record, &one, "kept-one").await,
        Keeper::start(&record, &two, "kept-two").await,
    ];
    for round in 0..20 {
        let before = record.len();
        eventually("grants are answered", async || {
            (record.len() >= before + 40).then_some(())
        })
        .await;
        postgres.kill9().await;
        let kept = keepers.each_ref().map(Keeper::kept);
        postgres.start_again().await;
        serves_again(&record, &servers, round).await;
        let session = postgres.admin().await;
        for kept in &kept {
            assert_remembered(&session, kept).await;
        }
        // The holder hears the same.
        let mut client = servers[round % 2].client().await;
        let (name, token) = kept[0].last_key_value().unwrap();
        let lock = calls::renew(&mut client, name, "kept-one", *token, None).await;
        assert_eq!(lock.unwrap().fencing_token, *token);
    }
    load.stop().await;
    record.assert_rising();
}

/// The postmaster stays, and with it the identity: here nothing leaps, and the
/// write-ahead log alone keeps the tokens.
#[tokio::test]
async fn tokens_rise_when_a_backend_is_killed_and_postgres_recovers_in_place() {
    let postgres = quick_to_recover().await;
    let started = "SELECT pg_postmaster_start_time()::text";
    let start: String = postgres.admin().await.value(started).await;
    let server = Server::start(&postgres.url()).await;
    let record = Record::new();
    let load = Load::start(&record, &[&server], 3, 8).await;
    let keeper = Keeper::start(&record, &server, "kept").await;
    for round in 0..6 {
        load.more(100).await;
        let children = children_of(postgres.pid());
        let victim = children[children.len() - 1];
        system::signal(victim, Signal::KILL);
        eventually("the victim has gone", async || {
            (!system::is_alive(victim)).then_some(())
        })
        .await;
        let kept = keeper.kept();
        serves_again(&record, &[&server], round).await;
        let session = eventually("postgres answers", async || {
            Session::connect(&postgres.url()).await.ok()
        })
        .await;
        assert_remembered(&session, &kept).await;
        assert_eq!(session.value::<String>(started).await, start);
    }
    load.stop().await;
    record.assert_rising();
}

#[tokio::test]
async fn tokens_rise_and_leases_stay_when_a_server_is_killed() {
    let postgres = fencepost_support::postgres::fresh_database().await;
    let url = postgres.url();
    let (mut one, two) = tokio::join!(Server::start(&url), Server::start(&url));
    let record = Record::new();
    for round in 0..4 {
        let load = Load::start(&record, &[&one, &two], 3, 8).await;
        let keeper = Keeper::start(&record, &one, ["a", "b", "c", "d"][round]).await;
        load.more(150).await;
        one.kill9().await;
        let kept = keeper.kept();
        drop(keeper);
        load.more(50).await;
        load.stop().await;
        let session = postgres.client().await;
        assert_remembered(&session, &kept).await;
        one.restart().await;
        one.wait_ready().await;
    }
    record.assert_rising();
}
