//! A lock that is held.

use std::{fmt, sync::Arc, time::Duration};

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    Error, Lock, LostReason,
    client::Shared,
    keep,
    lease::{Confirmation, Lease},
    wire::{Key, Wire},
};

/// A lock that is held, and kept until the guard is released or dropped.
///
/// A lease can be lost at any time: the network, the database or this process
/// may stand still for longer than it lasts. So
///
/// - give [`fencing_token`](Self::fencing_token) to the protected resource with
///   every write, and have it refuse an older one: nothing else is safe;
/// - stop when it is lost: [`lost`](Self::lost) and
///   [`lost_token`](Self::lost_token) say so by themselves,
///   [`is_held`](Self::is_held) and [`ensure_held`](Self::ensure_held) when
///   asked, by the clock and without a word from the network.
///
/// Once lost, a guard stays lost. Acquiring again makes a new one, with a new
/// token.
///
/// Dropping it gives the lock back in the background, also where there is no
/// runtime, and never blocks or panics. A process that ends right after may be
/// faster than that: see [`Client::released`](crate::Client::released). When
/// nobody can be told, the lease runs out.
#[must_use = "the lock is given back when its guard is dropped"]
pub struct Guard {
    lock: Lock,
    lease: Arc<Lease>,
    renewing: CancellationToken,
    stop: Option<oneshot::Sender<Releasing>>,
    ended: Option<oneshot::Receiver<Result<(), Error>>>,
    // Keeps the thread alive.
    shared: Arc<Shared>,
}

impl Guard {
    /// Begins to keep a lease that was just granted.
    pub(crate) fn start(
        shared: &Arc<Shared>,
        wire: Wire,
        lock: Lock,
        granted: Confirmation,
        margin: Option<Duration>,
    ) -> Self {
        let lease = Arc::new(Lease::new(granted, margin));
        let renewing = CancellationToken::new();
        let (stop, stopped) = oneshot::channel();
        let (ends, ended) = oneshot::channel();
        let key = Key {
            resource: lock.resource.clone(),
            owner: lock.owner.clone(),
            token: lock.fencing_token,
        };
        let keeping = keep::keep(
            wire,
            key,
            Arc::clone(&lease),
            renewing.clone(),
            shared.thread.slept(),
            stopped,
            ends,
        );
        shared.thread.spawn(keeping);
        Self {
            lock,
            lease,
            renewing,
            stop: Some(stop),
            ended: Some(ended),
            shared: Arc::clone(shared),
        }
    }

    /// The name that is locked.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.lock.resource
    }

    /// Who holds it: this guard and no other.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.lock.owner
    }

    /// Above 0, below 2^53, and larger than that of every earlier holder. Hand it
    /// to the protected resource with every write.
    #[must_use]
    pub fn fencing_token(&self) -> i64 {
        self.lock.fencing_token
    }

    /// The lease as it was granted.
    #[must_use]
    pub fn granted(&self) -> &Lock {
        &self.lock
    }

    /// How long the lease may be trusted if nothing renews it, from now on. Zero
    /// once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.lease.remaining().unwrap_or_default()
    }

    /// Whether the lease may be trusted now. It may be over right after: a check
    /// like this makes harm rare, and the fencing token makes it impossible.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.lease.remaining().is_ok()
    }

    /// The same, for `?`.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost).
    pub fn ensure_held(&self) -> Result<(), Error> {
        match self.lease.remaining() {
            Ok(_) => Ok(()),
            Err(reason) => Err(Error::Lost { reason }),
        }
    }

    /// Waits until the lease is lost. May be dropped and called again.
    pub async fn lost(&self) -> LostReason {
        self.lease.lost().cancelled().await;
        // It was lost before; this only asks for the reason.
        self.lease.lose(LostReason::Unconfirmed)
    }

    /// A token that is cancelled when the lease is lost, for work that runs
    /// elsewhere. Cancelling it changes nothing for the guard.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        self.lease.lost().child_token()
    }

    /// Lets the lease run to its end: nothing renews it from here on, and it is
    /// lost when its time is over. For work that may hang, and cannot say that it
    /// has stopped; else [`release`](Self::release).
    pub fn stop_renewing(&self) {
        self.renewing.cancel();
    }

    /// Gives the lock back, once the work is done. Nothing is renewed from here
    /// on; goes on to its end also when it is dropped.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when the lease was over before, so that the work may
    /// have overlapped with the next holder's. After
    /// [`Unavailable`](Error::Unavailable) or [`TimedOut`](Error::TimedOut) the
    /// lock is free when the lease runs out, if it is not by now.
    pub async fn release(mut self) -> Result<(), Error> {
        self.stop();
        let gone = || Error::Internal {
            detail: "the client's thread has ended".to_owned(),
        };
        let ended = self.ended.take().ok_or_else(gone)?;
        ended.await.unwrap_or_else(|_gone| Err(gone()))
    }

    fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // Nobody there: the thread has ended.
            let _: Result<(), _> = stop.send(Releasing::new(&self.shared.releasing));
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("resource", &self.resource())
            .field("owner", &self.owner())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.lease.remaining())
            .finish_non_exhaustive()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Counts while a lock is being given back, or may be.
#[derive(Debug)]
pub(crate) struct Releasing {
    count: watch::Sender<usize>,
}

impl Releasing {
    pub(crate) fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self {
            count: count.clone(),
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        self.count.send_modify(|count| *count -= 1);
    }
}
