//! The two ports of the sidecar.

use std::io;

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Response, StatusCode, header},
    routing::{get, post},
};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinError};
use tokio_util::sync::CancellationToken;

use super::seat::{Released, Seat};

/// When /readyz says yes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Ready {
    /// While the lock is held: for a Service whose only endpoint is the leader.
    Held,
    /// Always, until we are told to end.
    Always,
}

/// For the process next door.
pub(super) async fn serve_neighbour(
    listener: TcpListener,
    seat: Seat,
    closing: CancellationToken,
) -> io::Result<()> {
    let router = Router::new()
        .route(
            "/lease",
            get(async |State(seat): State<Seat>| json(StatusCode::OK, &seat.lease())),
        )
        .route("/release", post(release))
        .route("/heartbeat", post(heartbeat))
        .with_state(seat);
    axum::serve(listener, router)
        .with_graceful_shutdown(closing.cancelled_owned())
        .await
}

/// For whoever looks after the pod.
pub(super) async fn serve_probes(
    listener: TcpListener,
    seat: Seat,
    ready: Ready,
    closing: CancellationToken,
) -> io::Result<()> {
    let readyz = async move |State(seat): State<Seat>| {
        let is_ready = !seat.is_stopping() && (ready == Ready::Always || seat.is_held());
        if is_ready {
            (StatusCode::OK, "ok\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        }
    };
    let router = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(seat);
    axum::serve(listener, router)
        .with_graceful_shutdown(closing.cancelled_owned())
        .await
}

/// Why a listener has ended.
pub(super) fn why(ended: Result<io::Result<()>, JoinError>) -> io::Error {
    match ended {
        Ok(Ok(())) => io::ErrorKind::NotConnected.into(),
        Ok(Err(error)) => error,
        Err(error) => error.into(),
    }
}

/// Answers once the lock is free: 204. 409: it is not held. 503: it could not be
/// given back, and is free when its lease ends.
async fn release(State(seat): State<Seat>) -> Response<Body> {
    let status = match seat.release().await {
        Some(Released::Done) => StatusCode::NO_CONTENT,
        Some(Released::NotHeld) => StatusCode::CONFLICT,
        Some(Released::Later) | None => StatusCode::SERVICE_UNAVAILABLE,
    };
    answer(seat, status)
}

/// 204 while the lock is held, else 409.
async fn heartbeat(State(seat): State<Seat>) -> Response<Body> {
    seat.heartbeat();
    let status = if seat.is_held() {
        StatusCode::NO_CONTENT
    } else {
        StatusCode::CONFLICT
    };
    answer(seat, status)
}

fn answer(seat: Seat, status: StatusCode) -> Response<Body> {
    if status == StatusCode::NO_CONTENT {
        let mut response = Response::default();
        *response.status_mut() = status;
        response
    } else {
        json(status, &seat.lease())
    }
}

fn json(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(format!("{value}\n")));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
