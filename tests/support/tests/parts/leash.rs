//! Nothing outlives the test process.

use std::{
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
};

use fencepost_support::{
    Postgres, eventually,
    leash::{End, Leash},
    process::Process,
    system,
};

#[tokio::test]
async fn a_leash_ends_the_process_when_its_holder_is_killed() {
    let victim = Process::start("victim", Command::new("sleep").arg("600"), End::KillGroup);
    let mut leash = Leash::of_process(victim.pid(), End::KillGroup);
    leash.abandon();
    victim.wait_exit().await;
}

#[tokio::test]
async fn a_leash_removes_the_directory_when_its_holder_is_killed() {
    let directory = system::private_directory();
    std::fs::write(directory.join("file"), "text").unwrap();
    let mut leash = Leash::of_directory(&directory);
    leash.abandon();
    eventually("the directory is gone", async || {
        (!directory.exists()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_sweep_ends_those_that_work_in_its_directory_and_no_others() {
    let (inside, outside) = (system::private_directory(), system::private_directory());
    let sweep = Leash::of_those_in(&inside);
    let sleep = |directory: &Path| {
        let mut command = Command::new("sleep");
        command.arg("600").current_dir(directory);
        Process::start("sleeper", &mut command, End::KillGroup)
    };
    std::fs::create_dir(inside.join("data")).unwrap();
    let victims = [sleep(&inside), sleep(&inside.join("data"))];
    let bystander = sleep(&outside);
    drop(sweep);
    for victim in victims {
        assert!(!system::is_alive(victim.pid()));
    }
    assert!(system::is_alive(bystander.pid()));
}

#[tokio::test]
async fn a_leash_let_go_harms_nobody() {
    let mut bystander = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    drop(Leash::of_process(bystander.id(), End::KillGroup));
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
