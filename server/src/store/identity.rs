//! The leap: what happens when the identity row does not match what is running.

use tokio::{sync::Mutex, time::Instant};

use super::{Inner, failure::Failure, row, statement};
use crate::{clock::Moment, metrics::LeapMetrics};

/// Lets one task of this replica leap while the others wait for it.
#[derive(Default)]
pub(super) struct Identity(Mutex<Option<Moment>>);

/// Why tokens must leap, as the statement that called for it has seen.
#[derive(Clone, Copy)]
pub(super) struct Need {
    /// When it was sent: a leap that ended later has served it.
    sent: Moment,
    /// Tokens must be above this one from now on.
    floor: i64,
    /// Leap although the identity holds and the sequence is above `floor`.
    always: bool,
}

impl Need {
    /// The identity did not hold for a statement sent at `sent`.
    pub(super) fn since(sent: Moment) -> Self {
        Self {
            sent,
            floor: 0,
            always: false,
        }
    }

    /// A token that was not above `highest` came from a statement sent at `sent`.
    pub(super) fn above(highest: i64, sent: Moment) -> Self {
        Self {
            sent,
            floor: highest,
            always: false,
        }
    }

    /// The sequence is behind the lock table.
    pub(super) fn now() -> Self {
        Self {
            sent: Moment::now(),
            floor: 0,
            always: true,
        }
    }
}

impl Inner {
    /// Makes the sequence safe to draw from, unless that was done since.
    pub(super) async fn leap(&self, need: Need, deadline: Instant) -> Result<(), Failure> {
        let mut last = tokio::time::timeout_at(deadline, self.identity.0.lock())
            .await
            .map_err(|_| Failure::TooLate)?;
        if last.is_some_and(|end| end > need.sent) {
            return Ok(());
        }
        let answer = self
            .pool
            .run(&statement::LEAP, &[&need.floor, &need.always], deadline)
            .await?;
        let leap = Leap::read(&answer.rows)?;
        *last = Some(Moment::now());
        leap.log();
        leap.count(&self.metrics.leaps);
        if leap.leapt {
            // Another server may have another clock: let idle rows age anew.
            self.rest_purge();
        }
        Ok(())
    }
}

/// What `leap.sql` did.
pub(super) struct Leap {
    pub(super) leapt: bool,
    clock_behind: bool,
    pub(super) from: i64,
    pub(super) to: i64,
}

impl Leap {
    pub(super) fn read(rows: &[tokio_postgres::Row]) -> Result<Self, Failure> {
        let row = row::only(rows)?;
        Ok(Self {
            leapt: row::column(row, "leapt")?,
            clock_behind: row::column(row, "clock_behind")?,
            from: row::column(row, "from_token")?,
            to: row::column(row, "to_token")?,
        })
    }

    fn count(&self, leaps: &LeapMetrics) {
        if self.leapt {
            let kind = if self.clock_behind {
                &leaps.relative
            } else {
                &leaps.absolute
            };
            kind.inc();
        }
    }

    pub(super) fn log(&self) {
        let Self {
            leapt,
            clock_behind,
            from,
            to,
        } = *self;
        if clock_behind {
            tracing::error!(
                from,
                to,
                "fencing tokens are ahead of the database's clock, by a clock that is or was wrong or by \
                 advance-tokens: until it has caught up, leaps are relative and two failovers in a row \
                 may give the same tokens"
            );
        } else if leapt && from == 1 {
            tracing::info!(to, "a new database: fencing tokens start here");
        } else if leapt {
            tracing::warn!(
                from,
                to,
                "the database restarted, failed over or was restored: fencing tokens leapt"
            );
        }
    }
}
