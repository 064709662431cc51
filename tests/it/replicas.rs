//! Three replicas on one database are one lock server: what one has written
//! another reads at once, and a lease ends everywhere at the same time.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use fencepost_support::{
    Server, calls,
    postgres::{Database, fresh_database},
    server::Client,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::task::JoinSet;
use tonic::Code;

use crate::programs::{bare, cli, run};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(500);

async fn three() -> (Database, Vec<Server>) {
    let database = fresh_database().await;
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(Server::start(&database.url()).await);
    }
    (database, servers)
}

async fn clients(servers: &[Server]) -> Vec<Client> {
    let mut clients = Vec::new();
    for server in servers {
        clients.push(server.client().await);
    }
    clients
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_replica_wrote_the_others_read_at_once() {
    const TASKS: u64 = 8;
    const ROUNDS: usize = 200;
    let (_database, servers) = three().await;
    let seed: u64 = rand::rng().random();
    println!("seed {seed}");
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let mut replicas = clients(&servers).await;
        let mut rng = StdRng::seed_from_u64(seed + task);
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let name = format!("lock {task} {}", round % 7);
                let [first, second, third] = [0, 1, 2].map(|n| (n + rng.random_range(0..3)) % 3);
                // A replica that remembers what it saw last is wrong a moment later.
                let free = calls::get(&mut replicas[second], &name).await;
                calls::expect_error(free, Code::NotFound, "LOCK_NOT_FOUND");
                let lock = calls::granted(&mut replicas[first], &name, "a", LONG).await;
                let token = lock.fencing_token;
                let found = calls::get(&mut replicas[second], &name).await.unwrap();
                assert_eq!(found.fencing_token, token);
                let renewed = calls::renew(&mut replicas[third], &name, "a", token, None).await;
                assert_eq!(renewed.unwrap().fencing_token, token);
                calls::refused(&mut replicas[first], &name, "b", LONG).await;
                calls::release(&mut replicas[second], &name, "a", token)
                    .await
                    .unwrap();
                let free = calls::get(&mut replicas[third], &name).await;
                calls::expect_error(free, Code::NotFound, "LOCK_NOT_FOUND");
            }
        });
    }
    tasks.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lock_is_free_everywhere_and_never_has_a_negative_rest() {
    let (database, servers) = three().await;
    let mut replicas = clients(&servers).await;
    calls::granted(&mut replicas[0], "a", "b", SHORT).await;
    let database = Arc::new(database.client().await);
    let mut looks = 0;
    // Up to its end and beyond: held with a sensible rest, or free.
    'looking: loop {
        for client in &mut replicas {
            match calls::get(client, "a").await {
                Ok(lock) => {
                    let rest = calls::span(lock.remaining);
                    // Nothing is left of one that ran out on its way.
                    assert!(rest <= SHORT, "{rest:?}");
                    let ttl = calls::span(lock.ttl);
                    assert_eq!(ttl, SHORT);
                }
                Err(status) => {
                    assert_eq!(status.code(), Code::NotFound, "{status:?}");
                    break 'looking;
                }
            }
            looks += 1;
        }
    }
    assert!(looks > 0, "it was never seen to be held");
    let rows: i64 = database
        .value("SELECT count(*) FROM fencepost.locks WHERE NOT released AND expires_at <= now()")
        .await;
    assert_eq!(rows, 1, "nobody has cleaned up");
    for client in &mut replicas {
        let free = calls::get(client, "a").await;
        calls::expect_error(free, Code::NotFound, "LOCK_NOT_FOUND");
    }
    let mut command = bare(cli());
    command.args(["get", "a", "--endpoint", &servers[1].url()]);
    let ended = run(command).await;
    assert_eq!(ended.code, Some(1), "{}", ended.said());
    calls::granted(&mut replicas[2], "a", "c", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_refused_knows_when_to_come_again() {
    let (_database, servers) = three().await;
    let mut replicas = clients(&servers).await;
    let ttl = Duration::from_secs(2);
    calls::granted(&mut replicas[0], "a", "holder", ttl).await;
    for (n, client) in replicas.iter_mut().enumerate() {
        let next = format!("next {n}");
        let holder = calls::refused(client, "a", &next, ttl).await;
        let rest = calls::span(holder.remaining);
        assert!(rest <= ttl && !rest.is_zero(), "{rest:?}");
        // It is what was left at the least.
        tokio::time::sleep(rest + Duration::from_millis(250)).await;
        calls::granted(client, "a", &next, ttl).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_names_that_resemble_each_other_are_independent() {
    const NAMES: usize = 10_000;
    const SIGNS: [&str; 14] = [
        "a", "A", "b", " ", "/", "%", "_", "\\", "'", "\u{e4}", "a\u{308}", "\u{df}", "ss",
        "\u{200b}",
    ];
    let (database, servers) = three().await;
    let seed: u64 = rand::rng().random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut names = BTreeSet::new();
    while names.len() < NAMES {
        let length = rng.random_range(1..=6);
        let signs = (0..length).map(|_| SIGNS[rng.random_range(0..SIGNS.len())]);
        names.insert(signs.collect::<String>());
    }
    let names: Vec<String> = names.into_iter().collect();
    let mut tasks = JoinSet::new();
    for (n, names) in names.chunks(NAMES / 40).enumerate() {
        let mut client = servers[n % servers.len()].client().await;
        let names = names.to_owned();
        tasks.spawn(async move {
            for (m, name) in names.iter().enumerate() {
                // An owner of its own: a name that is another's would be refused.
                let owner = format!("owner {n} {m}");
                let lock = calls::granted(&mut client, name, &owner, LONG).await;
                assert_eq!(&lock.resource, name);
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let rows: i64 = database
        .client()
        .await
        .value("SELECT count(*) FROM fencepost.locks")
        .await;
    assert_eq!(usize::try_from(rows).unwrap(), NAMES);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_databases_of_one_cluster_are_two_lock_servers() {
    let databases = [fresh_database().await, fresh_database().await];
    let [one, two] = &databases;
    let one = Server::start(&one.url()).await;
    let two = Server::start(&two.url()).await;
    let (mut one, mut two) = (one.client().await, two.client().await);
    let lock = calls::granted(&mut one, "a", "b", LONG).await;
    calls::granted(&mut two, "a", "c", LONG).await;
    calls::refused(&mut one, "a", "c", LONG).await;
    let free = calls::release(&mut two, "a", "b", lock.fencing_token).await;
    calls::expect_error(free, Code::PermissionDenied, "NOT_OWNER");
}

#[tokio::test(flavor = "multi_thread")]
async fn release_works_from_anywhere_and_says_what_it_found() {
    let (_database, servers) = three().await;
    let mut replicas = clients(&servers).await;

    // From another replica, another connection, another program.
    let lock = calls::granted(&mut replicas[0], "a", "b", LONG).await;
    calls::release(&mut replicas[1], "a", "b", lock.fencing_token)
        .await
        .unwrap();
    let again = calls::release(&mut replicas[0], "a", "b", lock.fencing_token).await;
    calls::expect_error(again, Code::NotFound, "LOCK_NOT_FOUND");
    let lock = calls::granted(&mut replicas[0], "a", "b", LONG).await;
    let token = lock.fencing_token.to_string();
    for code in [0, 76] {
        let mut command = bare(cli());
        command.args(["release", "a", "--owner", "b", "--token", &token]);
        command.args(["--endpoint", &servers[2].url()]);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(code), "{}", ended.said());
    }

    // Too late, and nobody else has it.
    let lock = calls::granted(&mut replicas[0], "late", "b", SHORT).await;
    tokio::time::sleep(SHORT * 2).await;
    let late = calls::release(&mut replicas[1], "late", "b", lock.fencing_token).await;
    calls::expect_error(late, Code::NotFound, "LOCK_NOT_FOUND");

    // Too late, and somebody has.
    let lock = calls::granted(&mut replicas[0], "taken", "b", SHORT).await;
    tokio::time::sleep(SHORT * 2).await;
    let other = calls::granted(&mut replicas[1], "taken", "c", LONG).await;
    let late = calls::release(&mut replicas[2], "taken", "b", lock.fencing_token).await;
    calls::expect_error(late, Code::PermissionDenied, "NOT_OWNER");
    let held = calls::get(&mut replicas[0], "taken").await.unwrap();
    assert_eq!(held.fencing_token, other.fencing_token);

    // One's own later lease is not given back by a late release either.
    let newer = calls::granted(&mut replicas[2], "taken", "c", LONG).await;
    let late = calls::release(&mut replicas[0], "taken", "c", other.fencing_token).await;
    calls::expect_error(late, Code::Aborted, "TOKEN_SUPERSEDED");
    let held = calls::get(&mut replicas[1], "taken").await.unwrap();
    assert_eq!(held.fencing_token, newer.fencing_token);
}
