//! Clients that do not answer: frozen, silent, or listening for ever.

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use fencepost_proto::v1::LOCK_SERVICE;
use fencepost_support::{
    Server,
    calls::{get, granted, renew},
    leash::End,
    postgres::fresh_database,
    process::Process,
    server::channel_at,
};
use rustix::process::Signal;
use tokio::net::TcpStream;
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::{LONG, assert_elsewhere, assert_ends, quick};

/// Where the frozen client finds its server; set in its own process only.
const SERVER: &str = "FENCEPOST_TEST_SERVER";

/// Not a test: the client process that [`sigterm_with_clients_that_do_not_answer`]
/// freezes. Without a server it does nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_to_be_frozen() {
    let Ok(address) = env::var(SERVER) else {
        return;
    };
    let channel = channel_at(address.parse().unwrap()).await;
    let request = HealthCheckRequest {
        service: LOCK_SERVICE.to_owned(),
    };
    let mut health = HealthClient::new(channel)
        .watch(request)
        .await
        .unwrap()
        .into_inner();
    while let Ok(Some(change)) = health.message().await {
        eprintln!("health is {}", change.status);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_with_clients_that_do_not_answer() {
    let database = fresh_database().await;
    let server = quick(&database.url()).ready().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "holder", LONG).await;

    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "drain::frozen::a_client_to_be_frozen",
            "--nocapture",
        ])
        .env(SERVER, server.grpc().to_string());
    let frozen = Process::start("frozen client", &mut command, End::KillGroup);
    let connected = frozen
        .log()
        .wait_for(|line| line.contains("health is").then_some(()));
    connected.await.expect("the client hears of health");
    frozen.signal(Signal::STOP);

    let mut silent = Vec::new();
    for address in [server.grpc(), server.http()] {
        for _ in 0..5 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
    }
    let request = HealthCheckRequest {
        service: LOCK_SERVICE.to_owned(),
    };
    let mut health = HealthClient::new(server.channel().await);
    let mut changes = health.watch(request).await.unwrap().into_inner();
    let first = changes.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    let busy: Vec<_> = (0..8)
        .map(|_| {
            let (mut client, token) = (client.clone(), lock.fencing_token);
            tokio::spawn(async move {
                let mut renewals = 0_u32;
                loop {
                    match renew(&mut client, "a", "holder", token, None).await {
                        Ok(_) => renewals += 1,
                        Err(status) => return (renewals, status),
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;

    let signalled = Instant::now();
    server.sigterm();
    let next = changes.message().await.unwrap().unwrap();
    assert_eq!(next.status(), ServingStatus::NotServing);
    println!("the Watch heard of it after {:?}", signalled.elapsed());
    let took = assert_ends(server.process(), signalled, Duration::from_secs(8)).await;
    println!("ended {took:?} after the signal");
    for call in busy {
        let (renewals, status) = call.await.unwrap();
        assert!(renewals > 0);
        assert_elsewhere(&status);
    }
    drop(silent);

    // Locks stay.
    let next = Server::start(&database.url()).await;
    let seen = get(&mut next.client().await, "a").await.unwrap();
    assert_eq!(seen.fencing_token, lock.fencing_token);
    let free = get(&mut next.client().await, "b").await.unwrap_err();
    assert_eq!(free.code(), Code::NotFound);
}
