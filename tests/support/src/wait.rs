//! The one way to wait for something outside that announces nothing.

use std::time::{Duration, Instant};

/// How long [`eventually`] waits before it gives up.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Asks until the answer is there, at most [`PATIENCE`] long; panics with
/// `what` when it never comes.
pub async fn eventually<T>(what: &str, ask: impl AsyncFnMut() -> Option<T>) -> T {
    within(PATIENCE, what, ask).await
}

/// Asks until the answer is there, at most `patience` long; panics with `what`
/// when it never comes.
pub async fn within<T>(
    patience: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(
            start.elapsed() < patience,
            "not within {patience:?}: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
