//! The one task that renews for all streams.

use std::{
    collections::{BTreeSet, HashMap},
    future::pending,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{End, Keep, KeepAliveConfig, Kept, Opened, State};
use crate::{
    lock::{Lease, Outage, RenewError},
    store::{Renew, Renewal, Renewed, Store},
};

/// How many leases go into one statement, which locks all of their rows.
const BATCH: usize = 500;

/// How many rows that others have locked are waited for at a time.
const SINGLES: usize = 64;

/// The longest silence of a stream; common proxies cut after a minute.
const LONGEST_INTERVAL: Duration = Duration::from_secs(20);

/// How soon a renewal without a verdict is tried again, at most.
const RETRY: Duration = Duration::from_millis(500);

/// The default of `max_duration`, in TTLs.
const DEFAULT_TTLS: u32 = 5;

type Id = u64;

/// A batch under way, and whose it is.
type InFlight = Pin<Box<dyn Future<Output = (Vec<Id>, Result<Vec<Renewal>, Outage>)> + Send>>;

struct Stream {
    keep: Keep,
    out: watch::Sender<State>,
    opened: Instant,
    /// Shortly before the deadline of the last confirmed lease: with no newer
    /// one by then, the stream must say so.
    trusted_until: Instant,
    /// When the stream's own time is over; known once its TTL is.
    ends_at: Option<Instant>,
    /// When to renew next. None while a renewal is queued or under way.
    due: Option<Instant>,
}

impl Stream {
    /// When this stream next needs a look.
    fn next_event(&self) -> Instant {
        [self.due, self.ends_at, self.keep.caller_deadline]
            .into_iter()
            .flatten()
            .fold(self.trusted_until, Instant::min)
    }

    /// Whether, and how, the stream ends by the clock.
    fn end(&self, now: Instant) -> Option<End> {
        let passed = |time: Option<Instant>| time.is_some_and(|time| now >= time);
        if passed(self.keep.caller_deadline) {
            Some(End::Deadline)
        } else if passed(self.ends_at) {
            Some(End::Reopen)
        } else if now >= self.trusted_until {
            Some(End::Unavailable)
        } else {
            None
        }
    }

    fn renewed(&mut self, renewed: Renewed, now: Instant, config: &KeepAliveConfig) {
        let Renewed { lease, slack } = renewed;
        let ends_at = *self.ends_at.get_or_insert_with(|| {
            let asked = self
                .keep
                .max_duration
                .unwrap_or(lease.ttl.saturating_mul(DEFAULT_TTLS));
            self.opened + asked.min(config.max_duration)
        });
        self.trusted_until = now + trusted_for(&lease);
        self.due = Some(now + interval(lease.ttl));
        self.out.send_replace(State::Renewed(Arc::new(Kept {
            lease,
            slack,
            ends_at,
        })));
    }
}

/// How long a lease counts as held without a newer renewal: its holder is told
/// before its deadline, not at it.
fn trusted_for(lease: &Lease) -> Duration {
    let margin = (lease.ttl / 10).min(Duration::from_millis(500));
    lease.deadline.remaining().saturating_sub(margin)
}

/// Until the next renewal. A little early by chance, never late.
fn interval(ttl: Duration) -> Duration {
    (ttl / 3)
        .min(LONGEST_INTERVAL)
        .mul_f64(rand::random_range(0.8..1.0))
}

fn retry() -> Duration {
    RETRY.mul_f64(rand::random_range(0.2..1.0))
}

pub(super) async fn run(
    store: Store,
    config: KeepAliveConfig,
    mut opened: mpsc::Receiver<Opened>,
    closing: CancellationToken,
) {
    let mut schedule = Schedule {
        store,
        config,
        streams: HashMap::new(),
        events: BTreeSet::new(),
        ready: Vec::new(),
        singles: JoinSet::new(),
        next_id: 0,
    };
    let mut in_flight: Option<InFlight> = None;
    loop {
        if in_flight.is_none() {
            in_flight = schedule.next_batch();
        }
        let next_event = schedule.events.first().map(|(time, _)| *time);
        tokio::select! {
            () = closing.cancelled() => break,
            Some(stream) = opened.recv() => schedule.open(stream),
            () = passed(next_event) => {
                schedule.look();
            }
            (ids, answer) = finished(&mut in_flight) => {
                in_flight = None;
                schedule.batch_answered(ids, answer);
            }
            Some(Ok((id, answer))) = schedule.singles.join_next(), if !schedule.singles.is_empty() => {
                schedule.answered(id, answer);
            }
        }
    }
    for stream in schedule.streams.into_values() {
        stream.out.send_replace(State::Ended(End::Draining));
    }
}

/// The answer of the batch under way; waits for ever when there is none.
async fn finished(in_flight: &mut Option<InFlight>) -> (Vec<Id>, Result<Vec<Renewal>, Outage>) {
    match in_flight {
        Some(batch) => batch.await,
        None => pending().await,
    }
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
    streams: HashMap<Id, Stream>,
    /// One entry for each stream: its `next_event`.
    events: BTreeSet<(Instant, Id)>,
    /// Streams whose renewal is due and not under way.
    ready: Vec<Id>,
    /// Renewals of rows that were locked by somebody else.
    singles: JoinSet<(Id, Result<Renewed, RenewError>)>,
    next_id: Id,
}

impl Schedule {
    fn open(&mut self, Opened { keep, out }: Opened) {
        let now = Instant::now();
        let id = self.next_id;
        self.next_id += 1;
        let stream = Stream {
            keep,
            out,
            opened: now,
            trusted_until: now + self.config.first,
            ends_at: None,
            due: None,
        };
        self.events.insert((stream.next_event(), id));
        self.streams.insert(id, stream);
        self.ready.push(id);
    }

    /// Runs `change` on a stream and keeps its event in step.
    fn with(&mut self, id: Id, change: impl FnOnce(&mut Stream)) {
        if let Some(stream) = self.streams.get_mut(&id) {
            let before = stream.next_event();
            change(stream);
            let after = stream.next_event();
            if before != after {
                self.events.remove(&(before, id));
                self.events.insert((after, id));
            }
        }
    }

    fn close(&mut self, id: Id, end: Option<End>) {
        if let Some(stream) = self.streams.remove(&id) {
            self.events.remove(&(stream.next_event(), id));
            if let Some(end) = end {
                stream.out.send_replace(State::Ended(end));
            }
        }
    }

    /// Looks at every stream whose event has come.
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
                self.ready.push(id);
            }
        }
    }

    /// The most urgent of what is due, as one statement.
    fn next_batch(&mut self) -> Option<InFlight> {
        let streams = &self.streams;
        self.ready.retain(|id| {
            streams
                .get(id)
                .is_some_and(|stream| !stream.out.is_closed())
        });
        if self.ready.is_empty() {
            return None;
        }
        self.ready
            .sort_by_key(|id| streams.get(id).map(|stream| stream.trusted_until));
        let ids: Vec<Id> = self.ready.drain(..self.ready.len().min(BATCH)).collect();
        let asks: Vec<Renew> = ids
            .iter()
            .filter_map(|id| streams.get(id))
            .map(|stream| stream.keep.renew.clone())
            .collect();
        let store = self.store.clone();
        Some(Box::pin(async move {
            let answer = store.renew_all(&asks).await;
            (ids, answer)
        }))
    }

    fn batch_answered(&mut self, ids: Vec<Id>, answer: Result<Vec<Renewal>, Outage>) {
        match answer {
            Ok(renewals) => {
                for (id, renewal) in ids.into_iter().zip(renewals) {
                    match renewal {
                        Renewal::Renewed(renewed) => self.answered(id, Ok(renewed)),
                        Renewal::Failed(error) => self.answered(id, Err(error)),
                        Renewal::Locked => self.renew_singly(id),
                    }
                }
            }
            Err(outage) => {
                tracing::debug!(error = %crate::telemetry::Chain(&outage), streams = ids.len(), "renewals were not answered");
                for id in ids {
                    self.try_again(id);
                }
            }
        }
    }

    fn answered(&mut self, id: Id, answer: Result<Renewed, RenewError>) {
        let config = self.config;
        match answer {
            Ok(renewed) => self.with(id, |stream| {
                stream.renewed(renewed, Instant::now(), &config)
            }),
            Err(RenewError::Lost(loss)) => self.close(id, Some(End::Lost(loss))),
            Err(RenewError::Outage(_)) => self.try_again(id),
        }
    }

    fn try_again(&mut self, id: Id) {
        self.with(id, |stream| stream.due = Some(Instant::now() + retry()));
    }

    /// Waits for a locked row where the wait delays nobody else.
    fn renew_singly(&mut self, id: Id) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        if self.singles.len() >= SINGLES {
            self.try_again(id);
            return;
        }
        let (store, ask, deadline) = (
            self.store.clone(),
            stream.keep.renew.clone(),
            stream.trusted_until,
        );
        self.singles
            .spawn(async move { (id, store.renew(ask, deadline).await) });
    }
}
