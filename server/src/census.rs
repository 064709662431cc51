//! The count of live leases, for the metrics alone.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{store::Store, telemetry::Chain};

/// The rest before a count; less where purge is in more of a hurry.
const PAUSE: Duration = Duration::from_secs(30);

/// A count takes at most one part in so many of the time, pauses within it
/// included: of a large table there is a number seldom.
const SHARE: u32 = 10;

/// Counts the leases in the lock table again and again, until told to stop.
/// Every replica does, so that each of them can be asked.
pub(crate) async fn run(store: Store, retention: Duration, stop: CancellationToken) {
    let pause = PAUSE.min(retention / 4);
    let work = async {
        let mut rest = pause;
        loop {
            // Spread, so that replicas that started together do not meet.
            tokio::time::sleep(rest.mul_f64(rand::random_range(1.0..1.5))).await;
            let began = Instant::now();
            if let Some(live) = count(&store).await {
                store.counted(live);
            }
            rest = pause.max(began.elapsed() * SHARE);
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Rests between pages for as long as a page took. None when the database is
/// away: the last count stands.
async fn count(store: &Store) -> Option<i64> {
    let (mut after, mut live) = (String::new(), 0);
    loop {
        let began = Instant::now();
        let page = store
            .count_page(&after)
            .await
            .inspect_err(|error| tracing::debug!(error = %Chain(error), "leases were not counted"));
        let page = page.ok()?;
        live += page.live;
        match page.last {
            Some(last) => after = last,
            None => return Some(live),
        }
        tokio::time::sleep(began.elapsed()).await;
    }
}
