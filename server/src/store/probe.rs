//! Can locks be taken, and is the database's clock steady? Asked each second.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, MissedTickBehavior};
use tokio_postgres::Row;
use tokio_util::sync::CancellationToken;

use super::{Inner, Store, failure::Failure, identity::Need, row, statement};
use crate::{clock::Moment, lock::FencingToken, metrics::ClockMetrics, telemetry::Chain};

/// How often the store asks.
const INTERVAL: Duration = Duration::from_secs(1);

/// A clock that moved by more than this, beyond what the round trips explain,
/// was stepped; slewing is far slower.
const STEP: Duration = Duration::from_millis(250);

/// Whether locks can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing is known yet.
    Starting,
    Serving,
    Unfit(Unfit),
}

/// Why locks cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Away, too slow, or not what was set up.
    Unavailable,
    ReadOnly,
    FsyncOff,
    Unlogged,
    /// It answers, but every statement of ours is overdue.
    Stalled,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unavailable => "the database is unavailable",
            Self::ReadOnly => "the database is read-only",
            Self::Stalled => {
                "no statement comes to an end (a standby or a disk that does not answer?)"
            }
            Self::FsyncOff => "the database runs with fsync=off and would forget tokens in a crash",
            Self::Unlogged => {
                "a table or the sequence of the schema is UNLOGGED and would forget tokens in a crash"
            }
        })
    }
}

impl Store {
    /// Follows the health of the store.
    pub(crate) fn health(&self) -> tokio::sync::watch::Receiver<Health> {
        self.0.health.subscribe()
    }

    /// Keeps the health up to date until told to stop.
    pub(crate) async fn watch_health(&self, stop: CancellationToken) {
        let work = async {
            let mut ticks = tokio::time::interval(INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut clock = ClockWatch::new(self.0.metrics.clock.clone());
            loop {
                ticks.tick().await;
                self.0.probe(&mut clock).await;
            }
        };
        stop.run_until_cancelled(work).await;
    }
}

/// What was read last, and how often the clock stepped.
struct ClockWatch {
    last: Option<Reading>,
    metrics: ClockMetrics,
}

impl ClockWatch {
    fn new(metrics: ClockMetrics) -> Self {
        Self {
            last: None,
            metrics,
        }
    }

    /// Leases end early or late by a step. It is reported and nothing is
    /// rewritten, since a correction by guess would cut good leases.
    fn stepped(&mut self, reading: Reading) -> bool {
        let Some(step) = self
            .last
            .replace(reading)
            .and_then(|last| reading.step_since(&last))
        else {
            return false;
        };
        self.metrics.last.set(step);
        let steps = self.metrics.steps.inc() + 1;
        tracing::error!(
            step_seconds = step,
            steps,
            "the database's clock stepped, or another database answers: leases end early or late by the step"
        );
        true
    }
}

/// The database's clock, and ours around the moment it was read.
#[derive(Clone, Copy)]
struct Reading {
    theirs: SystemTime,
    sent: Moment,
    answered: Moment,
}

impl Reading {
    /// How far their clock moved too far (positive) or too little, in seconds,
    /// if that is more than the two round trips explain.
    fn step_since(&self, last: &Self) -> Option<f64> {
        let theirs = match self.theirs.duration_since(last.theirs) {
            Ok(forward) => forward.as_secs_f64(),
            Err(backward) => -backward.duration().as_secs_f64(),
        };
        let least = self.sent.since(last.answered).as_secs_f64();
        let most = self.answered.since(last.sent).as_secs_f64();
        let step = if theirs > most {
            theirs - most
        } else if theirs < least {
            theirs - least
        } else {
            return None;
        };
        (step.abs() > STEP.as_secs_f64()).then_some(step)
    }
}

impl Inner {
    async fn probe(self: &Arc<Self>, clock: &mut ClockWatch) {
        let deadline = Instant::now() + self.config.limits.wait;
        let health = match self.try_probe(clock, deadline).await {
            Ok(health) => health,
            Err(failure) => {
                let unfit = match failure {
                    Failure::ReadOnly(_) => Unfit::ReadOnly,
                    _ => Unfit::Unavailable,
                };
                if *self.health.borrow() != Health::Unfit(unfit) {
                    tracing::warn!(error = %Chain(&failure), "locks cannot be taken: {unfit}");
                }
                Health::Unfit(unfit)
            }
        };
        let changed = self
            .health
            .send_if_modified(|now| std::mem::replace(now, health) != health);
        if changed && health == Health::Serving {
            tracing::info!("locks can be taken");
            self.returns.look_now();
        }
    }

    async fn try_probe(
        self: &Arc<Self>,
        clock: &mut ClockWatch,
        deadline: Instant,
    ) -> Result<Health, Failure> {
        // It only reads, so nothing is lost by giving up long before a call
        // would: a black hole must show soon.
        let asked = self.probes.run(&statement::PROBE, &[], deadline);
        let answer = tokio::time::timeout(self.config.limits.probe, asked)
            .await
            .unwrap_or(Err(Failure::TooLate))
            // It does not even answer: nothing overdue is worth the wait.
            .inspect_err(|_| self.hosts.let_go())?;
        let answered = Moment::now();
        let row = row::only(&answer.rows)?;
        let reading = Reading {
            theirs: row::column(row, "clock")?,
            sent: answer.sent,
            answered,
        };
        if clock.stepped(reading) {
            self.rest_purge();
        }
        self.read_clock(reading.theirs, reading.answered);
        self.judge_probe(row, answer.sent, deadline).await
    }

    async fn judge_probe(
        self: &Arc<Self>,
        row: &Row,
        sent: Moment,
        deadline: Instant,
    ) -> Result<Health, Failure> {
        if row::column(row, "read_only")? {
            self.probes.read_only();
            return Err(self.pool.read_only());
        }
        let forgets = if !row::column::<bool>(row, "fsync")? && !self.config.allow_fsync_off {
            Some(Unfit::FsyncOff)
        } else if row::column(row, "unlogged")? {
            Some(Unfit::Unlogged)
        } else {
            None
        };
        if let Some(unfit) = forgets {
            if *self.health.borrow() != Health::Unfit(unfit) {
                tracing::error!("locks cannot be taken: {unfit}");
            }
            return Ok(Health::Unfit(unfit));
        }
        if row::column::<Option<bool>>(row, "identity_holds")? != Some(true) {
            self.leap(Need::since(sent), deadline).await?;
        }
        self.begin(deadline).await?;
        self.saw(FencingToken::stored(row::column(row, "token")?));
        if self.pool.lingering() >= self.config.pool_size {
            if *self.health.borrow() != Health::Unfit(Unfit::Stalled) {
                tracing::warn!("locks cannot be taken: {}", Unfit::Stalled);
            }
            return Ok(Health::Unfit(Unfit::Stalled));
        }
        Ok(Health::Serving)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::Reading;
    use crate::clock::Moment;

    /// Read at `theirs` seconds on their clock, sent at `sent` on ours, with a
    /// round trip of 100 ms.
    fn reading(theirs: f64, sent: f64) -> Reading {
        let zero = Moment::default();
        Reading {
            theirs: SystemTime::UNIX_EPOCH + Duration::from_secs_f64(theirs),
            sent: zero.after(Duration::from_secs_f64(sent)),
            answered: zero.after(Duration::from_secs_f64(sent + 0.1)),
        }
    }

    #[test]
    fn a_steady_clock_does_not_step() {
        assert_eq!(
            reading(1001.0, 11.0).step_since(&reading(1000.0, 10.0)),
            None
        );
        assert_eq!(
            reading(1001.3, 11.0).step_since(&reading(1000.0, 10.0)),
            None
        );
    }

    #[test]
    fn a_step_is_seen_in_both_directions() {
        let forward = reading(4601.0, 11.0)
            .step_since(&reading(1000.0, 10.0))
            .unwrap();
        assert!((forward - 3600.0).abs() < 0.2, "{forward}");
        let backward = reading(9001.0, 11.0)
            .step_since(&reading(9900.0, 10.0))
            .unwrap();
        assert!((backward + 900.0).abs() < 0.2, "{backward}");
    }
}
