//! Many clients on one name: the race in which a token drawn too early would
//! be given after a later one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Server, calls, eventually,
    history::{Held, History, deadline},
    postgres::{Client as Session, Database, fresh_database},
    row_lock::RowLock,
    server::Client,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::task::JoinSet;
use tonic::Code;

use crate::tokens::{LONG, Record, leaps, purge};

const CLIENTS: u64 = 16;

/// The shortest TTL that these servers grant.
const MIN_TTL: Duration = Duration::from_millis(100);

async fn two_servers(database: &Database) -> [Server; 2] {
    let url = database.url();
    let start = async || {
        let server = Server::builder(&url)
            .flag("--min-ttl", "100ms")
            .start()
            .await;
        server.wait_ready().await;
        server
    };
    let (one, two) = tokio::join!(start(), start());
    [one, two]
}

/// One client that takes the lock, works, and releases it or lets it expire.
async fn contend(
    mut client: Client,
    n: u64,
    seed: u64,
    over: Arc<AtomicBool>,
    record: Arc<Record>,
    history: Arc<History>,
) {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(n));
    let owner = format!("client-{n}");
    while !over.load(Ordering::Relaxed) {
        let ttl = MIN_TTL + Duration::from_millis(rng.random_range(0..50));
        let asked = Instant::now();
        let lock = match record.acquire(&mut client, "hot", &owner, ttl).await {
            Ok(Some(lock)) => lock,
            Ok(None) => {
                tokio::time::sleep(Duration::from_millis(rng.random_range(0..10))).await;
                continue;
            }
            // On a busy machine a grant may arrive with none of so short a TTL
            // left; it is then no grant.
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                continue;
            }
        };
        let start = Instant::now();
        let mut end = deadline(asked, ttl);
        if rng.random_bool(0.93) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..3))).await;
            end = end.min(Instant::now());
            // Too late, or somebody else has it by now: both are fine here.
            let _ = calls::release(&mut client, "hot", &owner, lock.fencing_token).await;
        } else {
            tokio::time::sleep_until(end.into()).await;
        }
        history.record(Held {
            resource: "hot".to_owned(),
            holder: owner.clone(),
            asked,
            start,
            end,
            token: lock.fencing_token,
        });
    }
}

/// Tokens in the order in which the leases were granted under the row's lock.
fn assert_in_order_of_grant(record: &Record) {
    let mut grants = record.grants();
    grants.sort_by_key(|grant| grant.token);
    for pair in grants.windows(2) {
        assert!(pair[0].token < pair[1].token, "twice: {pair:?}");
        assert!(
            pair[0].acquired_at <= pair[1].acquired_at,
            "the later grant has the smaller token:\n  {:?}\n  {:?}",
            pair[0],
            pair[1]
        );
    }
}

/// What holders showed one after the other, in the order of their holding.
fn assert_in_order_of_holding(record: &Record, history: &History) {
    history.assert_sound();
    record.assert_rising();
    assert_in_order_of_grant(record);
}

/// Sixteen clients after one name, for five seconds, and for as long as a busy
/// machine takes to grant it often enough.
#[expect(clippy::print_stdout, reason = "a seed is for the reader of a failure")]
async fn fight(servers: &[Server; 2]) {
    let seed = rand::rng().random();
    println!("seed: {seed}");
    let (record, history) = (Record::new(), Arc::new(History::new()));
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let server = &servers[usize::try_from(n % 2).unwrap()];
        let (record, history) = (Arc::clone(&record), Arc::clone(&history));
        clients.spawn(contend(
            server.client().await,
            n,
            seed,
            Arc::clone(&over),
            record,
            history,
        ));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    eventually("enough is granted", async || {
        (record.len() > 20).then_some(())
    })
    .await;
    over.store(true, Ordering::Relaxed);
    clients.join_all().await;
    assert_in_order_of_holding(&record, &history);
    // The belts were not needed.
    assert_eq!((leaps(&servers[0]), leaps(&servers[1])), (0, 0));
}

#[tokio::test]
async fn tokens_rise_when_sixteen_clients_fight_over_one_name() {
    let database = fresh_database().await;
    let servers = two_servers(&database).await;
    fight(&servers).await;
}

/// Every kind of tidying at once: purge of other names, vacuum, analyze.
#[tokio::test]
async fn tokens_rise_while_the_table_is_purged_and_vacuumed() {
    let database = fresh_database().await;
    let servers = two_servers(&database).await;
    let tidy = async |session: Session| {
        for n in 0_u32.. {
            // Cold names for the purge to find, on the pages of the hot one.
            session
                .run(&format!(
                    "INSERT INTO fencepost.locks
                     SELECT 'cold-{n}-' || i, 'o', true, 1, 0, 1000, now(), now() - interval '1 hour',
                            false, '', gen_random_uuid(), 1, '{{}}'
                       FROM generate_series(1, 50) AS i"
                ))
                .await;
            assert_eq!(purge(&session, Duration::from_secs(60)).await, 50);
            session.run("VACUUM fencepost.locks").await;
            session.run("ANALYZE fencepost.locks").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let session = database.client().await;
    tokio::select! {
        () = tidy(session) => {}
        () = fight(&servers) => {}
    }
}

/// One owner string in sixteen clients: each call is a new acquisition, so the
/// grants themselves race, with no lease in between to order them.
#[tokio::test]
async fn tokens_rise_in_the_order_of_grants_when_one_owner_takes_over_from_itself() {
    let database = fresh_database().await;
    let servers = two_servers(&database).await;
    let record = Record::new();
    let until = Instant::now() + Duration::from_secs(4);
    let mut clients = JoinSet::new();
    for n in 0..16 {
        let mut client = servers[n % 2].client().await;
        let record = Arc::clone(&record);
        clients.spawn(async move {
            while Instant::now() < until {
                let lock = record.acquire(&mut client, "hot", "same", LONG).await;
                assert!(lock.unwrap().is_some());
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    record.assert_rising();
    assert_in_order_of_grant(&record);
    assert_eq!((leaps(&servers[0]), leaps(&servers[1])), (0, 0));
}

/// An Acquire waits for the row while a later one is granted and released. A
/// token that was drawn before the wait is older than that one's.
#[tokio::test]
async fn a_token_is_drawn_after_the_wait_for_the_row() {
    let database = fresh_database().await;
    let url = database.url();
    let server = Server::start(&url).await;
    let mut client = server.client().await;
    let record = Record::new();
    record.burst(&mut client, "hot", 1).await;

    let row = RowLock::hold(&url, "hot").await;
    let waiting = record.granted(&mut client, "hot", "late", LONG);
    let meanwhile = async {
        row.wait_for_waiters(1).await;
        // As another replica would do it: granted, shown, released.
        let shown: i64 = row
            .client()
            .value(
                "UPDATE fencepost.locks
                    SET fencing_token = nextval('fencepost.fencing_tokens'), prev_token = fencing_token
                  WHERE resource = 'hot' RETURNING fencing_token",
            )
            .await;
        row.commit().await;
        shown
    };
    let (late, shown) = tokio::join!(waiting, meanwhile);
    assert!(late.fencing_token > shown, "{late:?}, {shown}");
    // Not thanks to the row's check.
    assert_eq!(leaps(&server), 0);
}

/// A row that went with its lease would let a token through that was drawn
/// before the next one was given: nothing is left to compare it with.
#[tokio::test]
async fn a_name_keeps_its_row_and_token_when_its_lease_ends() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let record = Record::new();
    let released = record.granted(&mut client, "released", "a", LONG).await;
    calls::release(&mut client, "released", "a", released.fencing_token)
        .await
        .unwrap();
    let ttl = Duration::from_millis(500);
    let expired = record.granted(&mut client, "expired", "a", ttl).await;
    tokio::time::sleep(ttl).await;
    let free = calls::get(&mut client, "expired").await;
    calls::expect_error(free, Code::NotFound, "LOCK_NOT_FOUND");
    let session = database.client().await;
    for lock in [released, expired] {
        let kept = format!(
            "SELECT max(fencing_token) FROM fencepost.locks WHERE resource = '{}'",
            lock.resource
        );
        let kept: Option<i64> = session.value(&kept).await;
        assert_eq!(kept, Some(lock.fencing_token));
        let next = record.granted(&mut client, &lock.resource, "b", LONG).await;
        assert!(next.fencing_token > lock.fencing_token);
    }
}
