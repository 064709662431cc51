//! The HTTP port, for probes that do not speak gRPC, and for Prometheus.

use std::{future::poll_fn, io, net::SocketAddr, time::Duration};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    routing::get,
    serve::Listener,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    metrics,
    service::{connection::Connection, health::HealthService, incoming::Incoming},
};

/// Connections at one time.
const ROOM: usize = 32;

/// A connection that is kept for the next probe is silent between two.
const SILENCE: Duration = Duration::from_secs(60);

/// Serves `/livez` (the process lives), `/readyz` (locks can be taken here) and
/// `/metrics`, as `scrape` has them, until `closing`.
pub(crate) async fn serve(
    listener: TcpListener,
    health: HealthService,
    scrape: impl Fn() -> String + Clone + Send + Sync + 'static,
    closing: CancellationToken,
) -> io::Result<()> {
    let readyz = move || async move {
        if health.is_ready() {
            (StatusCode::OK, "ok\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        }
    };
    let metrics = move || async move { ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], scrape()) };
    let router = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics));
    let incoming = Incoming::new(listener, ROOM).silent_for(SILENCE);
    axum::serve(incoming, router)
        .with_graceful_shutdown(closing.cancelled_owned())
        .await
}

impl Listener for Incoming {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let accepted = poll_fn(|cx| self.poll_accept(cx)).await;
        let peer = accepted.peer;
        (accepted.plain(), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Incoming::local_addr(self)
    }
}
