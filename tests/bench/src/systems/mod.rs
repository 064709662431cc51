//! The systems: how each is started, with its own durable defaults, and what a
//! client of it says.

mod advisory;
mod beside;
mod etcd;
mod fencepost;
mod locks;
pub(crate) mod noop;
mod postgres;
mod redis;
mod secure;
mod shim;
mod sql;
mod zookeeper;

use std::{net::SocketAddr, process::Command, time::Duration};

use fencepost_support::{leash::End, process::Process, wait::PATIENCE};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

pub(crate) use self::{fencepost::Fencepost, locks::Holder, shim::Shim};
use crate::{
    args::{Kind, Scenario},
    load::{Client, Result},
};

/// The TTL of leases: far longer than any cell.
pub(crate) const TTL_S: u16 = 30;

/// A running system. Dropping it ends it and removes its files.
#[tonic::async_trait]
pub(crate) trait System: Send + Sync {
    /// A client for each name.
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>>;

    /// What it runs, for the accounts of processor time.
    fn processes(&self) -> Vec<(&'static str, u32)>;

    /// Fills its table with this many names that are free.
    async fn fill(&self, _rows: u64) -> Result<()> {
        Err("it has no table".into())
    }

    /// The share of updates that were heap-only so far, when it is known.
    async fn hot_updates(&self) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Starts a system; with a shim, each of its flushes takes longer.
pub(crate) async fn start(kind: Kind, shim: Option<&Shim>) -> Result<Box<dyn System>> {
    Ok(match kind {
        Kind::Fencepost => Box::new(Fencepost::start(shim).await?),
        Kind::FencepostScraped => Box::new(Fencepost::scraped().await?),
        Kind::FencepostAudited => Box::new(Fencepost::audited().await?),
        Kind::FencepostTraced => Box::new(Fencepost::traced().await?),
        Kind::FencepostTls => Box::new(Fencepost::secured().await?),
        Kind::Etcd => Box::new(etcd::Etcd::start().await?),
        Kind::Zookeeper => Box::new(zookeeper::Zookeeper::start(shim).await?),
        Kind::RedisAof => Box::new(redis::Redis::start(redis::Log::EveryWrite, shim).await?),
        Kind::Redis => Box::new(redis::Redis::start(redis::Log::None, shim).await?),
        Kind::SqlPerCall => Box::new(sql::SqlPerCall::start(shim).await?),
        Kind::Advisory => Box::new(advisory::Advisory::start().await?),
        Kind::GrpcNoop => Box::new(noop::Noop::start().await?),
    })
}

/// Why this system has no figure in this cell.
pub(crate) fn why_not(kind: Kind, scenario: Scenario, clients: usize) -> Option<&'static str> {
    match (kind, scenario) {
        (Kind::Advisory, _) if clients > sql::CONNECTIONS => {
            Some("one session a holder, and the server takes 100")
        }
        (Kind::Etcd, Scenario::SlowFsync) => {
            Some("Go calls the kernel without the C library, where the delay is")
        }
        _ => None,
    }
}

/// How many connections to a gRPC server so many clients share, the same for each system.
fn connections(clients: usize) -> usize {
    clients.div_ceil(32)
}

async fn channels(address: SocketAddr, clients: usize) -> Result<Vec<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
    let mut channels = Vec::new();
    for _ in 0..connections(clients) {
        channels.push(endpoint.connect().await?);
    }
    Ok(channels)
}

/// A program on the path, or why it cannot be measured.
fn program(name: &str) -> Result<Command> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join(name));
    match found.into_iter().find(|program| program.exists()) {
        Some(program) => Ok(Command::new(program)),
        None => Err(format!("{name} is not installed").into()),
    }
}

/// Starts a server and waits until it listens.
async fn serve(name: &'static str, command: &mut Command, address: SocketAddr) -> Result<Process> {
    let process = Process::start(name, command.current_dir("/"), End::KillGroup);
    let listens = async {
        loop {
            if let Some(status) = process.exit_status() {
                return Err(format!(
                    "{name} ended at its start: {status}\n{}",
                    process.tail()
                ));
            }
            if TcpStream::connect(address).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(PATIENCE, listens).await {
        Ok(listening) => listening?,
        Err(_) => return Err(format!("{name} does not listen\n{}", process.tail()).into()),
    }
    Ok(process)
}
