//! etcd by its Lock service, which blocks until the lock is held; a lease is
//! granted once a client.

use std::net::SocketAddr;

use fencepost_support::{
    process::Process,
    system::{self, PrivateDirectory, free_address},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};

use self::{
    etcdserverpb::{
        LeaseGrantRequest, LeaseKeepAliveRequest, LeaseKeepAliveResponse, lease_client::LeaseClient,
    },
    v3lockpb::{LockRequest, UnlockRequest, lock_client::LockClient},
};
use super::{System, channels, program, serve};
use crate::load::{Client, Result};

#[allow(unreachable_pub, unused_qualifications, reason = "generated code")]
mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}
#[allow(unreachable_pub, unused_qualifications, reason = "generated code")]
mod v3lockpb {
    tonic::include_proto!("v3lockpb");
}

/// Longer than the run, so that no lease ends while another cell is measured.
const LEASE_S: i64 = 4 * 3600;

pub(super) struct Etcd {
    process: Process,
    _directory: PrivateDirectory,
    address: SocketAddr,
}

impl Etcd {
    pub(super) async fn start() -> Result<Self> {
        let directory = system::private_directory();
        let address = free_address();
        let client_url = format!("http://{address}");
        let peer_url = format!("http://{}", free_address());
        let mut command = program("etcd")?;
        command
            .args(["--name", "bench", "--log-level", "error"])
            // Nothing is compacted during a run; the default of 2 GB may not do.
            .args(["--quota-backend-bytes", "8589934592"])
            .args(["--listen-client-urls", &client_url])
            .args(["--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url])
            .args(["--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("bench={peer_url}")])
            .arg("--data-dir")
            .arg(directory.join("data"));
        let process = serve("etcd", &mut command, address).await?;
        Ok(Self {
            process,
            _directory: directory,
            address,
        })
    }
}

#[tonic::async_trait]
impl System for Etcd {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let channels = channels(self.address, names.len()).await?;
        let mut clients: Vec<Box<dyn Client>> = Vec::new();
        for (name, channel) in names.iter().zip(channels.iter().cycle()) {
            clients.push(Box::new(Holder::new(channel, name).await?));
        }
        Ok(clients)
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("server", self.process.pid())]
    }
}

struct Holder {
    locks: LockClient<Channel>,
    leases: LeaseClient<Channel>,
    name: Vec<u8>,
    lease: i64,
    key: Vec<u8>,
    /// Opened by the first renewal.
    keep_alive: Option<KeepAlive>,
}

struct KeepAlive {
    requests: mpsc::Sender<LeaseKeepAliveRequest>,
    answers: Streaming<LeaseKeepAliveResponse>,
}

impl Holder {
    async fn new(channel: &Channel, name: &str) -> Result<Self> {
        let mut leases = LeaseClient::new(channel.clone());
        let request = LeaseGrantRequest {
            ttl: LEASE_S,
            id: 0,
        };
        let lease = leases.lease_grant(request).await?.into_inner().id;
        Ok(Self {
            locks: LockClient::new(channel.clone()),
            leases,
            name: name.as_bytes().to_vec(),
            lease,
            key: Vec::new(),
            keep_alive: None,
        })
    }

    async fn open(&mut self) -> Result<KeepAlive> {
        let (requests, receiver) = mpsc::channel(1);
        requests
            .send(LeaseKeepAliveRequest { id: self.lease })
            .await?;
        let stream = ReceiverStream::new(receiver);
        let answers = self.leases.lease_keep_alive(stream).await?.into_inner();
        Ok(KeepAlive { requests, answers })
    }
}

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        let request = LockRequest {
            name: self.name.clone(),
            lease: self.lease,
        };
        self.key = self.locks.lock(request).await?.into_inner().key;
        Ok(true)
    }

    async fn release(&mut self) -> Result<()> {
        let key = self.key.clone();
        self.locks.unlock(UnlockRequest { key }).await?;
        Ok(())
    }

    async fn renew(&mut self) -> Result<()> {
        let stream = match self.keep_alive.take() {
            Some(stream) => {
                let request = LeaseKeepAliveRequest { id: self.lease };
                stream.requests.send(request).await?;
                self.keep_alive.insert(stream)
            }
            None => {
                let stream = self.open().await?;
                self.keep_alive.insert(stream)
            }
        };
        match stream.answers.message().await? {
            Some(answer) if answer.ttl > 0 => Ok(()),
            _ => Err("the lease is over".into()),
        }
    }
}
