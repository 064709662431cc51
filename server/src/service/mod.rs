//! All that knows gRPC: wire types in, calls of the store, wire types out.
//!
//! A call passes the [`edge`], which bounds its time and rewrites what tonic
//! answers by itself; then its handler, which checks every field ([`convert`])
//! before the database sees anything. Every error becomes a `tonic::Status` in
//! [`status`] and nowhere else. Who calls is known as [`caller`](crate::caller) says.

pub(crate) mod connection;
mod convert;
mod edge;
mod handshakes;
pub(crate) mod health;
pub(crate) mod incoming;
mod keep_alive_stream;
mod locks;
mod observe;
mod seat;
mod status;
mod turn;

use std::{pin::pin, sync::Arc, time::Duration};

use fencepost_proto::v1::{self, lock_service_server::LockServiceServer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub(crate) use self::{edge::EdgeLayer, locks::Locks};
use self::{
    handshakes::Handshakes,
    health::HealthService,
    incoming::{Incoming, room},
};
use crate::{lock::TtlLimits, metrics::Metrics, telemetry::Chain, tls::Tls};

/// The largest request: the largest valid one is far smaller.
const MAX_MESSAGE: usize = 64 * 1024;

/// The headers of one request, by HTTP/2's way to count them: a bearer token of 4 KiB, a
/// trace and what proxies add fit.
const MAX_HEADERS: u32 = 8 * 1024;

/// Connections to the port that serves health alone.
pub(crate) const PROBES: usize = 64;

/// What the service must be told.
#[derive(Debug, Clone)]
pub(crate) struct ServiceConfig {
    pub(crate) ttl: TtlLimits,
    /// What one call may take.
    pub(crate) request_timeout: Duration,
    /// File handles that clients must leave to the database and the probes.
    pub(crate) reserved_handles: usize,
    /// None: in the clear.
    pub(crate) tls: Option<Arc<Tls>>,
}

/// Serves locks, health and reflection on `listener` until `closing`; then
/// refuses new calls and returns once every connection has ended.
pub(crate) async fn serve(
    listener: TcpListener,
    config: ServiceConfig,
    locks: Locks,
    health: HealthService,
    edge: EdgeLayer,
    metrics: Metrics,
    closing: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let locks = LockServiceServer::new(locks).max_decoding_message_size(MAX_MESSAGE);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let mut router = server()
        .layer(edge)
        .add_service(locks)
        .add_service(health.into_server());
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => router = router.add_service(v1).add_service(v1alpha),
        // Our own descriptors are built into the binary: they decode.
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(error = %Chain(&error), "there is no reflection");
        }
    }
    let room = room(config.reserved_handles);
    metrics
        .connections_limit
        .set(room.try_into().unwrap_or(i64::MAX));
    let incoming = Incoming::new(listener, room).counted(metrics.connections);
    let closed = closing.clone().cancelled_owned();
    match config.tls {
        Some(tls) => {
            let follow = Arc::clone(&tls).follow(metrics.tls.clone(), closing);
            let incoming = Handshakes::new(incoming, tls, metrics.tls);
            let mut served = pin!(router.serve_with_incoming_shutdown(incoming, closed));
            tokio::select! {
                ended = &mut served => ended,
                () = follow => served.await,
            }
        }
        None => router.serve_with_incoming_shutdown(incoming, closed).await,
    }
}

/// Serves health alone, in the clear, for probes that cannot reach the main port.
pub(crate) async fn serve_health(
    listener: TcpListener,
    health: HealthService,
    closing: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    server()
        .add_service(health.into_server())
        .serve_with_incoming_shutdown(Incoming::new(listener, PROBES), closing.cancelled_owned())
        .await
}

/// What all our ports have in common.
fn server() -> Server {
    Server::builder()
        // A peer that is dead or frozen is found out in ten seconds.
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        // tonic leaves it open.
        .max_concurrent_streams(20_000)
        .http2_max_header_list_size(MAX_HEADERS)
        // h2 budgets small frames by the connection window; the default kills a
        // connection that opens thousands of streams at once.
        .initial_connection_window_size(16 * 1024 * 1024)
        // Thousands of calls cancelled at once must not kill a connection with
        // the others on it; their cost is bounded by the store.
        .http2_max_pending_accept_reset_streams(Some(20_000))
}
