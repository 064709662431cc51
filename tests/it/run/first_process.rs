//! As the first process of a container: no signal has an effect by itself, and
//! all orphans are its own.

use std::{fs, time::Duration};

use fencepost_support::{
    calls::granted,
    system,
    wait::{PATIENCE, within},
};
use rustix::process::Signal;

use super::stage::{Run, UNSHARE, fresh, may_unshare};
use crate::world::{LONG, client, shared};

async fn start(resource: &str, script: &str) -> (Run, u32) {
    let run = Run::through(
        &format!("exec {} \"$@\"", UNSHARE.join(" ")),
        &shared().await.server.url(),
        resource,
        &[],
        &["/bin/sh", "-c", script],
    );
    let first = within(PATIENCE, "the first process", async || {
        let children = system::children_of(run.process.pid());
        children.first().copied()
    })
    .await;
    (run, first)
}

/// How many processes that have ended wait for this one to look at them.
pub(crate) fn zombies_of(parent: u32) -> usize {
    let entries = fs::read_dir("/proc").unwrap();
    let states = entries.filter_map(|entry| {
        let stat = fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        let (_, words) = stat.rsplit_once(')')?;
        let mut words = words.split_whitespace();
        Some((words.next()? == "Z", words.next()?.parse().ok()?))
    });
    states.filter(|state| *state == (true, parent)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_leave_no_zombies_and_the_exit_code_is_the_commands() {
    const ORPHANS: &str = "
        trap 'exit 21' USR1
        echo I am $$
        for n in $(seq 100); do (sleep 0.5 & ); done
        echo all started
        while :; do sleep 0.02; done";
    if !may_unshare().await {
        return;
    }
    let (run, first) = start(&fresh("orphans"), ORPHANS).await;
    run.says("all started").await;
    // In there, the numbers are small.
    let inside = (2..10).any(|pid| run.has_said(&format!("I am {pid}")));
    assert!(inside, "{}", run.process.tail());
    within(PATIENCE, "the orphans have ended", async || {
        // The command, its sleep, and what looks after them.
        (run.left().len() <= 2).then_some(())
    })
    .await;
    within(Duration::from_secs(1), "no zombies", async || {
        (zombies_of(first) == 0).then_some(())
    })
    .await;
    system::signal(first, Signal::USR1);
    run.ends(21).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_stops_the_command_first() {
    const SLOW: &str = "
        trap 'sleep 0.5; echo has ended; exit 22' TERM
        (trap '' TERM; sleep 60) &
        echo ready
        while :; do sleep 0.02; done";
    if !may_unshare().await {
        return;
    }
    let resource = fresh("container");
    let (run, first) = start(&resource, SLOW).await;
    run.says("ready").await;
    system::signal(first, Signal::TERM);
    run.ends_within(Duration::from_secs(15), 22).await;
    assert!(run.has_said("has ended"), "{}", run.process.tail());
    assert!(run.left().is_empty());
    granted(&mut client().await, &resource, "another", LONG).await;
}

/// Also while it waits, when the signal would do nothing by itself.
#[tokio::test(flavor = "multi_thread")]
async fn it_can_be_stopped_while_it_waits() {
    if !may_unshare().await {
        return;
    }
    let resource = fresh("container-waits");
    let held = granted(&mut client().await, &resource, "holder", LONG).await;
    let (run, first) = start(&resource, "echo started").await;
    within(PATIENCE, "signals are listened for", async || {
        let status = fs::read_to_string(format!("/proc/{first}/status")).ok()?;
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))?;
        let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
        (mask >> (Signal::TERM.as_raw() - 1) & 1 == 1).then_some(())
    })
    .await;
    system::signal(first, Signal::TERM);
    run.ends_within(Duration::from_secs(3), 143).await;
    assert!(!run.has_said("started"));
    assert!(held.fencing_token > 0);
}
