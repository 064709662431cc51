//! KeepAlive: leases that are renewed for as long as somebody listens.
//!
//! # The protocol of a stream
//!
//! A stream renews its lease at once, then every min(TTL/3, 20 s), a little
//! early by chance so that streams opened together drift apart; proxies cut
//! streams that stay quiet for longer. Each renewal is reported. A stream never
//! ends well, since a generated stub's loop would just finish; its end means
//! that nobody renews now:
//!
//! | what happened | how the stream ends |
//! |---|---|
//! | the lease is over | [`End::Lost`], within one interval |
//! | the lease cannot be confirmed before its deadline | [`End::Unavailable`], before that deadline |
//! | the stream's own time is over | [`End::Reopen`] |
//! | the caller's deadline has passed | [`End::Deadline`] |
//! | the server drains | [`End::Draining`] |
//!
//! One failed attempt is not a loss: renewals are tried again until shortly
//! before the lease's own deadline. What that is, the first renewal has to tell:
//! it is tried for the time of a call, and no longer than the TTL and the
//! `max_duration` that were asked for, or than any stream may renew.
//!
//! # Proof of life
//!
//! An open stream says little: a proxy answers pings for a holder that is gone,
//! and a reader that hangs fills buffers before anybody notices. So a stream
//! renews no longer than its `max_duration`. A holder that vanished, or hangs,
//! blocks its lock for that long plus one TTL; one that is alive opens the next
//! stream before this one ends.
//!
//! # One schedule
//!
//! One task renews for all streams ([`schedule`]): a stream costs an entry in
//! its table, no task and no timer. What is due goes to the database in one
//! statement at a time, the lease that ends first in front; what became due
//! meanwhile goes with the next one. A statement that is not answered in time
//! for another attempt is sent again on another connection. A stream that has
//! vanished, or whose time is over, is dropped at once; a statement that is under
//! way then may still renew it.

mod batches;
mod schedule;
#[cfg(test)]
mod stage;
mod stream;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    lock::{Lease, Loss, Outage},
    metrics::{Gauge, NoRoomMetric, StreamMetrics, count},
    room::{Peer, Place, Room},
    store::{Renew, Store},
};

/// What a stream asks for.
#[derive(Debug, Clone)]
pub(crate) struct Keep {
    pub(crate) renew: Renew,
    /// How long it renews; unset for the default. Above the server's limit it
    /// is cut.
    pub(crate) max_duration: Option<Duration>,
    /// When the caller stops listening.
    pub(crate) caller_deadline: Option<Instant>,
}

/// What a stream has to say.
#[derive(Debug, Clone)]
pub(crate) enum State {
    /// Nothing yet.
    Opening,
    Renewed(Arc<Kept>),
    Ended(End),
}

/// One renewal.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) lease: Lease,
    /// What was left of the lease when the renewal landed.
    pub(crate) slack: Duration,
    /// When the stream ends.
    pub(crate) ends_at: Instant,
}

/// Why a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Lost(Loss),
    Unavailable,
    Reopen,
    Deadline,
    Draining,
}

/// How long streams renew.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeepAliveConfig {
    /// No stream renews for longer.
    pub(crate) max_duration: Duration,
    /// How many streams there may be, of which a connection has a share; more are refused
    /// as overload.
    pub(crate) max_streams: usize,
    /// How many rows that others have locked are waited for at a time. Each
    /// keeps a connection of the calls.
    pub(crate) singles: usize,
    /// What a call may take: how long a first renewal is tried for at most.
    pub(crate) request_timeout: Duration,
}

/// A cheap handle on the schedule.
#[derive(Clone)]
pub(crate) struct KeepAlive {
    events: mpsc::Sender<Event>,
    next_id: Arc<AtomicU64>,
    room: Arc<Room>,
    open: Gauge,
    shed: NoRoomMetric,
}

type Id = u64;

/// What the schedule is told.
enum Event {
    Opened(Opened),
    /// Nobody listens any more.
    Gone(Id),
}

/// A stream on its way to the schedule.
struct Opened {
    id: Id,
    keep: Keep,
    out: watch::Sender<State>,
}

/// Who listens to a stream. Dropping it closes the stream.
pub(crate) struct Listener {
    id: Id,
    state: watch::Receiver<State>,
    events: mpsc::Sender<Event>,
    _place: Place,
}

impl Listener {
    /// What the stream has to say.
    pub(crate) fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Where there is no room, it is found out when it is due next.
        let _ = self.events.try_send(Event::Gone(self.id));
    }
}

/// How many events may wait for the schedule, which takes them at once.
const QUEUE: usize = 1024;

impl KeepAlive {
    /// A handle, and the task to run: it ends when told to, and every stream
    /// with it.
    pub(crate) fn new(
        store: Store,
        config: KeepAliveConfig,
        metrics: StreamMetrics,
        closing: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (sender, events) = mpsc::channel(QUEUE);
        let handle = Self {
            events: sender,
            next_id: Arc::default(),
            room: Room::new(config.max_streams),
            open: metrics.open.clone(),
            shed: metrics.shed.clone(),
        };
        (
            handle,
            schedule::run(store, config, metrics, events, closing),
        )
    }

    /// Opens a stream.
    pub(crate) async fn open(&self, keep: Keep, peer: Peer) -> Result<Listener, Outage> {
        let place = self.room.enter(peer).map_err(|why| {
            self.shed.count(why);
            Outage::Overloaded
        })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (out, state) = watch::channel(State::Opening);
        let listener = Listener {
            id,
            state,
            events: self.events.clone(),
            _place: place,
        };
        self.events
            .send(Event::Opened(Opened { id, keep, out }))
            .await
            .map_err(|_| Outage::Draining)?;
        Ok(listener)
    }

    /// Counts the listeners: those of streams that have ended, too, until they
    /// have heard it.
    pub(crate) fn listeners(&self) -> usize {
        self.room.taken()
    }

    /// Brings the gauge up to date.
    pub(crate) fn measure(&self) {
        self.open.set(count(self.listeners()));
    }
}
