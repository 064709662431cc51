//! Nothing outlives the test process.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use fencepost_support::{
    Postgres,
    leash::{End, Leash},
    process::Process,
    system, wait,
};

#[tokio::test]
async fn a_leash_ends_the_process_when_its_holder_is_killed() {
    // The victim stands for a server, the shell that holds the leash's pipe
    // for a test process.
    let victim = Process::start(
        "victim",
        Command::new("sleep").arg("600"),
        End::KillGroup,
        None,
    );
    let directory = system::private_directory();
    let mut leash = Leash::new(victim.pid(), End::KillGroup, Some(&directory));
    // As at the death of this process: the pipe closes without a word.
    leash.abandon();
    victim.wait_exit().await;
    wait::eventually("the directory is gone", async || {
        (!directory.exists()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_leash_let_go_harms_nobody() {
    let mut bystander = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    drop(Leash::new(bystander.id(), End::KillGroup, None));
    assert!(system::is_alive(bystander.id()));
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[tokio::test]
async fn a_dropped_cluster_leaves_nothing_behind() {
    let postgres = Postgres::start().await;
    let (pid, data) = (postgres.pid(), postgres.data());
    let children = system::children_of(pid);
    assert!(!children.is_empty());
    drop(postgres);
    assert!(!system::is_alive(pid));
    assert!(!children.into_iter().any(system::is_alive));
    assert!(!data.exists());
}
