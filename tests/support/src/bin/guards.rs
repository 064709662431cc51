//! A process that holds locks through the Rust client, for a test to freeze, to
//! wake and to measure.
//!
//!   guards ENDPOINTS NAME COUNT TTL_MS
//!
//! Takes NAME-0 … and says `ready`. Then looks at each guard every 100 ms: a line
//! `lost NAME-I REASON MS` when it is lost, MS on `CLOCK_BOOTTIME`. A single guard is
//! looked at every 10 ms, and each look that finds it held is a line `held MS`. TERM makes it release all and end with 0.

#![allow(
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "a part of a test: its output is read by the test, and a panic fails it"
)]

use std::{env, time::Duration};

use fencepost_client::{AcquireOptions, Client, Error};
use fencepost_support::system::boottime_ms;
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [endpoints, name, count, ttl] = &arguments[..] else {
        panic!("four arguments, not {}", arguments.len());
    };
    let count: usize = count.parse().unwrap();
    let ttl = Duration::from_millis(ttl.parse().unwrap());
    let client = Client::connect_lazy(endpoints).unwrap();
    let mut term = signal(SignalKind::terminate()).unwrap();

    let mut taking = JoinSet::new();
    for number in 0..count {
        let (client, name) = (client.clone(), format!("{name}-{number}"));
        taking.spawn(async move {
            let options = AcquireOptions::default().ttl(ttl);
            client.acquire_with_retry(&name, options).await.unwrap()
        });
    }
    let mut guards = taking.join_all().await;
    eprintln!("ready");

    let mut looks = interval(Duration::from_millis(if count == 1 { 10 } else { 100 }));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            _ = term.recv() => break,
        }
        guards.retain(|guard| match guard.ensure_held() {
            Ok(()) => {
                if count == 1 {
                    eprintln!("held {}", boottime_ms());
                }
                true
            }
            Err(Error::Lost { reason }) => {
                let now = boottime_ms();
                eprintln!("lost {} {} {now}", guard.resource(), reason.as_str());
                false
            }
            Err(other) => panic!("{other}"),
        });
    }
    drop(guards);
    client.released().await;
}
