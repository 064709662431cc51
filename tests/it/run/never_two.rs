//! The figure that all is about: how long before the next holder's first stamp
//! the command's last one is, on one clock, when the network swallows all.

use std::time::Duration;

use fencepost_support::{calls::acquire, eventually, network::Network};
use rustix::{
    process::Signal,
    time::{ClockId, clock_gettime},
};
use tokio::{runtime::Handle, sync::Mutex, task::JoinSet};

use super::stage::{Run, Stamps, fresh, words};
use crate::world::{LONG, client, shared};

/// All at once, several times over.
const AT_ONCE: usize = 10;
const TIMES: usize = 5;

/// Who is next.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// Another `fencepost run`.
    Run,
    /// A client that asks all the time, and does not have to start anything.
    Client,
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_commands_at_a_time() {
    rounds("quiet").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_commands_at_a_time_when_one_forks_and_ignores_term() {
    rounds("stubborn").await;
}

async fn rounds(kind: &'static str) {
    // One after the other, so that the machine can keep the leases.
    static ONE: Mutex<()> = Mutex::const_new(());
    let _one = ONE.lock().await;
    let mut gaps = Vec::new();
    for _ in 0..TIMES {
        let mut set = JoinSet::new();
        for n in 0..AT_ONCE {
            let next = if n % 2 == 0 { Next::Run } else { Next::Client };
            let delay = Duration::from_millis(37 * n as u64);
            let runtime = Handle::current();
            set.spawn_blocking(move || (next, runtime.block_on(round(kind, next, delay))));
        }
        gaps.extend(set.join_all().await);
    }
    for next in ["Run", "Client"] {
        let of_kind = gaps.iter().filter(|gap| format!("{:?}", gap.0) == next);
        let smallest = of_kind.map(|gap| gap.1).min();
        println!("{kind}, then {next}: the smallest gap is {smallest:?} ms");
    }
    assert_eq!(gaps.len(), AT_ONCE * TIMES);
    assert!(gaps.iter().all(|gap| gap.1 > 0), "{gaps:?}");
}

/// The time in ms from the last stamp of one command to the first of the next.
async fn round(kind: &str, next: Next, delay: Duration) -> i128 {
    let (network, resource) = (Network::to(&shared().await.server).await, fresh("figure"));
    let stamps = Stamps::new();
    let command = stamps.command(kind);
    // The lock is tried to be given back for so long, and nobody hears it.
    let flags = ["--ttl", "1s", "--timeout", "1s"];
    let run = loop {
        let run = Run::start(&network.url(), &resource, &flags, &words(&command));
        tokio::select! {
            _ = stamps.first() => break run,
            // Lost before it began: the machine stood still, and this is no round.
            _ = run.process.wait_exit() => {}
        }
    };
    // Somewhere between two renewals.
    tokio::time::sleep(delay).await;
    network.swallow().await;
    let first = match next {
        Next::Run => {
            let stamps = Stamps::new();
            let command = stamps.command("quiet");
            let endpoint = shared().await.server.url();
            let next = Run::start(&endpoint, &resource, &[], &words(&command));
            let first = stamps.first().await;
            next.signal(Signal::TERM);
            next.ends(143).await;
            first
        }
        Next::Client => {
            let mut client = client().await;
            eventually("the lock is free", async || {
                let answer = acquire(&mut client, &resource, "next", LONG).await;
                answer.unwrap().lock
            })
            .await;
            let now = clock_gettime(ClockId::Boottime);
            Duration::new(
                now.tv_sec.unsigned_abs(),
                u32::try_from(now.tv_nsec).unwrap(),
            )
        }
    };
    run.ends(76).await;
    (first.as_nanos().cast_signed() - stamps.last().as_nanos().cast_signed()) / 1_000_000
}
