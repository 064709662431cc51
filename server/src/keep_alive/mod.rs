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
//! before the lease's own deadline.
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
//! for another attempt is sent again on another connection. A stream that has vanished is dropped when
//! its next event is due, and is never renewed again.

mod batches;
mod schedule;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    lock::{Lease, Loss, Outage},
    store::{Renew, Store},
};

/// What a stream asks for.
#[derive(Debug, Clone)]
pub(crate) struct Keep {
    pub(crate) renew: Renew,
    /// How long it renews; unset for the default, and never above the limit.
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
    /// How long the first renewal may take.
    pub(crate) first: Duration,
}

/// A cheap handle on the schedule.
#[derive(Clone)]
pub(crate) struct KeepAlive(mpsc::Sender<Opened>);

/// A stream on its way to the schedule.
struct Opened {
    keep: Keep,
    out: watch::Sender<State>,
}

/// How many streams may wait for the schedule, which takes them at once.
const QUEUE: usize = 1024;

impl KeepAlive {
    /// A handle, and the task to run: it ends when told to, and every stream
    /// with it.
    pub(crate) fn new(
        store: Store,
        config: KeepAliveConfig,
        closing: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (handle, opened) = mpsc::channel(QUEUE);
        (Self(handle), schedule::run(store, config, opened, closing))
    }

    /// Opens a stream. Dropping the receiver closes it.
    pub(crate) async fn open(&self, keep: Keep) -> Result<watch::Receiver<State>, Outage> {
        let (out, state) = watch::channel(State::Opening);
        self.0
            .send(Opened { keep, out })
            .await
            .map_err(|_| Outage::Draining)?;
        Ok(state)
    }
}
