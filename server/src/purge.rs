//! The clean-up of names that nobody uses any more.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{store::Store, telemetry::Chain};

/// Walks the lock table a page at a time, a few times per retention, until
/// told to stop. Replicas do the same side by side: each skips what another
/// has locked.
pub(crate) async fn run(store: Store, retention: Duration, stop: CancellationToken) {
    let pause = (retention / 4).clamp(Duration::from_secs(1), Duration::from_secs(600));
    let work = async {
        loop {
            // Spread, so that replicas that started together do not meet.
            tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.5))).await;
            if store.may_purge() {
                walk(&store).await;
            }
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Rests between pages for as long as a page took, so that clean-up never
/// takes more than half of a connection.
async fn walk(store: &Store) {
    let mut after = String::new();
    let mut rows = 0_i64;
    while store.may_purge() {
        let began = tokio::time::Instant::now();
        match store.purge_page(&after).await {
            Ok(page) => {
                rows += i64::from(page.rows);
                match page.last {
                    Some(last) => after = last,
                    None => break,
                }
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "purge will try again later");
                break;
            }
        }
        tokio::time::sleep(began.elapsed()).await;
    }
    if rows > 0 {
        tracing::debug!(rows, "purged idle names");
    }
}
