//! `fencepost sidecar`: it stands for election, tells its neighbour, and keeps the
//! lock for it.

mod metrics;

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use fencepost_support::{
    calls,
    leash::End,
    network::Network,
    process::Process,
    system::{self, boottime_ms, free_address, private_directory},
    wait::within,
};
use rustix::process::Signal;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::sleep,
};

use crate::{
    programs::{bare, cli, run},
    run::{
        first_process::zombies_of,
        stage::{UNSHARE, may_unshare},
    },
    world::{LONG, World, fresh, shared},
};

const TTL: Duration = Duration::from_secs(1);

/// A sidecar and its two ports.
struct Sidecar {
    process: Process,
    neighbour: SocketAddr,
    probes: SocketAddr,
}

impl Sidecar {
    async fn start(endpoint: &str, resource: &str, flags: &[&str]) -> Self {
        let (neighbour, probes) = (free_address(), free_address());
        let mut command = bare(cli());
        command
            .args(["--endpoint", endpoint, "sidecar", resource])
            .args(["--ttl", "1s", "--listen", &neighbour.to_string()])
            .args(["--probe-listen", &probes.to_string()])
            .args(flags);
        let sidecar = Self {
            process: Process::start("fencepost", &mut command, End::KillGroup),
            neighbour,
            probes,
        };
        within(LONG, "the sidecar to listen", async || {
            TcpStream::connect(probes).await.ok()
        })
        .await;
        sidecar
    }

    async fn lease(&self) -> Value {
        let (code, body) = http(self.neighbour, "GET", "/lease").await;
        assert_eq!(code, 200);
        serde_json::from_str(&body).unwrap()
    }

    async fn post(&self, path: &str) -> u16 {
        http(self.neighbour, "POST", path).await.0
    }

    async fn is_ready(&self) -> bool {
        http(self.probes, "GET", "/readyz").await.0 == 200
    }

    /// Waits until it has the lock, and returns its token.
    async fn held(&self, patience: Duration) -> i64 {
        within(patience, "the sidecar to have the lock", async || {
            self.lease().await["fencing_token"].as_i64()
        })
        .await
    }

    async fn not_held(&self, patience: Duration) {
        within(patience, "the sidecar to lose the lock", async || {
            (self.lease().await["held"] == false).then_some(())
        })
        .await;
    }

    async fn said(&self, what: &str) {
        let line = self
            .process
            .log()
            .wait_for(|line| line.contains(what).then_some(()));
        let said = tokio::time::timeout(LONG, line).await;
        assert!(matches!(said, Ok(Some(()))), "{}", self.process.tail());
    }
}

async fn http(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
    (code, body)
}

async fn on_shared(flags: &[&str]) -> (Sidecar, &'static World, String) {
    let world = shared().await;
    let name = fresh("sidecar");
    let sidecar = Sidecar::start(&world.server.url(), &name, flags).await;
    (sidecar, world, name)
}

/// Takes the lease away, as somebody with the rights would.
async fn take_away(world: &World, name: &str) {
    let statement = format!("DELETE FROM fencepost.locks WHERE resource = '{name}'");
    world.database.client().await.run(&statement).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_leads_and_hands_over() {
    let (first, world, name) = on_shared(&["--owner", "one"]).await;
    let token = first.held(LONG).await;
    let second = Sidecar::start(&world.server.url(), &name, &["--owner", "two"]).await;
    let refused = within(LONG, "the second to be refused", async || {
        let lease = second.lease().await;
        (lease["holder"]["owner"] == "one").then_some(lease)
    })
    .await;
    assert_eq!(refused["held"], false);
    assert_eq!(refused.get("fencing_token"), None);
    assert!(first.is_ready().await && !second.is_ready().await);
    assert_eq!(second.post("/release").await, 409);
    assert_eq!(http(second.probes, "GET", "/livez").await.0, 200);

    // It is kept for longer than a lease lasts.
    sleep(TTL * 2).await;
    let lease = first.lease().await;
    assert_eq!(
        (&lease["held"], &lease["owner"]),
        (&true.into(), &"one".into())
    );
    assert_eq!(lease["fencing_token"], token);

    assert_eq!(first.post("/release").await, 204);
    let next = second.held(TTL * 2).await;
    assert!(next > token);
    assert!(second.is_ready().await && !first.is_ready().await);
    first.process.signal(Signal::TERM);
    assert!(first.process.wait_exit().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loss_is_told_and_a_new_lease_has_a_new_token() {
    let directory = private_directory();
    let file = directory.join("lease.json");
    let flags = [
        "--state-file",
        file.to_str().unwrap(),
        "--on-gain",
        "echo gained $FENCEPOST_RESOURCE $FENCEPOST_TOKEN >&2",
        "--on-loss",
        "echo lost $FENCEPOST_TOKEN $FENCEPOST_REASON >&2",
    ];
    let (sidecar, world, name) = on_shared(&flags).await;
    let token = sidecar.held(LONG).await;
    sidecar.said(&format!("gained {name} {token}")).await;
    let state = read(&file);
    assert_eq!(
        (&state["held"], &state["fencing_token"]),
        (&true.into(), &token.into())
    );
    let until = state["held_until_boottime_ms"].as_u64().unwrap();
    assert!(until > boottime_ms() && until < boottime_ms() + 1000);

    take_away(world, &name).await;
    sidecar.said(&format!("lost {token} LOCK_NOT_FOUND")).await;
    let next = within(LONG, "a new lease", async || {
        let token_now = sidecar.lease().await["fencing_token"].as_i64()?;
        (token_now > token).then_some(token_now)
    })
    .await;
    sidecar.said(&format!("gained {name} {next}")).await;
    assert_eq!(read(&file)["fencing_token"], next);

    // Killed, it leaves a file that says until when it could be believed.
    sidecar.process.signal(Signal::KILL);
    sidecar.process.wait_exit().await;
    let until = read(&file)["held_until_boottime_ms"].as_u64().unwrap();
    assert!(until < boottime_ms() + 1000);
}

fn read(file: &PathBuf) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_neighbour_that_is_silent_loses_its_lock() {
    let flags = ["--require-heartbeat", "500ms"];
    let (sidecar, world, name) = on_shared(&flags).await;
    // It does not even stand before the first one.
    sleep(TTL / 2).await;
    assert_eq!(sidecar.post("/heartbeat").await, 409);
    let token = sidecar.held(LONG).await;
    let end = Instant::now() + TTL * 2;
    while Instant::now() < end {
        assert_eq!(sidecar.post("/heartbeat").await, 204);
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(sidecar.lease().await["fencing_token"], token);

    let silent = Instant::now();
    let mut client = world.server.client().await;
    within(LONG, "the lock to be free", async || {
        let answer = calls::acquire(&mut client, &name, "another", TTL).await;
        answer.unwrap().acquired.then_some(())
    })
    .await;
    let took = silent.elapsed();
    assert!(
        took < Duration::from_millis(500) + TTL + TTL / 2,
        "{took:?}"
    );
    sidecar.not_held(TTL).await;
    // It was free again meanwhile; only the neighbour can tell that it lives.
    sleep(TTL * 2).await;
    assert_eq!(sidecar.lease().await["held"], false);
    sidecar.post("/heartbeat").await;
    assert!(sidecar.held(LONG).await > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_it_keeps_the_lock_for_its_neighbour() {
    let (sidecar, world, name) = on_shared(&["--release-after", "60s"]).await;
    let token = sidecar.held(LONG).await;
    sidecar.process.signal(Signal::TERM);
    within(LONG, "the end to be known", async || {
        (sidecar.lease().await["stopping"] == true).then_some(())
    })
    .await;
    assert!(!sidecar.is_ready().await);
    sleep(TTL * 2).await;
    assert_eq!(sidecar.lease().await["fencing_token"], token);
    assert_eq!(sidecar.post("/release").await, 204);
    assert!(sidecar.process.wait_exit().await.success());
    let mut client = world.server.client().await;
    calls::granted(&mut client, &name, "next", LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_it_waits_no_longer_than_it_may() {
    for (flags, again) in [
        (["--release-after", "1s"], false),
        (["--release-after", "60s"], true),
    ] {
        let (sidecar, world, name) = on_shared(&flags).await;
        sidecar.held(LONG).await;
        sidecar.process.signal(Signal::TERM);
        if again {
            within(LONG, "the end to be known", async || {
                (sidecar.lease().await["stopping"] == true).then_some(())
            })
            .await;
            sidecar.process.signal(Signal::TERM);
        }
        let ended = sidecar.process.wait_exit_within(TTL * 3).await;
        assert!(ended.success());
        let mut client = world.server.client().await;
        calls::granted(&mut client, &name, "next", LONG).await;
    }
    // Nothing is held: nothing is waited for.
    let (first, world, name) = on_shared(&[]).await;
    first.held(LONG).await;
    let second = Sidecar::start(&world.server.url(), &name, &[]).await;
    second.process.signal(Signal::TERM);
    assert!(second.process.wait_exit_within(TTL).await.success());
}

/// Cut off, it says so by the clock, before anybody else can have the lock.
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_it_knows_when_its_lease_ends() {
    let world = World::start().await;
    let network = Network::to(&world.server).await;
    let sidecar = Sidecar::start(&network.url(), "a", &["--ready", "always"]).await;
    sidecar.held(LONG).await;
    network.swallow().await;
    let mut client = world.server.client().await;
    let next = tokio::spawn(async move {
        loop {
            let answer = calls::acquire(&mut client, "a", "another", TTL).await;
            if answer.unwrap().acquired {
                return Instant::now();
            }
            sleep(TTL / 200).await;
        }
    });
    sidecar.not_held(TTL * 2).await;
    let known = Instant::now();
    assert!(known < next.await.unwrap());
    // The readiness that was asked for has nothing to do with the lock.
    assert!(sidecar.is_ready().await);
    network.heal().await;
    sidecar.held(LONG).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_it_cannot_do_is_told_with_its_exit_code() {
    let world = shared().await;
    let taken = free_address();
    let _listener = std::net::TcpListener::bind(taken).unwrap();
    let (taken, free) = (taken.to_string(), free_address().to_string());
    for (flags, code, says) in [
        (vec!["--listen", &taken], 78, "--listen"),
        (
            vec!["--listen", &free, "--probe-listen", &taken],
            78,
            "--probe-listen",
        ),
        (
            vec!["--listen", &free, "--state-file", "/nowhere/at/all"],
            78,
            "--state-file",
        ),
        (vec!["--listen", &free, "--ttl", "1ms"], 64, "ttl"),
        (vec!["--listen", "here"], 64, "--listen"),
    ] {
        let mut command = bare(cli());
        command
            .args(["--endpoint", &world.server.url(), "sidecar", "a"])
            .args(&flags);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(code), "{flags:?} {}", ended.said());
        assert!(ended.stderr.contains(says), "{flags:?} {}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
}

/// A hook that hangs is killed, and holds up no renewal meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_hook_that_hangs_holds_up_nothing() {
    let (sidecar, world, name) = on_shared(&["--on-gain", "sleep 60"]).await;
    let token = sidecar.held(LONG).await;
    sleep(TTL * 3).await;
    assert_eq!(sidecar.lease().await["fencing_token"], token);
    take_away(world, &name).await;
    let next = within(LONG, "a new lease", async || {
        let token_now = sidecar.lease().await["fencing_token"].as_i64()?;
        (token_now > token).then_some(token_now)
    });
    next.await;
}

/// They have a place for a while, and not all that there are of anything.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_say_nothing_hold_up_nobody_for_long() {
    let (sidecar, _world, _name) = on_shared(&[]).await;
    let token = sidecar.held(LONG).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(sidecar.probes).await.unwrap();
        stream.write_all(b"GET /livez HT").await.unwrap();
        silent.push(stream);
    }
    // Its neighbour has places of its own.
    assert_eq!(sidecar.lease().await["fencing_token"], token);
    let begun = Instant::now();
    assert_eq!(http(sidecar.probes, "GET", "/livez").await.0, 200);
    println!(
        "served after {:?} behind {} who say nothing",
        begun.elapsed(),
        silent.len()
    );
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(sidecar.is_ready().await);
}

/// As the first process of a container it is the parent of what its hooks leave.
#[tokio::test(flavor = "multi_thread")]
async fn as_the_first_process_it_leaves_no_zombies() {
    if !may_unshare().await {
        return;
    }
    let world = shared().await;
    let (name, neighbour) = (fresh("sidecar"), free_address());
    let mut command = bare(UNSHARE[0].into());
    command
        .args(&UNSHARE[1..])
        .arg(cli())
        .args(["--endpoint", &world.server.url(), "sidecar", &name])
        .args(["--ttl", "1s", "--listen", &neighbour.to_string()])
        .args([
            "--on-gain",
            "for i in 1 2 3; do (sleep 0.3 &); done; echo left >&2",
        ]);
    let process = Process::start("fencepost", &mut command, End::KillGroup);
    let left = process
        .log()
        .wait_for(|line| line.contains("left").then_some(()));
    assert!(left.await.is_some(), "{}", process.tail());
    // unshare, and what it has started.
    let init = system::children_of(process.pid())[0];
    within(LONG, "all orphans to end", async || {
        system::children_of(init).is_empty().then_some(())
    })
    .await;
    within(TTL * 5, "all orphans to be buried", async || {
        (zombies_of(init) == 0).then_some(())
    })
    .await;
    assert_eq!(http(neighbour, "GET", "/lease").await.0, 200);
}
