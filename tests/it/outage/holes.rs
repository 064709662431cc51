//! A network that swallows what it is given.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server,
    calls::get,
    postgres::fresh_database,
    proxy::{Flow, Proxy},
};

use super::{FOLLOW, Patient, RECOVERY, watch::Watch};

/// Long enough for calls that began at any moment to be answered.
const HOLE: Duration = Duration::from_secs(8);

async fn hole(what: &str, up: Flow, down: Flow) {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = Postgres::url_via(proxy.address(), database.name());
    let mut patient = Patient::new(Server::start(&url).await).await;

    let cut = Instant::now();
    let cpu = patient.server.cpu_time();
    proxy.set(up, down);
    patient.falls_ill(what, cut).await;
    tokio::time::sleep_until((cut + HOLE).into()).await;
    let busy = (patient.server.cpu_time() - cpu).as_secs_f64() / cut.elapsed().as_secs_f64();
    println!("{what}: {:.1} % of a core", busy * 100.0);
    assert!(busy < 0.2, "{busy}");

    // The old connections are lost, as after a dropped NAT entry; those that
    // were opened into the hole hang until they are given up.
    let healed = Instant::now();
    proxy.forward().await;
    patient.recovers(what, healed).await;

    // Nothing is left behind in the database that holds a row.
    let mut client = patient.server.client().await;
    get(&mut client, "load").await.unwrap();
    let admin = database.client().await;
    let stuck: i64 = admin
        .value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND state LIKE 'idle in transaction%'",
        )
        .await;
    assert_eq!(stuck, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_in_both_directions() {
    hole("both directions", Flow::Swallow, Flow::Swallow).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_before_the_database() {
    hole("to the database", Flow::Swallow, Flow::Pass).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_behind_the_database() {
    hole("after the commit", Flow::Pass, Flow::Swallow).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_server_notices_a_black_hole_too() {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = Postgres::url_via(proxy.address(), database.name());
    let server = Server::start(&url).await;
    let mut watch = Watch::start(&server).await;
    // Its one connection is the check's own, and works until now.
    let cut = Instant::now();
    proxy.black_hole();
    let after = watch.wait_for(false, cut, FOLLOW).await;
    println!("idle: not ready after {after:?}");
    let healed = Instant::now();
    proxy.forward().await;
    let after = watch.wait_for(true, healed, RECOVERY).await;
    println!("idle: ready again after {after:?}");
    watch.assert_sound();
}
