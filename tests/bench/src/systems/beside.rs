//! What stands beside a server when it is watched: a scraper, a collector of traces.

use std::{net::SocketAddr, time::Duration};

use fencepost_support::system::free_address;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::AbortHandle,
    time::interval,
};
use tonic::{Request, Response, Status, transport::Server};

use crate::load::Result;

/// Ends when dropped.
pub(super) struct Beside(AbortHandle);

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The whole answer of the HTTP port, head included.
pub(super) async fn get(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Reads the metrics each second, fifteen times as often as usual.
pub(super) fn scraper(address: SocketAddr) -> Beside {
    let task = tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(1));
        loop {
            ticks.tick().await;
            // The server may be on its way out.
            let _: Result<String> = get(address, "/metrics").await;
        }
    });
    Beside(task.abort_handle())
}

struct Sink;

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        _: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Takes traces and forgets them; returns where.
pub(super) fn collector() -> (Beside, String) {
    let address = free_address();
    let server = Server::builder().add_service(TraceServiceServer::new(Sink));
    let task = tokio::spawn(server.serve(address));
    (Beside(task.abort_handle()), format!("http://{address}"))
}
