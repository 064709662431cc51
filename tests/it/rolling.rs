//! Three replicas replaced one after the other, as Kubernetes does it, under clients of
//! both kinds: the Rust client with all endpoints, and plain stubs with client-side
//! balancing and the retries of the README's service config. Nobody loses a lock, and
//! no caller sees an error after its retries.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod load;
mod probes;

use std::time::{Duration, Instant};

use fencepost_support::{Server, postgres::fresh_database, server::endpoint_at};
use tokio::sync::mpsc::Sender;
use tonic::transport::{Channel, Endpoint, channel::Change};

use self::{
    load::Load,
    probes::{Probes, Seen},
};

const DELAY: Duration = Duration::from_millis(1500);
/// From the first readiness probe that fails to the last client that knows.
const PROPAGATION: Duration = Duration::from_millis(500);
/// `terminationGracePeriodSeconds`, and the drain's timeout below it.
const GRACE: Duration = Duration::from_secs(12);
const TIMEOUT: &str = "8s";
/// How long all replicas serve before the next one is stopped.
const BETWEEN: Duration = Duration::from_millis(700);

/// The names that clients resolve: the replicas whose readiness probe succeeds.
type Endpoints = Sender<Change<usize, Endpoint>>;

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_three_replicas_is_not_noticed() {
    let database = fresh_database().await;
    let mut replicas = Vec::new();
    let (channel, endpoints) = Channel::balance_channel(16);
    for n in 0..3 {
        let builder = Server::builder(&database.url())
            .flag("--drain-delay", &format!("{}ms", DELAY.as_millis()))
            .flag("--drain-timeout", TIMEOUT);
        let replica = builder.ready().await;
        insert(&endpoints, n, &replica).await;
        replicas.push(replica);
    }
    let load = Load::start(&replicas, channel).await;
    let began = Instant::now();
    for (n, replica) in replicas.iter_mut().enumerate() {
        replace(n, replica, &endpoints).await;
        tokio::time::sleep(BETWEEN).await;
    }
    let took = began.elapsed();
    let report = load.end().await;
    println!("three replicas replaced in {took:?} under {report:?}");
    assert!(report.is_full(), "{report:?}");
}

async fn insert(endpoints: &Endpoints, n: usize, replica: &Server) {
    let change = Change::Insert(n, endpoint_at(replica.grpc()));
    endpoints.send(change).await.unwrap();
}

/// Replaces one replica, and checks what its probes say meanwhile.
async fn replace(n: usize, replica: &mut Server, endpoints: &Endpoints) {
    let probes = Probes::start(replica);
    for probe in Probes::ALL {
        probes.wait_for(probe, Seen::Yes).await;
    }
    let asked = Instant::now();
    replica.sigterm();
    probes.wait_for("readiness", Seen::No).await;
    tokio::time::sleep(PROPAGATION).await;
    endpoints.send(Change::Remove(n)).await.unwrap();
    let status = replica.process().wait_exit_within(GRACE).await;
    let ended = Instant::now();
    assert_eq!(status.code(), Some(0), "{status}");
    let stop = probes.end().await;
    let at = |name: &str, seen| {
        let at = stop.first(name, seen);
        at.unwrap_or_else(|| panic!("{name} was never {seen:?}: {stop:?}")) - asked
    };
    for (ready, alive) in [("readiness", "liveness"), ("/readyz", "/livez")] {
        // Not ready well before the port closes, and alive for as long as it can be asked.
        let (not_ready, closed) = (at(ready, Seen::No), at(ready, Seen::Closed));
        assert!(not_ready + DELAY / 2 < closed, "{ready}: {stop:?}");
        assert_eq!(stop.first(alive, Seen::No), None, "{alive}: {stop:?}");
        assert_eq!(
            stop.words(alive),
            [Seen::Yes, Seen::Closed],
            "{alive}: {stop:?}"
        );
        assert_eq!(
            stop.words(ready),
            [Seen::Yes, Seen::No, Seen::Closed],
            "{ready}: {stop:?}"
        );
        println!("replica {n}: {ready} says no after {not_ready:?}, is closed after {closed:?}");
    }
    println!("replica {n}: ended {:?} after SIGTERM", ended - asked);

    // The same again, on the same address.
    let began = Instant::now();
    replica.restart().await;
    let probes = Probes::start(replica);
    probes.wait_for("liveness", Seen::Yes).await;
    probes.wait_for("readiness", Seen::Yes).await;
    insert(endpoints, n, replica).await;
    let start = probes.end().await;
    for alive in ["liveness", "/livez"] {
        assert_eq!(start.words(alive), [Seen::Yes], "{start:?}");
    }
    let up = |name| start.first(name, Seen::Yes).unwrap();
    assert!(
        up("liveness") <= up("readiness") + Probes::EVERY,
        "{start:?}"
    );
    println!("replica {n}: serves again after {:?}", began.elapsed());
}
