//! The HTTP port, for probes that do not speak gRPC.

use axum::{Router, http::StatusCode, routing::get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::service::health::HealthService;

/// Serves `/livez` (the process lives) and `/readyz` (locks can be taken here)
/// until `closing`.
pub(crate) async fn serve(
    listener: TcpListener,
    health: HealthService,
    closing: CancellationToken,
) -> std::io::Result<()> {
    let readyz = move || async move {
        if health.is_ready() {
            (StatusCode::OK, "ok\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        }
    };
    let router = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz));
    axum::serve(listener, router)
        .with_graceful_shutdown(closing.cancelled_owned())
        .await
}
