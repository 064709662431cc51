//! A process of its own that holds locks: frozen, restarted around, measured.

use std::{net::SocketAddr, process::Command, time::Duration};

use fencepost_client::Client;
use fencepost_support::{
    Server,
    leash::End,
    postgres::{Database, fresh_database},
    process::Process,
    proxy::Proxy,
    server::binary,
    system::{boottime_ms, cpu_time, resident_memory},
};
use rustix::process::Signal;
use tokio::time::sleep;

use super::{client_of, lease_of};
use crate::world::LONG;

/// Locks `NAME-0` … in a process of their own, once it has them.
pub(super) async fn guards(endpoints: &str, count: usize, ttl: Duration) -> Process {
    let mut command = Command::new(binary().with_file_name("guards"));
    let numbers = [count.to_string(), ttl.as_millis().to_string()];
    command.args([endpoints, "a"]).args(numbers);
    let process = Process::start("guards", &mut command, End::KillGroup);
    let ready = process
        .log()
        .wait_for(|line| (line == "ready").then_some(()));
    assert!(ready.await.is_some(), "{}", process.tail());
    process
}

/// What it says is lost.
pub(super) fn lost(process: &Process) -> Vec<String> {
    let lines = process.log().lines();
    lines
        .into_iter()
        .filter(|line| line.starts_with("lost"))
        .collect()
}

pub(super) fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

pub(super) async fn server() -> (Database, Server) {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    (database, server)
}

/// It knows on its first look, before a word from anybody.
#[tokio::test]
async fn a_frozen_holder_knows_when_it_wakes() {
    let ttl = Duration::from_secs(1);
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let holder = guards(&url(proxy.address()), 1, ttl).await;
    sleep(ttl * 2).await;
    assert_eq!(lost(&holder), [""; 0]);

    holder.signal(Signal::STOP);
    let frozen = boottime_ms();
    // The next holder does not have to wait for pings to find out.
    proxy.refuse().await;
    proxy.reset().await;
    let next = client_of(&server);
    let guard = next
        .acquire_with_retry("a-0", lease_of(LONG))
        .await
        .expect("the lock of a frozen holder");
    let taken = boottime_ms();
    println!("taken {} ms after it froze", taken - frozen);
    sleep(ttl).await;
    let before = holder.log().lines().len();
    // Nothing comes through to tell it.
    holder.signal(Signal::CONT);
    let first = holder
        .log()
        .wait_for(|line| line.starts_with("lost").then(|| line.to_owned()))
        .await
        .expect("a loss");
    assert!(first.starts_with("lost a-0 UNCONFIRMED"), "{first}");
    assert_eq!(holder.log().lines()[before..], [first]);
    guard.release().await.unwrap();
}

/// What was missed while it was frozen is not caught up with.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_wakes_in_time_storms_nobody() {
    const COUNT: u64 = 50;
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let holders = guards(&url(proxy.address()), 50, Duration::from_secs(30)).await;
    holders.signal(Signal::STOP);
    // Longer than the server's pings wait for an answer.
    sleep(Duration::from_secs(13)).await;
    let before = proxy.passed_up();
    holders.signal(Signal::CONT);
    sleep(Duration::from_secs(1)).await;
    let each = (proxy.passed_up() - before) / COUNT;
    println!("{each} bytes a guard in the first second");
    // A renewal, by a stream or a call, has some 200 with its headers.
    assert!(each < 500);
    assert_eq!(lost(&holders), [""; 0]);
}

/// Replicas are stopped and started one after the other, as in a rolling update.
#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_replicas_lose_no_lock_and_fail_no_call() {
    let ttl = Duration::from_secs(10);
    let database = fresh_database().await;
    let mut replicas = [
        Server::start(&database.url()).await,
        Server::start(&database.url()).await,
    ];
    let endpoints = replicas.each_ref().map(Server::url).join(",");
    let holders = guards(&endpoints, 200, ttl).await;
    let client = Client::connect_lazy(&endpoints).unwrap();
    let callers: Vec<_> = (0..20)
        .map(|number| {
            let client = client.clone();
            tokio::spawn(async move {
                let name = format!("call-{number}");
                let mut cycles = 0;
                loop {
                    let guard = client
                        .acquire(&name, lease_of(LONG))
                        .await
                        .unwrap_or_else(|error| panic!("after {cycles}: {error}"));
                    guard
                        .release()
                        .await
                        .unwrap_or_else(|error| panic!("after {cycles}: {error}"));
                    cycles += 1;
                    sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    for round in 0..10 {
        for replica in &mut replicas {
            replica.restart().await;
            replica.wait_ready().await;
        }
        assert_eq!(lost(&holders), [""; 0], "round {round}");
        assert!(callers.iter().all(|caller| !caller.is_finished()));
    }
    sleep(ttl).await;
    assert_eq!(lost(&holders), [""; 0]);
    for caller in callers {
        caller.abort();
        let ended = caller.await.unwrap_err();
        assert!(ended.is_cancelled(), "{ended}");
    }
    holders.signal(Signal::TERM);
    assert!(holders.wait_exit().await.success());
}

/// Five hundred guards of one client, for as long as `time`.
async fn five_hundred(ttl: Duration, time: Duration) {
    const COUNT: usize = 500;
    let (_database, server) = server().await;
    let proxy = Proxy::start(server.grpc()).await;
    let holders = guards(&url(proxy.address()), COUNT, ttl).await;
    // What it took to get there is not counted.
    sleep(ttl).await;
    let (memory, cpu) = (resident_memory(holders.pid()), cpu_time(holders.pid()));
    sleep(time).await;
    let used = cpu_time(holders.pid()).unwrap() - cpu.unwrap();
    let share = used.as_secs_f64() / time.as_secs_f64();
    let (before, after) = (memory.unwrap(), resident_memory(holders.pid()).unwrap());
    println!(
        "{COUNT} guards, TTL {ttl:?}, {time:?}: {} connections, {:.1} % of a core, \
         {before} KiB then {after} KiB",
        proxy.accepted(),
        share * 100.0
    );
    assert_eq!(lost(&holders), [""; 0]);
    assert!(proxy.accepted() <= 2);
    assert!(share < 0.05);
    assert!(after < before + before / 10);
    holders.signal(Signal::TERM);
    assert!(holders.wait_exit().await.success());
    let left = client_of(&server).get("a-499").await.unwrap();
    assert_eq!(left, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_guards_need_two_connections() {
    five_hundred(Duration::from_secs(20), Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "ten minutes: make soak"]
async fn five_hundred_guards_for_ten_minutes() {
    five_hundred(Duration::from_secs(30), Duration::from_secs(600)).await;
}
