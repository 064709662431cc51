//! Answers that are lost on the way: to the client, and from the database.

use std::time::{Duration, Instant};

use fencepost_proto::v1::AcquireResponse;
use fencepost_support::{
    Postgres, Server,
    calls::{expect_retryable, get, grant_in, granted, renew, request_with_id, send},
    eventually,
    postgres::{Database, fresh_database},
    proxy::{Flow, Proxy},
    server::{Client, channel_at, endpoint_at},
    wait::within,
};
use futures_util::future::join_all;
use rand::Rng as _;
use tokio::task::{JoinSet, LocalSet};
use tonic::{Code, Status};

use super::{LONG, generator, seed};

/// By when a lease is given back once the database is there again.
const RETURN: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_lost_between_server_and_client_is_given_again() {
    let seed = seed("lost");
    let database = fresh_database().await;
    let first = Server::start(&database.url()).await;
    let second = Server::start(&database.url()).await;

    let local = LocalSet::new();
    let mut workers = JoinSet::new();
    for worker in 0..10 {
        let proxy = Proxy::start(first.grpc()).await;
        let mut there = second.client().await;
        let mut rng = generator(seed, worker);
        workers.spawn_local_on(
            async move {
                for n in 0..20 {
                    let name = format!("n-{worker}-{n}");
                    let request = request_with_id(&name, "owner", LONG, &name);
                    // HTTP/2 settles in some 60 bytes; an answer takes some 200.
                    let flow = match n % 2 {
                        0 => Flow::ResetAfter(rng.random_range(0..250)),
                        _ => Flow::SwallowAfter(rng.random_range(0..250)),
                    };
                    proxy.set_down(flow);
                    let mut here = Client::new(endpoint_at(proxy.address()).connect_lazy());
                    let patience = Duration::from_millis(rng.random_range(50..200));
                    let answer =
                        tokio::time::timeout(patience, send(&mut here, request.clone())).await;
                    proxy.reset().await;
                    let lock = match answer {
                        Ok(Ok(answer)) => answer.lock.unwrap(),
                        _ => grant_in(send(&mut there, request).await),
                    };
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    let seen = get(&mut there, &name).await.unwrap();
                    assert_eq!(seen.fencing_token, lock.fencing_token, "{name}");
                    renew(&mut there, &name, "owner", lock.fencing_token, None)
                        .await
                        .unwrap();
                }
            },
            &local,
        );
    }
    local.run_until(workers.join_all()).await;
}

/// A server whose way to the database can be cut, and one that is well.
struct Cut {
    database: Database,
    proxy: Proxy,
    server: Server,
    well: Server,
}

impl Cut {
    async fn start() -> Self {
        let database = fresh_database().await;
        let proxy = Proxy::start(database.postgres().address()).await;
        let server = Server::builder(&Postgres::url_via(proxy.address(), database.name()))
            .flag("--request-timeout", "2s")
            .flag("--database-pool-size", "4")
            .start()
            .await;
        let well = Server::start(&database.url()).await;
        server.wait_ready().await;
        Self {
            database,
            proxy,
            server,
            well,
        }
    }

    async fn clients(&self) -> (Client, Client) {
        (
            Client::new(channel_at(self.server.grpc()).await),
            self.well.client().await,
        )
    }

    /// Has the database grant leases whose answers never arrive. Returns the
    /// names of at least two, which were in one round.
    async fn lose(&self, client: &Client) -> Vec<String> {
        for attempt in 0..10 {
            eventually(
                "a connection works, with the statement prepared",
                async || {
                    let warm = self.acquire_all(client, "warm-up").await;
                    warm.iter().all(|(_, answer)| answer.is_ok()).then_some(())
                },
            )
            .await;
            self.proxy.swallow_down();
            let sent = Instant::now();
            let mut names = Vec::new();
            for (name, answer) in self.acquire_all(client, &format!("name-{attempt}")).await {
                let status = answer.expect_err(&name);
                assert!(
                    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded),
                    "{status:?}"
                );
                expect_retryable(&status);
                names.push(name);
            }
            assert!(sent.elapsed() < Duration::from_secs(3));
            let granted = self.granted_of(names).await;
            if granted.len() >= 2 {
                return granted;
            }
            // The first of them went alone.
            self.proxy.forward().await;
            self.proxy.reset().await;
        }
        panic!("no two were in one round");
    }

    async fn granted_of(&self, names: Vec<String>) -> Vec<String> {
        let admin = self.database.client().await;
        let mut granted = Vec::new();
        for name in names {
            let live = format!(
                "SELECT count(*) FROM fencepost.locks WHERE NOT released AND resource = '{name}'"
            );
            if admin.value::<i64>(&live).await == 1 {
                granted.push(name);
            }
        }
        granted
    }

    async fn acquire_all(
        &self,
        client: &Client,
        stem: &str,
    ) -> Vec<(String, Result<AcquireResponse, Status>)> {
        let calls = (0..4).map(async |n| {
            let mut client = client.clone();
            let name = format!("{stem}-{n}");
            let request = request_with_id(&name, "owner", LONG, &name);
            (name, send(&mut client, request).await)
        });
        // In one task, so that they are sent together.
        join_all(calls).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_answer_the_database_lost_is_given_back() {
    let cut = Cut::start().await;
    let (client, mut well) = cut.clients().await;
    let names = cut.lose(&client).await;
    cut.proxy.forward().await;
    cut.proxy.reset().await;
    let start = Instant::now();
    for name in names {
        within(RETURN, "the lock is free", async || {
            is_free(&mut well, &name).await
        })
        .await;
        granted(&mut well, &name, "another", LONG).await;
    }
    let after = start.elapsed();
    println!("given back {after:?} after the database was there");
}

async fn is_free(client: &mut Client, name: &str) -> Option<()> {
    match get(client, name).await {
        Err(status) if status.code() == Code::NotFound => Some(()),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_keeps_the_grant_whose_answer_the_database_lost() {
    let cut = Cut::start().await;
    let (client, mut well) = cut.clients().await;
    let names = cut.lose(&client).await;
    let kept = names[0].as_str();
    let replayed = grant_in(send(&mut well, request_with_id(kept, "owner", LONG, kept)).await);
    cut.proxy.forward().await;
    cut.proxy.reset().await;
    // The others are given back: the giver has been through its queue.
    for name in &names[1..] {
        within(RETURN, "the others are free", async || {
            is_free(&mut well, name).await
        })
        .await;
    }
    let seen = get(&mut well, kept).await.expect("the replay keeps it");
    assert_eq!(seen.fencing_token, replayed.fencing_token);
    renew(&mut well, kept, "owner", seen.fencing_token, None)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_left_takes_nothing_from_its_own_retry() {
    let cut = Cut::start().await;
    let (mut client, mut well) = cut.clients().await;
    granted(&mut client, "warm", "owner", LONG).await;
    // The grant is made, its answer is on the way, and its caller leaves.
    cut.proxy.set_down(Flow::Hold);
    let request = request_with_id("a", "owner", LONG, "a");
    let call = tokio::spawn({
        let (mut client, request) = (client.clone(), request.clone());
        async move { send(&mut client, request).await }
    });
    let first = eventually("the database has granted it", async || {
        get(&mut well, "a").await.ok()
    })
    .await;
    call.abort();
    let _ = call.await;
    // Its retry elsewhere is told of the same lease.
    let replayed = grant_in(send(&mut well, request).await);
    assert_eq!(replayed.fencing_token, first.fencing_token);
    // Now the first server hears of its grant, and finds nobody to tell.
    cut.proxy.forward().await;
    granted(&mut client, "warm", "owner", LONG).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let seen = get(&mut well, "a").await.expect("it was not taken back");
    assert_eq!(seen.fencing_token, replayed.fencing_token);
    renew(&mut client, "a", "owner", seen.fencing_token, None)
        .await
        .unwrap();
}
