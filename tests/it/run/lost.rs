//! A lease that is lost: nothing of the command is left when it ends.

use std::time::{Duration, Instant};

use fencepost_support::{
    calls::{get, granted},
    network::Network,
};

use super::stage::{Run, fresh};
use crate::{
    keep_alive::stage::free_within,
    world::{LONG, World, client, outlive, shared},
};

const TTL: Duration = Duration::from_secs(3);
const FLAGS: [&str; 2] = ["--ttl", "3s"];

/// Ends when it is told, and says so.
const POLITE: &str = "
    trap 'echo told; exit 0' TERM
    echo ready
    while :; do sleep 0.02; done";

/// Three processes that do not: the job of a shell's job among them.
const STUBBORN: &str = "
    trap '' TERM INT HUP
    (sh -c 'sleep 60; :' &)
    echo ready
    sleep 60; sleep 60";

async fn delete(world: &World, resource: &str) {
    let database = world.database.client().await;
    let deleted = database
        .execute(
            "DELETE FROM fencepost.locks WHERE resource = $1",
            &[&resource],
        )
        .await;
    assert_eq!(deleted.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_swallowed_network_ends_the_command_before_its_lease() {
    for script in [POLITE, STUBBORN] {
        let (network, resource) = (
            Network::to(&shared().await.server).await,
            fresh("swallowed"),
        );
        let run = Run::start(
            &network.url(),
            &resource,
            &FLAGS,
            &["/bin/sh", "-c", script],
        );
        run.says("ready").await;
        // Not the first lease only.
        outlive(TTL).await;
        assert_eq!(run.process.exit_status(), None, "{}", run.process.tail());
        network.swallow().await;
        let silent = Instant::now();
        run.says("not renewed and ends soon").await;
        run.nothing_left_within(TTL.saturating_sub(silent.elapsed()))
            .await;
        println!(
            "gone {:?} after the last word, TTL {TTL:?}",
            silent.elapsed()
        );
        run.ends(76).await;
        assert_eq!(run.has_said("told"), script == POLITE);
        assert!(silent.elapsed() < Duration::from_secs(9));
        // It may be given back, or run out.
        free_within(&mut client().await, &resource, silent, TTL).await;
    }
}

/// The command is told, also when the lease is over already.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_row_ends_the_command() {
    for script in [POLITE, STUBBORN] {
        let (world, resource) = (shared().await, fresh("deleted"));
        let command = ["/bin/sh", "-c", script];
        let run = Run::start(&world.server.url(), &resource, &FLAGS, &command);
        run.says("ready").await;
        delete(world, &resource).await;
        let deleted = Instant::now();
        run.nothing_left_within(TTL).await;
        println!("gone {:?} after the row, TTL {TTL:?}", deleted.elapsed());
        run.ends(76).await;
        assert!(deleted.elapsed() < TTL + Duration::from_secs(1));
        assert_eq!(run.has_said("told"), script == POLITE);
        granted(&mut client().await, &resource, "another", LONG).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_others_have_taken_over_ends_the_command_and_stays_theirs() {
    for script in [POLITE, STUBBORN] {
        let (world, mut client, resource) = (shared().await, client().await, fresh("taken"));
        let command = ["/bin/sh", "-c", script];
        let run = Run::start(&world.server.url(), &resource, &FLAGS, &command);
        run.says("ready").await;
        delete(world, &resource).await;
        let deleted = Instant::now();
        let lock = granted(&mut client, &resource, "another", LONG).await;
        run.nothing_left_within(TTL).await;
        println!("gone {:?} after the loss, TTL {TTL:?}", deleted.elapsed());
        run.ends(76).await;
        assert!(deleted.elapsed() < TTL + Duration::from_secs(1));
        assert_eq!(run.has_said("told"), script == POLITE);
        let now = get(&mut client, &resource).await.unwrap();
        assert_eq!(now.fencing_token, lock.fencing_token);
    }
}

/// Work whose every write is fenced may go on, and its exit code counts.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_may_go_on_goes_on_and_keeps_its_exit_code() {
    const UNTIL_TOLD: &str = "
        trap 'echo told' TERM
        trap 'echo ends; exit 33' USR1
        echo ready
        while :; do sleep 0.02; done";
    let world = shared().await;
    for swallowed in [true, false] {
        let (network, resource) = (Network::to(&world.server).await, fresh("warned"));
        let flags = ["--ttl", "1s", "--on-lost", "warn"];
        let command = ["/bin/sh", "-c", UNTIL_TOLD];
        let run = Run::start(&network.url(), &resource, &flags, &command);
        run.says("ready").await;
        if swallowed {
            network.swallow().await;
        } else {
            delete(world, &resource).await;
        }
        run.says("the lease is lost").await;
        // Whatever else would end it has had its time.
        let mut client = client().await;
        let lock = fencepost_support::eventually("it is free", async || {
            let answer = fencepost_support::calls::acquire(&mut client, &resource, "b", LONG).await;
            answer.unwrap().lock
        })
        .await;
        outlive(Duration::from_secs(1)).await;
        run.signal(rustix::process::Signal::USR1);
        run.ends(33).await;
        assert!(!run.has_said("told"), "{}", run.process.tail());
        let now = get(&mut client, &resource).await.unwrap();
        assert_eq!(now.fencing_token, lock.fencing_token);
    }
}
