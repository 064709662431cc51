//! Census: how many leases there are, a page of names at a time.
//!
//! There is no index on `expires_at`, so counting means to read every name. A page
//! is a few milliseconds of reading; nothing is locked or written.

use tokio::time::Instant;

use super::{Store, row, statement};
use crate::lock::Outage;

/// How many names one statement looks at.
const PAGE: i64 = 1000;

/// One page of a census.
pub(crate) struct Counted {
    /// Where the next page starts; unset when there was none.
    pub(crate) last: Option<String>,
    /// How many leases had not ended.
    pub(crate) live: i64,
}

impl Store {
    /// Counts the leases of the names after `after`, in key order.
    pub(crate) async fn count_page(&self, after: &str) -> Result<Counted, Outage> {
        let deadline = Instant::now() + self.0.config.limits.statement;
        let pool = &self.0.pool;
        let answer = pool
            .run(&statement::CENSUS, &[&after, &PAGE], deadline)
            .await?;
        let row = row::only(&answer.rows)?;
        Ok(Counted {
            last: row::column(row, "last_resource")?,
            live: row::column(row, "live")?,
        })
    }

    /// All pages were counted.
    pub(crate) fn counted(&self, live: i64) {
        self.0.metrics.live.set(live);
    }
}
