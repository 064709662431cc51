//! A command keeps the lock for as long as it runs.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{granted, refused},
    postgres::fresh_database,
    server::Client,
};

use super::stage::{Run, fresh};
use crate::world::{LONG, client, shared};

/// Waits for the command's end, and expects that nobody else gets the lock
/// meanwhile. How often that was tried.
async fn refused_until_ended(run: &Run, client: &mut Client, resource: &str) -> u32 {
    let mut tries = 0;
    while !run.has_said("ends") {
        let answer = fencepost_support::calls::acquire(client, resource, "b", LONG).await;
        // It may have ended in between.
        let free = answer.unwrap().acquired;
        assert!(!free || run.has_said("ends"), "{}", run.process.tail());
        tries += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_command_keeps_a_short_lease() {
    let (mut client, resource) = (client().await, fresh("kept"));
    let command = ["/bin/sh", "-c", "echo ready; sleep 5; echo ends"];
    let endpoint = shared().await.server.url();
    let run = Run::start(&endpoint, &resource, &["--ttl", "1s"], &command);
    run.says("ready").await;
    let since = Instant::now();
    let tries = refused_until_ended(&run, &mut client, &resource).await;
    println!("refused {tries} times in {:?}", since.elapsed());
    assert!(tries > 20 && since.elapsed() > Duration::from_millis(4500));
    run.ends(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_is_not_a_loss() {
    let database = fresh_database().await;
    let mut server = Server::start(&database.url()).await;
    let resource = fresh("restart");
    let command = ["/bin/sh", "-c", "echo ready; sleep 8; echo ends"];
    let run = Run::start(&server.url(), &resource, &["--ttl", "4s"], &command);
    run.says("ready").await;
    server.restart().await;
    server.wait_ready().await;
    let mut client = server.client().await;
    refused(&mut client, &resource, "b", LONG).await;
    refused_until_ended(&run, &mut client, &resource).await;
    run.ends(0).await;
    granted(&mut client, &resource, "b", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_renews_when_one_is_killed() {
    let database = fresh_database().await;
    let first = Server::start(&database.url()).await;
    let second = Server::start(&database.url()).await;
    let resource = fresh("replicas");
    let command = ["/bin/sh", "-c", "echo ready; sleep 6; echo ends"];
    let endpoints = format!("{},{}", first.url(), second.url());
    let run = Run::start(&endpoints, &resource, &["--ttl", "2s"], &command);
    run.says("ready").await;
    first.kill9().await;
    let mut client = second.client().await;
    refused_until_ended(&run, &mut client, &resource).await;
    run.ends(0).await;
    granted(&mut client, &resource, "b", LONG).await;
}
