//! `fencepost` is killed or stopped, or what guards its command is: nothing of
//! the command goes on without a lease.

use std::time::{Duration, Instant};

use fencepost_support::{
    network::Network,
    system,
    wait::{PATIENCE, within},
};
use rustix::process::Signal;

use super::stage::{Run, Stamps, fresh, words};
use crate::{
    keep_alive::stage::free_within,
    world::{client, shared},
};

const TTL: Duration = Duration::from_secs(3);
const SECOND: Duration = Duration::from_secs(1);

async fn gone(pid: u32) {
    within(PATIENCE, "the process is gone", async || {
        (!system::is_alive(pid)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_the_command_outlives_a_killed_fencepost() {
    let (mut client, resource, stamps) = (client().await, fresh("killed"), Stamps::new());
    let command = stamps.command("stubborn");
    let endpoint = shared().await.server.url();
    let run = Run::start(&endpoint, &resource, &["--ttl", "3s"], &words(&command));
    within(PATIENCE, "three processes", async || {
        (run.left().len() == 3).then_some(())
    })
    .await;
    let guardian = run.guardian();
    run.signal(Signal::KILL);
    let killed = Instant::now();
    run.nothing_left_within(SECOND).await;
    println!("gone {:?} after fencepost", killed.elapsed());
    gone(guardian).await;
    let took = free_within(&mut client, &resource, killed, TTL).await;
    println!("free {took:?} after fencepost, TTL {TTL:?}");
}

/// It cannot do anything, and the server hears nothing of it: the group is gone
/// all the same before another starts.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_the_command_outlives_the_lease_of_a_stopped_fencepost() {
    for kind in ["quiet", "stubborn"] {
        let (world, resource, stamps) = (shared().await, fresh("stopped"), Stamps::new());
        let network = Network::to(&world.server).await;
        let command = stamps.command(kind);
        let run = Run::start(
            &network.url(),
            &resource,
            &["--ttl", "1s"],
            &words(&command),
        );
        stamps.first().await;
        let next_stamps = Stamps::new();
        let command = next_stamps.command("quiet");
        let next = Run::start(&world.server.url(), &resource, &[], &words(&command));
        run.signal(Signal::STOP);
        let stopped = Instant::now();
        network.cut().await;
        let first = next_stamps.first().await;
        assert!(run.left().is_empty(), "{:?}", run.left());
        let gap = first.as_secs_f64() - stamps.last().as_secs_f64();
        println!("{kind}: the last stamp was {gap:.3} s before the next holder's first");
        assert!(gap > 0.0);
        tokio::time::sleep((SECOND * 3).saturating_sub(stopped.elapsed())).await;
        assert_eq!(run.process.exit_status(), None);
        run.signal(Signal::CONT);
        run.ends_within(Duration::from_secs(2), 76).await;
        // The lock is not given back for others.
        assert_eq!(next.process.exit_status(), None);
        next.signal(Signal::TERM);
        next.ends(143).await;
    }
}

/// Another takes its place, so that what may kill both finds both.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_guardian_is_replaced() {
    let (endpoint, resource, stamps) = (
        shared().await.server.url(),
        fresh("replaced"),
        Stamps::new(),
    );
    let command = stamps.command("stubborn");
    let run = Run::start(&endpoint, &resource, &["--ttl", "3s"], &words(&command));
    within(PATIENCE, "three processes", async || {
        (run.left().len() == 3).then_some(())
    })
    .await;
    let first = run.guardian();
    system::signal(first, Signal::KILL);
    gone(first).await;
    within(PATIENCE, "another guardian", async || run.find_guardian()).await;
    run.signal(Signal::KILL);
    run.nothing_left_within(SECOND).await;
}

/// It was stopped, and not we: what it was told meanwhile counts.
#[tokio::test(flavor = "multi_thread")]
async fn a_guardian_that_was_stopped_believes_the_last_word() {
    let (endpoint, resource) = (shared().await.server.url(), fresh("believes"));
    let command = ["/bin/sh", "-c", "echo ready; exec sleep 60"];
    let run = Run::start(&endpoint, &resource, &["--ttl", "1s"], &command);
    run.says("ready").await;
    let guardian = run.guardian();
    system::signal(guardian, Signal::STOP);
    tokio::time::sleep(SECOND * 3).await;
    system::signal(guardian, Signal::CONT);
    tokio::time::sleep(SECOND / 2).await;
    // A busy machine may have cost the lease, which is then said.
    if !run.has_said("the lease") {
        assert_eq!(run.process.exit_status(), None, "{}", run.process.tail());
    }
}

/// One belt less, and no more than that.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_goes_on_without_its_guardian() {
    const COUNTS: &str = "
        trap 'echo got USR1' USR1
        trap 'exit 9' TERM
        echo ready
        while :; do sleep 0.02; done";
    let endpoint = shared().await.server.url();
    for killed in [false, true] {
        let (mut client, resource) = (client().await, fresh("guardian"));
        let command = ["/bin/sh", "-c", COUNTS];
        let run = Run::start(&endpoint, &resource, &["--ttl", "3s"], &command);
        run.says("ready").await;
        let guardian = run.guardian();
        system::signal(guardian, Signal::KILL);
        gone(guardian).await;
        // Renewed beyond the first lease, and told of signals.
        crate::world::outlive(TTL * 3 / 2).await;
        run.signal(Signal::USR1);
        run.says("got USR1").await;
        if killed {
            run.signal(Signal::KILL);
            let since = Instant::now();
            run.nothing_left_within(SECOND).await;
            free_within(&mut client, &resource, since, TTL).await;
        } else {
            run.signal(Signal::TERM);
            run.ends(9).await;
            free_within(&mut client, &resource, Instant::now(), Duration::ZERO).await;
        }
    }
}

/// Service managers tell all processes of a service to end, and this one must
/// be there until the last.
#[tokio::test(flavor = "multi_thread")]
async fn a_guardian_does_not_go_before_it_is_done() {
    let (endpoint, resource) = (shared().await.server.url(), fresh("all-told"));
    let stamps = Stamps::new();
    let run = Run::start(
        &endpoint,
        &resource,
        &[],
        &words(&stamps.command("stubborn")),
    );
    within(PATIENCE, "three processes", async || {
        (run.left().len() == 3).then_some(())
    })
    .await;
    let guardian = run.guardian();
    for signal in [Signal::HUP, Signal::INT, Signal::TERM, Signal::QUIT] {
        system::signal(guardian, signal);
    }
    run.signal(Signal::KILL);
    run.nothing_left_within(SECOND).await;
    gone(guardian).await;
}
