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
    while run.process.exit_status().is_none() {
        let answer = fencepost_support::calls::acquire(client, resource, "b", LONG).await;
        // It may have ended in between.
        let free = answer.unwrap().acquired;
        let ended = || run.left().is_empty();
        assert!(!free || ended(), "{}", run.process.tail());
        tries += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_command_keeps_a_short_lease() {
    let (mut client, endpoint) = (client().await, shared().await.server.url());
    let command = ["/bin/sh", "-c", "echo ready; sleep 5; echo ends"];
    for _ in 0..3 {
        let resource = fresh("kept");
        let run = Run::start(&endpoint, &resource, &["--ttl", "1s"], &command);
        run.says("ready").await;
        let since = Instant::now();
        let tries = refused_until_ended(&run, &mut client, &resource).await;
        println!("refused {tries} times in {:?}", since.elapsed());
        let status = run.process.wait_exit().await;
        if !run.has_said("ends soon") {
            assert_eq!(status.code(), Some(0), "{}", run.process.tail());
            assert!(tries > 20 && since.elapsed() > Duration::from_millis(4500));
            return;
        }
        // A machine that stands still for a good part of so short a lease.
        assert_eq!(status.code(), Some(76), "{}", run.process.tail());
    }
    panic!("lost three times");
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
    let command = ["/bin/sh", "-c", "echo ready; sleep 8; echo ends"];
    let endpoints = format!("{},{}", first.url(), second.url());
    let run = Run::start(&endpoints, &resource, &["--ttl", "3s"], &command);
    run.says("ready").await;
    first.kill9().await;
    let mut client = second.client().await;
    refused_until_ended(&run, &mut client, &resource).await;
    run.ends(0).await;
    granted(&mut client, &resource, "b", LONG).await;
}
