//! The HTTP port, for probes that do not speak gRPC, and for Prometheus.

use std::{
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    routing::get,
    serve::Listener,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
    time::Sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{
    metrics,
    service::{connection::Connection, health::HealthService, incoming::Incoming},
};

/// Connections at one time.
const ROOM: usize = 32;

/// A connection that is kept for the next probe is silent between two.
const SILENCE: Duration = Duration::from_secs(60);

/// From the first byte of a request to the last one of its answer: whoever sends or
/// reads in drips does not keep a place.
const EXCHANGE: Duration = Duration::from_secs(10);

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
    axum::serve(Port(incoming), router)
        .with_graceful_shutdown(closing.cancelled_owned())
        .await
}

/// Where connections come from.
struct Port(Incoming);

impl Listener for Port {
    type Io = Exchanges;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Exchanges, SocketAddr) {
        let accepted = poll_fn(|cx| self.0.poll_accept(cx)).await;
        let peer = accepted.peer;
        let exchanges = Exchanges {
            connection: accepted.plain(),
            ends: None,
            answering: false,
        };
        (exchanges, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// A connection on which each request, with its answer, has a time.
struct Exchanges {
    connection: Connection,
    /// When the exchange under way must be over.
    ends: Option<Pin<Box<Sleep>>>,
    answering: bool,
}

impl Exchanges {
    /// Something of an exchange has come, or is to go.
    fn begin(&mut self) {
        self.ends
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(EXCHANGE)));
    }

    /// What waits for the peer, as long as there is time.
    fn in_time<T>(&mut self, cx: &mut Context<'_>, wait: Poll<T>) -> Poll<io::Result<T>> {
        if let Some(ends) = &mut self.ends
            && wait.is_pending()
        {
            ready!(ends.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        wait.map(Ok)
    }
}

impl AsyncRead for Exchanges {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.connection).poll_read(cx, buffer);
        ready!(self.in_time(cx, read))??;
        if buffer.filled().len() > before {
            self.begin();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Exchanges {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.connection).poll_write(cx, bytes);
        // The requests of several exchanges may have come at once.
        self.begin();
        self.answering = true;
        Poll::Ready(ready!(self.in_time(cx, written))?)
    }

    /// Called when all that was to be said is written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.answering) {
            self.ends = None;
        }
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}
