//! A restart of the database is one leap of the tokens, however many replicas
//! and calls notice it at once.

use std::time::{Duration, Instant};

use fencepost_support::{Postgres, Server, calls, postgres::Stop};

const REPLICAS: usize = 3;
const CLIENTS: usize = 12;

fn leaps(server: &Server) -> usize {
    let lines = server.logs();
    lines
        .iter()
        .filter(|line| line.contains("tokens leapt"))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_database_is_one_leap_for_all_replicas() {
    let mut postgres = Postgres::start().await;
    let mut replicas = Vec::new();
    for _ in 0..REPLICAS {
        replicas.push(Server::start(&postgres.url()).await);
    }
    let mut before = 0;
    for round in 1..=2 {
        postgres.restart(Stop::Fast).await;
        let until = Instant::now() + Duration::from_secs(3);
        let mut load = Vec::new();
        for n in 0..CLIENTS {
            let mut client = replicas[n % REPLICAS].client().await;
            load.push(tokio::spawn(async move {
                let (mut granted, ttl) = (0, Duration::from_secs(5));
                let name = format!("lock {n}");
                while Instant::now() < until {
                    let answer = calls::acquire(&mut client, &name, "a", ttl).await;
                    granted += u32::from(answer.is_ok());
                }
                granted
            }));
        }
        for client in load {
            assert!(client.await.unwrap() > 10, "a client was not served");
        }
        let after: usize = replicas.iter().map(leaps).sum();
        assert_eq!(after - before, 1, "leaps of restart {round}");
        before = after;
    }
}
