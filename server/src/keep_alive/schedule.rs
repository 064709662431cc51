//! The one task that renews for all streams.

use std::{
    collections::{BTreeSet, HashMap},
    future::pending,
    iter,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    End, Event, Id, KeepAliveConfig, Opened, State,
    batches::{Answer, Attempt, Batch, Batches},
    stream::Stream,
};
use crate::{
    lock::RenewError,
    metrics::StreamMetrics,
    store::{Renewal, Renewed, Store},
};

/// How many leases go into one statement, which locks all of their rows.
const BATCH: usize = 500;

/// The longest a batch is waited for before the next goes elsewhere.
const LONGEST_PATIENCE: Duration = Duration::from_secs(1);

/// How soon a locked row is tried again, at most.
const RETRY: Duration = Duration::from_millis(500);

/// How long the database is left alone when a batch failed, about.
const REST: Duration = Duration::from_millis(50);

/// Soon, and several times before the deadline.
fn retry(left: Duration) -> Duration {
    RETRY.min(left / 4).mul_f64(rand::random_range(0.2..1.0))
}

pub(super) async fn run(
    store: Store,
    config: KeepAliveConfig,
    metrics: StreamMetrics,
    mut told: mpsc::Receiver<Event>,
    closing: CancellationToken,
) {
    let mut schedule = Schedule::new(store, config, metrics);
    loop {
        schedule.send_batch();
        tokio::select! {
            () = closing.cancelled() => break,
            Some(event) = told.recv() => match event {
                Event::Opened(stream) => schedule.open(stream),
                Event::Gone(id) => _ = schedule.close(id, None),
            },
            () = passed(schedule.next_look()) => schedule.look(),
            Some((batch, answer)) = schedule.batches.next() => schedule.batch_answered(batch, answer),
            Some(Ok((attempt, answer))) = schedule.singles.join_next(), if !schedule.singles.is_empty() => {
                schedule.answered(attempt, Instant::now(), answer);
            }
        }
    }
    let open: Vec<Id> = schedule.streams.keys().copied().collect();
    for id in open {
        schedule.close(id, Some(End::Draining));
    }
}

/// Half of the time that is left, so that another attempt fits in, and never so
/// long that a connection which hangs is noticed late.
fn patience(trusted_until: Instant, now: Instant) -> Duration {
    (trusted_until.saturating_duration_since(now) / 2).min(LONGEST_PATIENCE)
}

/// Waits until `time`; for ever when there is none.
async fn passed(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

struct Schedule {
    store: Store,
    config: KeepAliveConfig,
    metrics: StreamMetrics,
    streams: HashMap<Id, Stream>,
    /// One entry for each stream: its `next_event`.
    events: BTreeSet<(Instant, Id)>,
    /// Streams whose renewal is due and not under way, by their `trusted_until`:
    /// the most urgent first.
    ready: BTreeSet<(Instant, Id)>,
    /// No batch goes out before: one has just failed.
    rests_until: Instant,
    batches: Batches,
    /// Renewals of rows that were locked by somebody else.
    singles: JoinSet<(Attempt, Result<Renewed, RenewError>)>,
}

impl Schedule {
    fn new(store: Store, config: KeepAliveConfig, metrics: StreamMetrics) -> Self {
        Self {
            store,
            config,
            metrics,
            streams: HashMap::new(),
            events: BTreeSet::new(),
            ready: BTreeSet::new(),
            rests_until: Instant::now(),
            batches: Batches::default(),
            singles: JoinSet::new(),
        }
    }

    fn open(&mut self, Opened { id, keep, out }: Opened) {
        let stream = Stream::new(keep, out, &self.config);
        self.events.insert((stream.next_event(), id));
        self.streams.insert(id, stream);
        self.queue(id);
    }

    /// Runs `change` on a stream and keeps its entries in step.
    fn with(&mut self, id: Id, change: impl FnOnce(&mut Stream)) {
        if let Some(stream) = self.streams.get_mut(&id) {
            let (event, trusted_until) = (stream.next_event(), stream.trusted_until);
            change(stream);
            self.events.remove(&(event, id));
            self.events.insert((stream.next_event(), id));
            if self.ready.remove(&(trusted_until, id)) {
                self.ready.insert((stream.trusted_until, id));
            }
        }
    }

    /// Whether it was open.
    fn close(&mut self, id: Id, end: Option<End>) -> bool {
        let stream = self.streams.remove(&id);
        let was_open = stream.is_some();
        if let Some(stream) = stream {
            self.events.remove(&(stream.next_event(), id));
            self.ready.remove(&(stream.trusted_until, id));
            let ended = &self.metrics.ended;
            let ended = match end {
                Some(End::Lost(loss)) => ended.lost(loss),
                Some(End::Unavailable) => &ended.unavailable,
                Some(End::Reopen) => &ended.reopen,
                Some(End::Deadline) => &ended.deadline,
                Some(End::Draining) => &ended.draining,
                None => &ended.gone,
            };
            ended.inc();
            if let Some(end) = end {
                stream.out.send_replace(State::Ended(end));
            }
        }
        was_open
    }

    /// When to look at the streams, or at what is under way, again.
    fn next_look(&self) -> Option<Instant> {
        let event = self.events.first().map(|(time, _)| *time);
        let rested = (!self.ready.is_empty() && self.rests_until > Instant::now())
            .then_some(self.rests_until);
        [event, rested, self.batches.overdue_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Looks at every stream whose event has come, and at batches without an
    /// answer: they are not waited for any longer, but sent again elsewhere.
    fn look(&mut self) {
        let now = Instant::now();
        while let Some(&(time, id)) = self.events.first() {
            if time > now {
                break;
            }
            let Some(stream) = self.streams.get(&id) else {
                self.events.pop_first();
                continue;
            };
            if stream.out.is_closed() {
                self.close(id, None);
            } else if let Some(end) = stream.end(now) {
                self.close(id, Some(end));
            } else {
                // Only the renewal is left to be due.
                self.with(id, |stream| stream.due = None);
                self.queue(id);
            }
        }
        for attempt in self.batches.overdue(now) {
            if self.is_latest(attempt) {
                self.queue(attempt.id);
            }
        }
    }

    fn queue(&mut self, id: Id) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.attempt += 1;
            self.ready.insert((stream.trusted_until, id));
        }
    }

    /// The stream of an attempt, unless that has been overtaken by a newer one.
    fn latest(&self, attempt: Attempt) -> Option<&Stream> {
        let stream = self.streams.get(&attempt.id)?;
        (stream.attempt == attempt.number).then_some(stream)
    }

    fn is_latest(&self, attempt: Attempt) -> bool {
        self.latest(attempt).is_some()
    }

    /// Sends the most urgent of what is due as one statement, unless one is
    /// under way that may still be answered in time.
    fn send_batch(&mut self) {
        let now = Instant::now();
        let Some(&(trusted_until, _)) = self.ready.first() else {
            return;
        };
        if now < self.rests_until {
            return;
        }
        let overdue_at = now + patience(trusted_until, now);
        if !self.batches.has_room() {
            // Whoever waits may have less time left than those who went.
            self.batches.hurry(overdue_at);
            return;
        }
        let (attempts, asks): (Vec<_>, Vec<_>) = iter::from_fn(|| self.ready.pop_first())
            .filter_map(|(_, id)| {
                let stream = self.streams.get(&id)?;
                let number = stream.attempt;
                let ask = || (Attempt { id, number }, stream.keep.renew.clone());
                (!stream.out.is_closed()).then(ask)
            })
            .take(BATCH)
            .unzip();
        if attempts.is_empty() {
            return;
        }
        self.batches.send(&self.store, attempts, asks, overdue_at);
    }

    fn batch_answered(&mut self, batch: Batch, answer: Answer) {
        let Batch {
            attempts,
            sent,
            elsewhere,
        } = batch;
        match answer {
            Ok(renewals) => {
                for (attempt, renewal) in attempts.into_iter().zip(renewals) {
                    match renewal {
                        Renewal::Renewed(renewed) => self.answered(attempt, sent, Ok(renewed)),
                        Renewal::Failed(error) => self.answered(attempt, sent, Err(error)),
                        // By our own earlier statement, as likely as not.
                        Renewal::Locked if elsewhere => self.try_again(attempt),
                        Renewal::Locked => self.renew_singly(attempt),
                    }
                }
            }
            Err(outage) => {
                tracing::debug!(error = %crate::telemetry::Chain(&outage), streams = attempts.len(), "renewals were not answered");
                self.rests_until = Instant::now() + REST.mul_f64(rand::random_range(0.5..1.5));
                for attempt in attempts {
                    if self.is_latest(attempt) {
                        self.queue(attempt.id);
                    }
                }
            }
        }
    }

    fn answered(&mut self, attempt: Attempt, sent: Instant, answer: Result<Renewed, RenewError>) {
        let config = self.config;
        let latest = self.is_latest(attempt);
        match answer {
            Ok(renewed) => {
                // An overtaken one has landed, too, and often with the least left: the one
                // sent after it finds a lease that is whole again.
                self.metrics.renewals.landed(renewed.slack);
                self.with(attempt.id, |stream| {
                    stream.renewed(renewed, sent, latest, &config)
                });
            }
            Err(RenewError::Lost(loss)) => {
                // Of the same loss, an attempt that was overtaken hears as well.
                if self.close(attempt.id, Some(End::Lost(loss))) {
                    self.metrics.renewals.lost(loss);
                }
            }
            Err(RenewError::Outage(outage)) => {
                tracing::debug!(error = %crate::telemetry::Chain(&outage), "a renewal has no verdict");
                self.try_again(attempt);
            }
        }
    }

    fn try_again(&mut self, attempt: Attempt) {
        if self.is_latest(attempt) {
            self.with(attempt.id, |stream| {
                let now = Instant::now();
                let left = stream.trusted_until.saturating_duration_since(now);
                stream.due = Some(now + retry(left));
            });
        }
    }

    /// Waits for a locked row where the wait delays nobody else: once, since
    /// others want the place and a drain waits for it.
    fn renew_singly(&mut self, attempt: Attempt) {
        // Else a newer attempt is under way, or waits already.
        let Some(stream) = self.latest(attempt) else {
            return;
        };
        if self.singles.len() >= self.config.singles {
            self.try_again(attempt);
            return;
        }
        let (store, ask) = (self.store.clone(), stream.keep.renew.clone());
        // None is begun after the stream's end: it would prolong the time that a
        // lock stays blocked.
        let deadline = stream.ends_by();
        self.singles
            .spawn(async move { (attempt, store.renew_locked(ask, deadline).await) });
    }
}

#[cfg(test)]
mod tests;
