//! While it waits for the lock: for as long as asked, and it can be stopped.

use std::time::{Duration, Instant};

use fencepost_support::{
    calls::{acquire, get, granted},
    eventually,
    proxy::{Flow, Proxy},
};
use rustix::process::Signal;

use super::stage::{Run, fresh, plain, url_of};
use crate::{
    programs,
    world::{LONG, client, shared},
};

const SECOND: Duration = Duration::from_secs(1);
const ENDING: [Signal; 3] = [Signal::TERM, Signal::INT, Signal::HUP];

/// Signals the waiting one, which ends within a second and starts nothing.
async fn stops(run: &Run, signal: Signal) {
    let told = Instant::now();
    run.signal(signal);
    run.ends_within(Duration::from_secs(3), 128 + signal.as_raw())
        .await;
    let took = told.elapsed();
    println!("stopped within {took:?}");
    assert!(took < SECOND, "{took:?}");
    assert!(!run.has_said("started"), "{}", run.process.tail());
    assert!(run.left().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn it_can_be_stopped_while_another_has_the_lock() {
    let (world, mut client) = (shared().await, client().await);
    for signal in ENDING {
        let (resource, proxy) = (fresh("waits"), Proxy::start(world.server.grpc()).await);
        let lock = granted(&mut client, &resource, "holder", LONG).await;
        let run = Run::start(
            &url_of(proxy.address()),
            &resource,
            &[],
            &["echo", "started"],
        );
        eventually("it was refused", async || {
            (proxy.passed_down() > 200).then_some(())
        })
        .await;
        stops(&run, signal).await;
        // It is not next.
        fencepost_support::calls::release(&mut client, &resource, "holder", lock.fencing_token)
            .await
            .unwrap();
        granted(&mut client, &resource, "another", LONG).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_can_be_stopped_while_nobody_answers() {
    for signal in ENDING {
        let (resource, proxy) = (
            fresh("hole"),
            Proxy::start(shared().await.server.grpc()).await,
        );
        proxy.black_hole();
        let run = Run::start(
            &url_of(proxy.address()),
            &resource,
            &[],
            &["echo", "started"],
        );
        eventually("it has connected", async || {
            (proxy.accepted() > 0).then_some(())
        })
        .await;
        stops(&run, signal).await;
    }
}

/// The server has granted it, and the answer is still under way.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_it_has_not_heard_of_is_given_back() {
    let mut client = client().await;
    for signal in ENDING {
        let (resource, proxy) = (
            fresh("unheard"),
            Proxy::start(shared().await.server.grpc()).await,
        );
        proxy.set_down(Flow::Delay(Duration::from_millis(200)));
        let run = Run::start(
            &url_of(proxy.address()),
            &resource,
            &[],
            &["echo", "started"],
        );
        eventually("it is granted", async || {
            get(&mut client, &resource).await.ok()
        })
        .await;
        stops(&run, signal).await;
        let answer = acquire(&mut client, &resource, "another", LONG).await;
        assert!(answer.unwrap().acquired, "a grant was left");
    }
}

/// Not earlier, and hardly later; and at once when it shall not wait.
#[tokio::test(flavor = "multi_thread")]
async fn it_waits_for_as_long_as_it_is_told() {
    let (mut client, resource) = (client().await, fresh("told"));
    granted(&mut client, &resource, "holder", LONG).await;
    let endpoint = shared().await.server.url();
    for (wait, least) in [("0s", Duration::ZERO), ("1s", SECOND)] {
        let flags = ["--wait", wait];
        let mut fastest = Duration::MAX;
        // A busy machine may be slow once, but is never early.
        for _ in 0..3 {
            let command = plain(&endpoint, &resource, &flags, &["echo", "started"]);
            let asked = Instant::now();
            let ended = programs::run(command).await;
            let took = asked.elapsed();
            assert_eq!(ended.code, Some(75), "{}", ended.said());
            assert!(ended.stderr.contains("holder"), "{}", ended.stderr);
            assert!(!ended.said().contains("started"), "{}", ended.said());
            assert!(took >= least, "{took:?} is less than {wait}");
            fastest = fastest.min(took);
        }
        println!("--wait {wait}: {fastest:?}");
        assert!(fastest < least + Duration::from_millis(300), "{fastest:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_gets_the_lock_when_the_holder_gives_it_back() {
    let (mut client, resource) = (client().await, fresh("gets"));
    let lock = granted(&mut client, &resource, "holder", LONG).await;
    let proxy = Proxy::start(shared().await.server.grpc()).await;
    let flags = ["--wait", "20s"];
    let run = Run::start(
        &url_of(proxy.address()),
        &resource,
        &flags,
        &["echo", "started"],
    );
    eventually("it was refused", async || {
        (proxy.passed_down() > 200).then_some(())
    })
    .await;
    assert!(!run.has_said("started"));
    let freed = Instant::now();
    fencepost_support::calls::release(&mut client, &resource, "holder", lock.fencing_token)
        .await
        .unwrap();
    run.says("started").await;
    let took = freed.elapsed();
    println!("started {took:?} after the lock was free");
    assert!(took < SECOND * 2, "{took:?}");
    run.ends(0).await;
}
