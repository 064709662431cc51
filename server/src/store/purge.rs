//! Purge: rows idle for longer than the retention go, a page of names at a time.
//!
//! Idle is judged by the database's clock, so after a step of that clock, a
//! leap, or our own start (we do not know what happened before) purge rests for
//! one retention: a row must be idle for that long by a clock that we watched.
//! A step that nobody has noticed yet makes nothing idle either: each page is
//! told where the clock should be by now.

use std::time::SystemTime;

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

/// What purge knows of the database's clock.
pub(super) struct Watched {
    /// When it may start: one retention after the last doubt.
    from: Moment,
    /// What the clock said last, and when we heard it.
    reading: Option<(SystemTime, Moment)>,
}

impl Watched {
    /// Nothing is known yet.
    pub(super) fn new(from: Moment) -> Self {
        Self {
            from,
            reading: None,
        }
    }

    /// Where the clock should be now, if it was steady for one retention.
    fn clock(&self) -> Option<SystemTime> {
        let now = Moment::now();
        let (theirs, heard) = self.reading.filter(|_| now >= self.from)?;
        theirs.checked_add(now.since(heard))
    }
}

impl Store {
    /// Whether the database's clock was steady for one retention.
    pub(crate) fn may_purge(&self) -> bool {
        self.0.watched().clock().is_some()
    }

    /// Purges the names after `after`, in key order.
    pub(crate) async fn purge_page(&self, after: &str) -> Result<Purged, Outage> {
        let config = &self.0.config;
        let Some(clock) = self.0.watched().clock() else {
            return Ok(Purged {
                last: None,
                rows: 0,
            });
        };
        let retention = i64::try_from(config.purge_retention.as_millis()).unwrap_or(i64::MAX);
        let deadline = Instant::now() + config.limits.statement;
        let answer = self
            .0
            .pool
            .run(
                &statement::PURGE,
                &[&after, &PAGE, &retention, &clock],
                deadline,
            )
            .await?;
        let row = row::only(&answer.rows)?;
        let rows = row::column(row, "purged")?;
        let counted = u64::try_from(rows).unwrap_or(0);
        self.0.metrics.purged.inc_by(counted);
        Ok(Purged {
            last: row::column(row, "last_resource")?,
            rows,
        })
    }
}

impl Inner {
    /// Lets idle rows age anew.
    pub(super) fn rest_purge(&self) {
        self.watched().from = Moment::now().after(self.config.purge_retention);
    }

    /// Notes what the database's clock said at a moment when it had not stepped,
    /// or, after [`Inner::rest_purge`], since it has.
    pub(super) fn read_clock(&self, theirs: SystemTime, heard: Moment) {
        self.watched().reading = Some((theirs, heard));
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, Watched> {
        self.watched
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
