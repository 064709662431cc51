//! `fencepost keepalive`: prints each renewal, opens one stream after the
//! other, and ends with 76 when the lease is over.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server,
    calls::{granted, refused, release},
    leash::End,
    postgres::fresh_database,
    process::Process,
    proxy::Proxy,
};
use rustix::process::Signal;
use serde_json::Value;

use super::stage::{Stream, request_for};
use crate::{
    programs::{bare, cli},
    world::{LONG, client, fresh, shared},
};

/// Starts `fencepost keepalive` with what it prints in its log.
pub(crate) fn keepalive(endpoint: &str, lock: &Lock, flags: &[&str]) -> Process {
    let program = bare(cli());
    let mut command = Command::new("/bin/sh");
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .args(["-c", "exec \"$@\" >&2", "sh"])
        .arg(program.get_program())
        .args(["--endpoint", endpoint, "keepalive", &lock.resource])
        .args(["--owner", &lock.owner])
        .args(["--token", &lock.fencing_token.to_string()])
        .args(flags)
        .current_dir("/");
    Process::start("fencepost", &mut command, End::KillGroup)
}

/// Waits for the first renewal that it prints.
pub(crate) async fn wait_renewed(holder: &Process) {
    let line = holder
        .log()
        .wait_for(|line| line.contains("remaining").then_some(()));
    let found = tokio::time::timeout(fencepost_support::wait::PATIENCE, line).await;
    assert!(matches!(found, Ok(Some(()))), "{}", holder.tail());
}

/// The renewals that it has printed as JSON so far.
fn renewals(holder: &Process) -> Vec<Value> {
    let lines = holder.log().lines();
    lines
        .iter()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_prints_each_renewal_over_many_streams_and_ends_with_76() {
    const TTL: Duration = Duration::from_millis(1500);
    let (mut client, name) = (client().await, fresh("command"));
    let lock = granted(&mut client, &name, "a", TTL).await;
    let endpoint = shared().await.server.url();
    let holder = keepalive(
        &endpoint,
        &lock,
        &["--max-duration", "1500ms", "--output", "json"],
    );
    // Several streams' worth.
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(6) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        refused(&mut client, &name, "b", LONG).await;
        assert!(holder.exit_status().is_none(), "{}", holder.tail());
    }
    let printed = renewals(&holder);
    println!(
        "{} renewals in 6 s; the last: {}",
        printed.len(),
        printed[0]
    );
    // Every half a second or less, by streams of three.
    assert!(printed.len() >= 12, "{}", printed.len());
    for renewal in &printed {
        assert_eq!(renewal["lock"]["fencing_token"], lock.fencing_token);
        for field in ["remaining", "slack", "stream_remaining"] {
            assert!(renewal[field].is_string(), "{renewal}");
        }
    }
    let noise: Vec<String> = holder
        .log()
        .lines()
        .into_iter()
        .filter(|line| !line.starts_with('{'))
        .collect();
    assert!(noise.is_empty(), "a stream ended unnoticed: {noise:?}");

    release(&mut client, &name, "a", lock.fencing_token)
        .await
        .unwrap();
    let lost = Instant::now();
    let status = holder.wait_exit().await;
    assert_eq!(status.code(), Some(76), "{}", holder.tail());
    let took = lost.elapsed();
    assert!(took < TTL / 3 + Duration::from_millis(700), "{took:?}");
    // Its last line may still be on its way: wait for the end.
    holder.log().wait_for(|_| None::<()>).await;
    let last = holder.log().lines().pop().unwrap();
    assert!(last.starts_with("fencepost: "), "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_prints_text_by_default() {
    let (mut client, name) = (client().await, fresh("text"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    let holder = keepalive(&shared().await.server.url(), &lock, &[]);
    wait_renewed(&holder).await;
    let line = holder.log().lines().remove(0);
    assert!(line.starts_with("renewed: true  remaining: "), "{line}");
    assert!(line.contains("  slack: "), "{line}");
    assert!(line.contains("  stream_remaining: "), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_goes_on_at_another_server() {
    const TTL: Duration = Duration::from_secs(4);
    // Frozen, its connection stands: pings would find out after the lease.
    for end in [Signal::KILL, Signal::STOP] {
        let database = fresh_database().await;
        let first = Server::start(&database.url()).await;
        let second = Server::start(&database.url()).await;
        let mut client = second.client().await;
        let lock = granted(&mut client, "a", "a", TTL).await;
        let endpoints = format!("{},{}", first.url(), second.url());
        let holder = keepalive(&endpoints, &lock, &["--output", "json"]);
        wait_renewed(&holder).await;
        first.process().signal(end);
        crate::world::outlive(TTL * 3 / 2).await;
        assert!(holder.exit_status().is_none(), "{}", holder.tail());
        refused(&mut client, "a", "b", LONG).await;
    }
}

/// A server that has no room at first has the time of a call.
#[tokio::test(flavor = "multi_thread")]
async fn it_waits_for_room() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--keepalive-max-streams", "1")
        .ready()
        .await;
    let mut client = server.client().await;
    let first = granted(&mut client, "first", "a", LONG).await;
    let stream = Stream::open(&mut client, request_for(&first, LONG)).await;
    let lock = granted(&mut client, "a", "a", LONG).await;
    let holder = keepalive(&server.url(), &lock, &[]);
    let refused = holder
        .log()
        .wait_for(|line| line.contains("trying again").then_some(()));
    assert!(refused.await.is_some(), "{}", holder.tail());
    drop(stream);
    wait_renewed(&holder).await;
}

/// No answer comes, whether the stream is open, about to be reopened, or was
/// never heard of: the lease is given up at its deadline, not later.
#[tokio::test(flavor = "multi_thread")]
async fn silence_ends_it_at_the_leases_deadline() {
    const TTL: Duration = Duration::from_millis(1500);
    let world = shared().await;
    let mut client = client().await;
    for (n, flags) in [&[][..], &["--max-duration", "500ms"]].iter().enumerate() {
        let proxy = Proxy::start(world.server.grpc()).await;
        let lock = granted(&mut client, &fresh("silence"), "a", TTL).await;
        let holder = keepalive(&format!("http://{}", proxy.address()), &lock, flags);
        wait_renewed(&holder).await;
        // Long enough for the short streams to be in the middle of anything.
        tokio::time::sleep(Duration::from_millis(300 + 170 * n as u64)).await;
        let silent = Instant::now();
        proxy.black_hole();
        let status = holder.wait_exit().await;
        let took = silent.elapsed();
        println!("{flags:?}: gave up {took:?} after the last word");
        assert_eq!(status.code(), Some(76), "{}", holder.tail());
        assert!(took < TTL + Duration::from_millis(700), "{took:?}");
    }
}

/// A server that takes the stream and then says nothing: not for ever.
#[tokio::test(flavor = "multi_thread")]
async fn it_does_not_wait_for_a_first_word_for_ever() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let proxy = Proxy::start(server.grpc()).await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "a", LONG).await;
    let row = fencepost_support::row_lock::RowLock::hold(&database.url(), "a").await;
    let holder = keepalive(
        &format!("http://{}", proxy.address()),
        &lock,
        &["--timeout", "2s"],
    );
    // The stream is open, and its first renewal waits.
    row.wait_for_waiters(1).await;
    proxy.black_hole();
    let asked = Instant::now();
    let status = holder.wait_exit().await;
    let took = asked.elapsed();
    println!("ended {took:?} after the last word");
    assert_eq!(status.code(), Some(69), "{}", holder.tail());
    assert!(took < Duration::from_secs(4), "{took:?}");
    row.rollback().await;
}
