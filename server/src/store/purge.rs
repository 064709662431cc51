//! Purge: rows idle for longer than the retention go, a page of names at a time.
//!
//! Idle is judged by the database's clock, so after a step of that clock, a
//! leap, or our own start (we do not know what happened before) purge rests for
//! one retention: a row must be idle for that long by a clock that we watched.

use tokio::time::Instant;

use super::{Inner, Store, row, statement};
use crate::{clock::Moment, lock::Outage};

/// How many names one statement looks at. It keeps row locks for milliseconds.
const PAGE: i32 = 500;

/// One page of a purge.
#[derive(Debug)]
pub(crate) struct Purged {
    /// Where the next page starts; unset when this one was the last.
    pub(crate) last: Option<String>,
    /// How many rows went.
    pub(crate) rows: i32,
}

impl Store {
    /// Whether the database's clock was steady for one retention.
    pub(crate) fn may_purge(&self) -> bool {
        Moment::now() >= *self.0.purge_from()
    }

    /// Purges the names after `after`, in key order.
    pub(crate) async fn purge_page(&self, after: &str) -> Result<Purged, Outage> {
        let config = &self.0.config;
        let retention = i64::try_from(config.purge_retention.as_millis()).unwrap_or(i64::MAX);
        let deadline = Instant::now() + config.limits.statement;
        let answer = self
            .0
            .pool
            .run(&statement::PURGE, &[&after, &PAGE, &retention], deadline)
            .await?;
        let row = row::only(&answer.rows)?;
        Ok(Purged {
            last: row::column(row, "last_resource")?,
            rows: row::column(row, "purged")?,
        })
    }
}

impl Inner {
    /// Lets idle rows age anew.
    pub(super) fn rest_purge(&self) {
        *self.purge_from() = Moment::now().after(self.config.purge_retention);
    }

    fn purge_from(&self) -> std::sync::MutexGuard<'_, Moment> {
        self.purge_from
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
