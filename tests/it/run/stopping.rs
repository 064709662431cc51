//! How a command is stopped: told, given time, killed; and the lock is kept for
//! all of it.

use std::{
    fs,
    time::{Duration, Instant},
};

use fencepost_support::{
    calls::granted,
    system,
    wait::{PATIENCE, within},
};
use rustix::process::Signal;

use super::stage::{Run, Stamps, fresh, words};
use crate::world::{LONG, client, shared};

const STUBBORN: &str = "
    trap '' TERM INT
    (sh -c 'sleep 60; :' &)
    echo ready
    sleep 60; sleep 60";

/// A command that needs three leases' time to end: renewed meanwhile, and the
/// next one starts after.
#[tokio::test(flavor = "multi_thread")]
async fn the_lock_is_kept_while_the_command_winds_down() {
    const SLOW: &str = "
        trap 'sleep 3; echo has ended; exit 5' TERM
        echo ready
        while :; do sleep 0.02; done";
    let (endpoint, resource) = (shared().await.server.url(), fresh("wind-down"));
    let command = ["/bin/sh", "-c", SLOW];
    let first = Run::start(&endpoint, &resource, &["--ttl", "1s"], &command);
    first.says("ready").await;
    let stamps = Stamps::new();
    let next = Run::start(&endpoint, &resource, &[], &words(&stamps.command("quiet")));
    let told = Instant::now();
    first.signal(Signal::TERM);
    let started = stamps.first();
    tokio::pin!(started);
    tokio::select! {
        _ = &mut started => assert!(first.has_said("has ended"), "{}", first.process.tail()),
        () = first.says("has ended") => {}
    }
    assert!(told.elapsed() >= Duration::from_secs(3));
    // A machine that is too busy to renew in time is a reason to say so.
    let code = if first.has_said("ends soon") { 76 } else { 5 };
    first.ends(code).await;
    started.await;
    next.signal(Signal::TERM);
    next.ends(143).await;
}

/// A command that does not want to: killed after the grace, and only then is
/// the lock given back.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_ignores_term_is_killed_after_the_grace() {
    const GRACE: Duration = Duration::from_millis(1500);
    let (mut client, resource) = (client().await, fresh("stubborn"));
    let command = ["/bin/sh", "-c", STUBBORN];
    let flags = ["--grace", "1500ms"];
    let run = Run::start(&shared().await.server.url(), &resource, &flags, &command);
    run.says("ready").await;
    within(PATIENCE, "three processes", async || {
        (run.left().len() >= 3).then_some(())
    })
    .await;
    let told = Instant::now();
    run.signal(Signal::TERM);
    run.ends(137).await;
    let took = told.elapsed();
    println!("killed {took:?} after TERM, grace {GRACE:?}");
    assert!(took >= GRACE && took < GRACE + Duration::from_secs(1));
    granted(&mut client, &resource, "another", LONG).await;
}

/// The command ends when told, something of its group does not.
#[tokio::test(flavor = "multi_thread")]
async fn the_lock_is_kept_until_the_whole_group_has_ended() {
    const LEAVES: &str = "
        trap 'exit 3' TERM
        (trap '' TERM; echo ready; sleep 60; sleep 60) &
        while :; do sleep 0.02; done";
    let (mut client, resource) = (client().await, fresh("whole-group"));
    let command = ["/bin/sh", "-c", LEAVES];
    let run = Run::start(
        &shared().await.server.url(),
        &resource,
        &["--grace", "1s"],
        &command,
    );
    run.says("ready").await;
    let told = Instant::now();
    run.signal(Signal::TERM);
    run.ends(3).await;
    assert!(told.elapsed() >= Duration::from_secs(1));
    granted(&mut client, &resource, "another", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_has_had_the_lock_for_too_long_is_stopped() {
    const LIMIT: Duration = Duration::from_secs(2);
    let endpoint = shared().await.server.url();
    for (script, code) in [("echo ready; exec sleep 60", 143), (STUBBORN, 137)] {
        let (mut client, resource) = (client().await, fresh("max-hold"));
        let flags = ["--max-hold", "2s", "--grace", "500ms"];
        let run = Run::start(&endpoint, &resource, &flags, &["/bin/sh", "-c", script]);
        run.says("ready").await;
        let since = Instant::now();
        run.ends(code).await;
        let took = since.elapsed();
        println!("stopped {took:?} after its start, limit {LIMIT:?}");
        assert!(took > LIMIT / 2 && took < LIMIT + Duration::from_millis(1500));
        assert!(run.has_said("for as long as it may"));
        granted(&mut client, &resource, "another", LONG).await;
    }
}

/// A command that was paused hears that it shall end.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_command_is_woken_to_end() {
    const PAUSES: &str = "
        trap 'echo heard; exit 4' TERM
        echo ready
        kill -s STOP $$
        while :; do sleep 0.02; done";
    let resource = fresh("paused");
    let command = ["/bin/sh", "-c", PAUSES];
    let run = Run::start(&shared().await.server.url(), &resource, &[], &command);
    run.says("ready").await;
    within(PATIENCE, "it is paused", async || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", run.left().first()?)).ok()?;
        stat.contains(") T ").then_some(())
    })
    .await;
    run.signal(Signal::TERM);
    run.ends_within(Duration::from_secs(5), 4).await;
    assert!(run.has_said("heard"));
}

/// The command itself is ended by a signal: what it has started is stopped as well,
/// and the lock kept until it has.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_command_leaves_is_stopped() {
    const PARENT: &str = "
        (trap '' INT QUIT; exec sleep 60) &
        echo $$ ready
        while :; do sleep 0.02; done";
    let endpoint = shared().await.server.url();
    for (signal, to_fencepost) in [(Signal::KILL, false), (Signal::QUIT, true)] {
        let resource = fresh("leaves");
        let command = ["/bin/sh", "-c", PARENT];
        let run = Run::start(&endpoint, &resource, &["--ttl", "10s"], &command);
        let line = run
            .process
            .log()
            .wait_for(|line| line.strip_suffix(" ready").map(ToOwned::to_owned));
        let pid: u32 = line.await.unwrap().parse().unwrap();
        if to_fencepost {
            run.signal(signal);
        } else {
            system::signal(pid, signal);
        }
        // Nothing is left: that is checked at the end.
        run.ends(128 + signal.as_raw()).await;
        let mut client = client().await;
        granted(&mut client, &resource, "next", LONG).await;
    }
}

/// A process that has ended and is not looked for by its parent, who has left the
/// group, is nothing to wait for.
#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_in_the_group_holds_up_nothing() {
    const ZOMBIE: &str = "
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(60)
    os.setsid()
    print('ready', flush=True)
    time.sleep(3)
    os._exit(0)
time.sleep(60)";
    let (endpoint, resource) = (shared().await.server.url(), fresh("zombie"));
    let flags = ["--ttl", "10s", "--grace", "500ms"];
    let command = ["python3", "-ISc", ZOMBIE];
    let run = Run::start(&endpoint, &resource, &flags, &command);
    run.says("ready").await;
    run.signal(Signal::TERM);
    run.ends_within(Duration::from_secs(2), 143).await;
}

/// More than any clock can tell is for ever, not a panic.
#[tokio::test(flavor = "multi_thread")]
async fn absurd_times_are_for_ever() {
    const AGES: &str = "18446744073709551615s";
    let (endpoint, resource) = (shared().await.server.url(), fresh("ages"));
    let flags = ["--grace", AGES, "--max-hold", AGES, "--wait", AGES];
    let command = ["/bin/sh", "-c", "echo ready; exec sleep 60"];
    let run = Run::start(&endpoint, &resource, &flags, &command);
    run.says("ready").await;
    run.signal(Signal::TERM);
    run.ends(143).await;
}
