//! The leap: what happens when the identity row does not match what is running, and
//! before the first grant of each replica.
//!
//! The row cannot tell a database that was put aside, and put back when another had
//! given out tokens in its place: all that it names is as it was. A replica that just
//! started knows of no token, so it leaps first. One that runs knows by its probes how
//! far the tokens have come ([`Inner::saw`]), and refuses a grant that falls behind.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::Instant,
};
use tracing::Instrument as _;

use super::{Inner, failure::Failure, rest_before_retry, row, statement};
use crate::{clock::Moment, lock::FencingToken, metrics::LeapMetrics, trace::Trace};

#[derive(Default)]
pub(super) struct Identity {
    /// Lets one task of this replica leap while the others wait for it. When the last
    /// leap ended.
    last: Arc<Mutex<LastLeap>>,
    /// Whether there was any since this replica started.
    begun: AtomicBool,
}

type LastLeap = Option<Moment>;

/// Why tokens must leap, as the statement that called for it has seen.
#[derive(Clone, Copy)]
pub(super) struct Need {
    /// When it was sent: a leap that ended later has served it.
    sent: Moment,
    why: Why,
}

#[derive(Clone, Copy)]
enum Why {
    /// The identity did not hold.
    Identity,
    /// This replica has just started.
    First,
    /// Tokens must be above this one from now on.
    Above(i64),
    /// The sequence is behind the lock table.
    Behind,
}

impl Need {
    /// The identity did not hold for a statement sent at `sent`.
    pub(super) fn since(sent: Moment) -> Self {
        Self {
            sent,
            why: Why::Identity,
        }
    }

    /// This replica has not leapt since it started.
    fn first() -> Self {
        Self {
            sent: Moment::now(),
            why: Why::First,
        }
    }

    /// A token that was not above `highest` came from a statement sent at `sent`.
    pub(super) fn above(highest: i64, sent: Moment) -> Self {
        Self {
            sent,
            why: Why::Above(highest),
        }
    }

    /// The sequence is behind the lock table.
    pub(super) fn now() -> Self {
        Self {
            sent: Moment::now(),
            why: Why::Behind,
        }
    }
}

impl Inner {
    /// A token that was drawn, whoever drew it.
    pub(super) fn saw(&self, token: FencingToken) {
        self.highest.fetch_max(token.get(), Ordering::AcqRel);
    }

    /// The highest token that this replica knows of: a statement that is sent later
    /// must draw a higher one.
    pub(super) fn highest(&self) -> i64 {
        self.highest.load(Ordering::Acquire)
    }

    /// Leaps before the first grant of this replica. Not after it, with the grant given
    /// back: an owner that acquires anew would lose the lease that it had.
    pub(super) async fn begin(self: &Arc<Self>, deadline: Instant) -> Result<(), Failure> {
        if self.identity.begun.load(Ordering::Acquire) {
            return Ok(());
        }
        self.leap(Need::first(), deadline).await
    }

    /// Makes the sequence safe to draw from, unless that was done since.
    pub(super) async fn leap(
        self: &Arc<Self>,
        need: Need,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.try_leap(need, deadline).await {
                // Others leap as well, and a restore may have the row.
                Err(failure @ Failure::Conflict(_)) => {
                    if !rest_before_retry(self, &failure, tries, deadline).await {
                        return Err(failure);
                    }
                }
                ended => return ended,
            }
        }
    }

    /// Whoever waits here may leave; the statements of the one who leaps run in a task
    /// of the store's.
    async fn try_leap(self: &Arc<Self>, need: Need, deadline: Instant) -> Result<(), Failure> {
        let last = Arc::clone(&self.identity.last).lock_owned();
        let last = tokio::time::timeout_at(deadline, last)
            .await
            .map_err(|_| Failure::TooLate)?;
        if last.is_some_and(|end| end > need.sent) {
            return Ok(());
        }
        let inner = Arc::clone(self);
        let leap = async move { inner.leap_now(need, last, deadline).await };
        let leap = Trace::current().scope(leap.in_current_span());
        let ended = self.tracker.spawn(leap).await;
        ended.unwrap_or_else(|panicked| Err(Failure::Unknown(Box::new(panicked))))
    }

    async fn leap_now(
        &self,
        need: Need,
        mut last: OwnedMutexGuard<LastLeap>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (floor, always) = match need.why {
            Why::Identity => (0, false),
            Why::Above(token) => (token, false),
            Why::Behind => (0, true),
            // To the clock at least, unless somebody leaps meanwhile.
            Why::First => {
                let position = self.position(deadline).await?;
                let ahead = position.token > position.by_clock;
                (if ahead { 0 } else { position.by_clock }, ahead)
            }
        };
        let answer = self
            .pool
            .run(&statement::LEAP, &[&floor, &always], deadline)
            .await?;
        let leap = Leap::read(&answer.rows)?;
        *last = Some(Moment::now());
        self.identity.begun.store(true, Ordering::Release);
        leap.log(need.why);
        leap.count(need.why, &self.metrics.leaps);
        if leap.leapt {
            // Another server may have another clock: let idle rows age anew.
            self.rest_purge();
        }
        Ok(())
    }

    pub(super) async fn position(&self, deadline: Instant) -> Result<Position, Failure> {
        let answer = self.pool.run(&statement::POSITION, &[], deadline).await?;
        let row = row::only(&answer.rows)?;
        Ok(Position {
            token: row::column(row, "token")?,
            by_clock: row::column(row, "by_clock")?,
        })
    }
}

/// Where the tokens are.
pub(super) struct Position {
    pub(super) token: i64,
    /// Where a leap would take them by the clock.
    pub(super) by_clock: i64,
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

    fn count(&self, why: Why, leaps: &LeapMetrics) {
        if self.leapt {
            let kind = match why {
                _ if self.clock_behind => &leaps.relative,
                Why::First => &leaps.start,
                _ => &leaps.absolute,
            };
            kind.inc();
        }
    }

    fn log(&self, why: Why) {
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
        } else if leapt && matches!(why, Why::First) {
            tracing::info!(
                from,
                to,
                "this server starts: fencing tokens leap to the clock"
            );
        } else if leapt {
            tracing::warn!(
                from,
                to,
                "the database restarted, failed over or was restored: fencing tokens leapt"
            );
        }
    }
}
