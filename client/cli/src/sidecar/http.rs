//! The ports of the sidecar.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Response, StatusCode, header},
    routing::{get, post},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::Value;
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    metrics::{self, Metrics},
    seat::{Released, Seat},
};

/// Connections at one time, of each port.
const PLACES: usize = 64;
/// How long a request may take to be there.
const HEADERS: Duration = Duration::from_secs(5);
/// How long a connection lasts: a release waits for a hook, and for the server.
const LIFETIME: Duration = Duration::from_secs(60);
/// Before the next connection when one could not be accepted.
const REST: Duration = Duration::from_millis(50);

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
    metrics: Arc<Metrics>,
    closing: CancellationToken,
) {
    // A write of the neighbour's was refused for an older token.
    let rejected = async move || {
        metrics.rejected();
        StatusCode::NO_CONTENT
    };
    let router = Router::new()
        .route(
            "/lease",
            get(async |State(seat): State<Seat>| json(StatusCode::OK, &seat.lease())),
        )
        .route("/release", post(release))
        .route("/heartbeat", post(heartbeat))
        .route("/rejected", post(rejected))
        .with_state(seat);
    serve(listener, router, closing).await;
}

/// For whoever looks after the pod.
pub(super) async fn serve_probes(
    listener: TcpListener,
    seat: Seat,
    ready: Ready,
    closing: CancellationToken,
) {
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
    serve(listener, router, closing).await;
}

/// For Prometheus.
pub(super) async fn serve_metrics(
    listener: TcpListener,
    seat: Seat,
    metrics: Arc<Metrics>,
    closing: CancellationToken,
) {
    let scrape = async move |State(seat): State<Seat>| {
        let content_type = [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)];
        (content_type, metrics.text(seat.is_held()))
    };
    let router = Router::new()
        .route("/metrics", get(scrape))
        .with_state(seat);
    serve(listener, router, closing).await;
}

/// Answers one request a connection, until `closing`. A client that is slow, or
/// says nothing, keeps a place for so long and no longer, and no more than there
/// are: the rest waits to be accepted.
async fn serve(listener: TcpListener, router: Router, closing: CancellationToken) {
    let places = Arc::new(Semaphore::new(PLACES));
    let mut connections = JoinSet::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .keep_alive(false);
    loop {
        let accepted = async {
            // It is never closed.
            let place = Arc::clone(&places).acquire_owned().await.ok()?;
            let (stream, _) = listener.accept().await.ok()?;
            Some((stream, place))
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = closing.cancelled() => break,
        };
        while connections.try_join_next().is_some() {}
        let Some((stream, place)) = accepted else {
            // The machine has no room for another: it has to make some first.
            sleep(REST).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move {
            let _: Result<Result<(), _>, _> = timeout(LIFETIME, connection).await;
            drop(place);
        });
    }
    connections.join_all().await;
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
