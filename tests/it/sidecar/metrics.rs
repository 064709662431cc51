//! What a sidecar tells of its lock: the right numbers, and what the README lists.

use fencepost_support::{system::free_address, wait::within};
use tokio::time::sleep;

use super::{Sidecar, TTL, on_shared, take_away};
use crate::{
    metrics::{
        listed::{exported, listed},
        scrape::Scrape,
    },
    world::LONG,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_exports_what_the_readme_lists() {
    let address = free_address();
    let listen = address.to_string();
    let (sidecar, world, name) = on_shared(&["--metrics-listen", &listen]).await;
    let token = sidecar.held(LONG).await;
    sleep(TTL).await;
    let held = Scrape::at(address).await;
    assert_eq!(held.value("fencepost_client_held", &[]), 1.0);
    assert_eq!(
        held.value("fencepost_client_acquire_seconds_count", &[]),
        1.0
    );
    assert_eq!(held.value("fencepost_client_held_seconds_count", &[]), 0.0);
    let renewals = held.value("fencepost_client_renewal_slack_seconds_count", &[]);
    let slack = held.value("fencepost_client_renewal_slack_seconds_sum", &[]);
    assert!(renewals >= 2.0, "{renewals}");
    assert!(
        slack > 0.0 && slack < renewals * TTL.as_secs_f64(),
        "{slack}"
    );
    assert_eq!(exported(&held), listed("Metrics of clients"));
    assert!(!held.text.contains(&name), "{}", held.text);

    take_away(world, &name).await;
    within(LONG, "a new lease", async || {
        let now = sidecar.lease().await["fencing_token"].as_i64()?;
        (now > token).then_some(())
    })
    .await;
    assert_eq!(sidecar.post("/rejected").await, 204);
    let lost = Scrape::at(address).await;
    let not_found = &[("reason", "LOCK_NOT_FOUND")];
    assert_eq!(
        lost.value("fencepost_client_leases_lost_total", not_found),
        1.0
    );
    assert_eq!(lost.value("fencepost_client_leases_lost_total", &[]), 1.0);
    assert_eq!(lost.value("fence_rejected_total", &[]), 1.0);
    assert_eq!(sidecar.post("/release").await, 204);
    let released = Scrape::at(address).await;
    assert_eq!(released.value("fencepost_client_held", &[]), 0.0);
    let count = released.value("fencepost_client_held_seconds_count", &[]);
    assert_eq!(count, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_renewals_are_counted_and_the_loss_that_follows() {
    use fencepost_support::proxy::Proxy;
    let world = crate::world::shared().await;
    let proxy = Proxy::start(world.server.grpc()).await;
    let address = free_address();
    let listen = address.to_string();
    let endpoint = format!("http://{}", proxy.address());
    let name = crate::world::fresh("sidecar");
    let sidecar = Sidecar::start(&endpoint, &name, &["--metrics-listen", &listen]).await;
    sidecar.held(LONG).await;
    proxy.refuse().await;
    proxy.reset().await;
    within(LONG, "the lease to be lost", async || {
        let scrape = Scrape::at(address).await;
        let unconfirmed = &[("reason", "UNCONFIRMED")];
        let lost = scrape.value("fencepost_client_leases_lost_total", unconfirmed);
        let failures = scrape.value("fencepost_client_renewal_failures_total", &[]);
        (lost == 1.0 && failures >= 1.0).then_some(())
    })
    .await;
}
