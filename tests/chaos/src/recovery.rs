//! Whether the replicas serve again, as clients that come anew see it.

use std::time::Duration;

use fencepost_proto::v1::lock_service_client::LockServiceClient;
use fencepost_support::{
    calls,
    server::{Client, endpoint_at},
};
use futures_util::future::join_all;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Status;

use crate::world::World;

/// So soon after a fault's end each replica serves.
pub const BOUND: Duration = Duration::from_secs(10);

/// So long one call may take until another try is made, on a new connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits until every replica has acquired, renewed and released; says how long that
/// took since the end of the faults, or which did not in time.
pub(crate) async fn wait(world: &World, round: &str, ended: Instant) -> Result<Duration, String> {
    let served = (0..world.replicas.len()).map(|n| async move {
        let name = format!("back-{round}-{n}");
        match timeout_at(ended + BOUND, serves(world, n, &name)).await {
            Ok(()) => None,
            Err(_) => Some(n),
        }
    });
    let late: Vec<usize> = join_all(served).await.into_iter().flatten().collect();
    if late.is_empty() {
        return Ok(ended.elapsed());
    }
    Err(format!("replicas {late:?} do not serve after {BOUND:?}"))
}

/// A connection to a replica, through its proxy.
pub(crate) fn connect(world: &World, replica: usize) -> Client {
    let endpoint = endpoint_at(world.replicas[replica].front.address());
    LockServiceClient::new(endpoint.connect_timeout(PATIENCE).connect_lazy())
}

async fn serves(world: &World, replica: usize, name: &str) {
    const TTL: Duration = Duration::from_secs(60);
    let mut client = connect(world, replica);
    let mut tries = 0;
    loop {
        tries += 1;
        let name = format!("{name}-{tries}");
        let whole = async {
            let lock = calls::acquire(&mut client, &name, "probe", TTL).await?.lock;
            let lock = lock.ok_or_else(|| Status::aborted("refused"))?;
            let token = lock.fencing_token;
            calls::renew(&mut client, &name, "probe", token, None).await?;
            calls::release(&mut client, &name, "probe", token).await
        };
        if let Ok(Ok(())) = timeout(PATIENCE, whole).await {
            return;
        }
        client = connect(world, replica);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
