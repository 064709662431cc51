//! The private Postgres, from the outside: it outlives a killed server and
//! nothing else, as root and as a plain user.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fencepost_support::{
    Server, calls, eventually,
    leash::{End, Leash},
    server::{self, Builder},
    system::{self, PrivateDirectory},
};
use rustix::process::Signal;

use crate::programs::expect_no_start;

/// A directory that goes with its test, and the Postgres in it too.
struct Home {
    directory: PrivateDirectory,
    leash: Option<Leash>,
}

impl Home {
    fn new() -> Self {
        let directory = system::private_directory();
        Self {
            directory,
            leash: None,
        }
    }

    fn data(&self) -> PathBuf {
        self.directory.join("fencepost")
    }

    /// The postmaster, while there is one.
    fn postmaster(&self) -> Option<u32> {
        let file = self.data().join("postgres/postmaster.pid");
        let text = fs::read_to_string(file).ok()?;
        text.lines().next()?.parse().ok()
    }

    /// Ties the postmaster that runs now to this process.
    fn tie(&mut self) -> u32 {
        let pid = self.postmaster().expect("a postmaster runs");
        self.leash = Some(Leash::of_process(pid, End::QuitProcess));
        pid
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(pid) = self.postmaster() {
            system::signal(pid, Signal::QUIT);
            let start = Instant::now();
            while system::is_alive(pid) && start.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Everything that a private Postgres goes through.
async fn life(mut home: Home, builder: Builder) {
    let builder = builder.flag("--drain-delay", "0s");
    let ttl = Duration::from_secs(600);

    let first = builder.clone().start().await;
    first.wait_ready().await;
    let postmaster = home.tie();
    let lock = calls::granted(&mut first.client().await, "a", "b", ttl).await;
    let line = expect_no_start(builder.clone(), 78).await;
    assert!(line.contains("in use"), "{line}");
    assert!(line.contains(home.data().to_str().unwrap()), "{line}");

    first.kill9().await;
    assert!(system::is_alive(postmaster), "it went with its server");
    let second = builder.clone().start().await;
    second.wait_ready().await;
    assert_eq!(home.postmaster(), Some(postmaster), "it is taken over");
    let found = calls::get(&mut second.client().await, "a").await.unwrap();
    assert_eq!(found.fencing_token, lock.fencing_token);
    assert_eq!(found.owner, "b");

    second.sigterm();
    assert!(second.wait_exit().await.success());
    assert!(!system::is_alive(postmaster), "it is left running");
    assert_eq!(home.postmaster(), None);

    let third = builder.start().await;
    third.wait_ready().await;
    home.tie();
    let mut client = third.client().await;
    let found = calls::get(&mut client, "a").await.unwrap();
    assert_eq!(found.fencing_token, lock.fencing_token);
    let next = calls::granted(&mut client, "a", "b", ttl).await;
    assert!(next.fencing_token > lock.fencing_token);
    third.sigterm();
    assert!(third.wait_exit().await.success());
    eventually("the postmaster has gone", async || {
        home.postmaster().is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_postgres_outlives_a_killed_server_only() {
    let home = Home::new();
    let data = home.data();
    let builder = Server::without_database().flag("--data-dir", data.to_str().unwrap());
    life(home, builder).await;
}

/// Starts a copy of the server, since a plain user may not be able to reach
/// the original, as the owner of `directory`.
fn as_owner_of(directory: &Path) -> Vec<String> {
    let copy = directory.join("fencepostd");
    fs::copy(server::binary(), &copy).unwrap();
    let owner = fs::metadata(directory).unwrap();
    let copy = copy.display();
    [
        "setpriv",
        &format!("--reuid={}", owner.uid()),
        &format!("--regid={}", owner.gid()),
        "--clear-groups",
        "--",
        "/bin/sh",
        "-c",
        // Its first argument is the original.
        &format!("shift; exec {copy} \"$@\""),
        "sh",
    ]
    .map(str::to_owned)
    .to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_postgres_of_a_plain_user() {
    let home = Home::new();
    let state = home.directory.to_str().unwrap();
    let builder = Server::without_database()
        .env("HOME", "/does/not/exist")
        .env("XDG_STATE_HOME", state);
    let is_root = system::Account::unprivileged().is_some();
    let builder = if is_root {
        let wrapper = as_owner_of(&home.directory);
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        builder.wrapper(&wrapper)
    } else {
        builder
    };
    life(home, builder).await;
}

/// Nobody but the server would start it again, so the server ends, for its
/// supervisor to start both.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_when_its_private_postgres_does() {
    let mut home = Home::new();
    let builder = Server::without_database().flag("--data-dir", home.data().to_str().unwrap());
    let server = builder.clone().start().await;
    server.wait_ready().await;
    let ttl = Duration::from_secs(600);
    let lock = calls::granted(&mut server.client().await, "a", "b", ttl).await;
    system::signal(home.tie(), Signal::KILL);
    let status = server.wait_exit().await;
    assert_eq!(status.code(), Some(69));

    let next = builder.start().await;
    next.wait_ready().await;
    home.tie();
    let found = calls::get(&mut next.client().await, "a").await.unwrap();
    assert_eq!(found.fencing_token, lock.fencing_token);
    next.sigterm();
    assert!(next.wait_exit().await.success());
}
