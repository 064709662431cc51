//! The ceiling: a server of the lock service that does nothing, with the
//! settings of `fencepostd`, in a process of its own. It hears the calls that
//! Fencepost hears and answers at once, with next to nothing.

use std::{env, net::SocketAddr, process::Command, time::Duration};

use fencepost_proto::v1::{
    AcquireRequest, AcquireResponse, GetRequest, GetResponse, KeepAliveRequest, KeepAliveResponse,
    ReleaseRequest, ReleaseResponse, RenewRequest, RenewResponse,
    lock_service_server::{LockService, LockServiceServer},
};
use fencepost_support::{leash::End, process::Process};
use tokio_stream::Pending;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use super::{System, channels, locks};
use crate::load::{Client, Result};

pub(crate) struct Noop {
    process: Process,
    address: SocketAddr,
}

impl Noop {
    pub(super) async fn start() -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        let process = Process::start("noop", command.arg("noop"), End::KillGroup);
        let address = process
            .log()
            .wait_for(|line| line.strip_prefix(SERVING)?.parse().ok())
            .await
            .ok_or_else(|| process.tail())?;
        Ok(Self { process, address })
    }
}

#[tonic::async_trait]
impl System for Noop {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let channels = channels(self.address, names.len()).await?;
        Ok(locks::clients(&channels, names))
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("server", self.process.pid())]
    }
}

const SERVING: &str = "serving on ";

/// The process itself: serves until it is killed.
#[expect(clippy::print_stderr, reason = "the parent reads where it listens")]
pub(crate) async fn serve() -> Result<()> {
    let incoming =
        TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?.with_nodelay(Some(true));
    eprintln!("{SERVING}{}", incoming.local_addr()?);
    Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(20_000)
        .initial_connection_window_size(16 * 1024 * 1024)
        .http2_max_pending_accept_reset_streams(Some(20_000))
        .add_service(LockServiceServer::new(Nothing))
        .serve_with_incoming(incoming)
        .await?;
    Ok(())
}

struct Nothing;

#[tonic::async_trait]
impl LockService for Nothing {
    type KeepAliveStream = Pending<Result<KeepAliveResponse, Status>>;

    async fn acquire(
        &self,
        _: Request<AcquireRequest>,
    ) -> Result<Response<AcquireResponse>, Status> {
        Ok(Response::new(AcquireResponse {
            acquired: true,
            ..AcquireResponse::default()
        }))
    }

    async fn release(
        &self,
        _: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn renew(&self, _: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        Ok(Response::new(RenewResponse::default()))
    }

    async fn get(&self, _: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        Ok(Response::new(GetResponse::default()))
    }

    async fn keep_alive(
        &self,
        _: Request<KeepAliveRequest>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        Ok(Response::new(tokio_stream::pending()))
    }
}
