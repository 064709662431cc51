//! What the command reads and writes is its own, and its end is that of the
//! command and not of what it leaves behind.

use std::time::{Duration, Instant};

use fencepost_support::{
    calls::granted,
    wait::{PATIENCE, within},
};

use super::stage::{Run, fresh};
use crate::world::{LONG, client, shared};

#[tokio::test(flavor = "multi_thread")]
async fn the_command_reads_and_writes_as_if_alone() {
    let resource = fresh("pipes");
    let run = Run::through(
        "printf 'one\\ntwo\\n' | \"$@\" 2>/dev/null | sed s/^/piped:/",
        &shared().await.server.url(),
        &resource,
        &[],
        &["/bin/sh", "-c", "cat; echo aside >&2; echo last"],
    );
    run.ends(0).await;
    let lines = run.process.log().lines();
    assert_eq!(lines, ["piped:one", "piped:two", "piped:last"]);
}

/// A daemon that keeps all that it has inherited holds up neither the caller nor
/// the lock.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_in_the_background_holds_up_nobody() {
    let (mut client, resource) = (client().await, fresh("background"));
    let command = [
        "/bin/sh",
        "-c",
        "sleep 60 & setsid sleep 60 & echo left; exit 11",
    ];
    let endpoint = shared().await.server.url();
    let run = Run::start(&endpoint, &resource, &["--ttl", "2s"], &command);
    run.says("left").await;
    let since = Instant::now();
    run.ends_within(Duration::from_secs(5), 11).await;
    let took = since.elapsed();
    println!("ended {took:?} after the command");
    assert!(took < Duration::from_secs(1), "{took:?}");
    // One may be about to become what it runs.
    within(PATIENCE, "both are left alone", async || {
        (run.left().len() == 2).then_some(())
    })
    .await;
    granted(&mut client, &resource, "another", LONG).await;
}
