//! Taking a lock, once or until a time is over.
//!
//! One owner and one `request_id` stand for the whole acquisition, so that a try
//! whose answer was lost is found again by the next. Only a server that calls the
//! id spent makes a new one: its lease was granted, and is gone.
//!
//! A caller that goes away ends the acquisition, but not the try that is under way:
//! what that gets is given back. A try may also be granted without an answer, when
//! the time is over. One more try finds out, in the background, and what it gets is
//! given back. Not where the caller has chosen the owner or the id: a later
//! acquisition of the same may hold the lock by then, elsewhere, and would lose it.
//! Within one client those take turns.
//!
//! The pauses are random up to a bound that doubles ("full jitter": Marc Brooker,
//! *Exponential Backoff And Jitter*), and never longer than the holder's lease
//! lasts: then the lock is free, unless it was renewed. With each new holder the bound
//! is low again: where the lock goes from hand to hand, nobody sleeps for long.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use fencepost_proto::v1;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tracing::Instrument as _;

use crate::{
    AcquireOptions, Acquisition, Error, Event, Guard, Holder, Lock,
    calls::{acquire_request, new_request_id},
    client::Shared,
    clock::Moment,
    guard::Releasing,
    lease::Confirmation,
    wire::{Key, Wire, invalid},
};

/// The shortest pause: what a server needs to answer others.
const SHORTEST_PAUSE: Duration = Duration::from_millis(2);

/// As after so many tries is the pause when the lock has changed hands: up to 160 ms.
/// From the first on, many waiters would ask more often than a server can answer.
const MOVING: u32 = 4;

/// A server that calls every id spent does not know what it says.
const MOST_SPENT: u32 = 3;

/// With less time than this no server is asked: it could not answer.
const SHORTEST_TRY: Duration = Duration::from_millis(50);

/// How long a try that nobody waits for has still.
const LAST_TRY: Duration = Duration::from_millis(200);

/// For how long it is asked what became of a try nobody heard of.
const LAST_QUESTION: Duration = Duration::from_secs(2);

/// How long pauses are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
}

impl Backoff {
    pub(crate) const DEFAULT: Self = Self {
        first: Duration::from_millis(20),
        longest: Duration::from_secs(1),
    };

    /// Before try number `tries`, from 1.
    pub(crate) fn pause(self, tries: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32 << (tries - 1).min(20));
        let bound = doubled.min(self.longest).max(SHORTEST_PAUSE);
        bound
            .mul_f64(rand::random_range(0.0..1.0))
            .max(SHORTEST_PAUSE)
    }
}

/// Takes the lock on the client's thread; a caller that is dropped stops it.
pub(crate) async fn acquire(
    shared: &Arc<Shared>,
    resource: &str,
    options: AcquireOptions,
) -> Result<Guard, Error> {
    let AcquireOptions { margin, wait, .. } = options;
    if margin.is_some_and(|margin| margin >= options.ttl) {
        return Err(invalid("margin", "must be shorter than the ttl"));
    }
    let own_id = options.request_id.is_none();
    let own_owner = options.owner.is_none();
    let request = acquire_request(resource, options)?;
    let (began, wire) = (Moment::now(), shared.wire());
    let span = tracing::info_span!("acquire", resource, owner = request.owner);

    let (answer, answered) = oneshot::channel();
    let (give_up, given_up) = oneshot::channel();
    let asking = Asking {
        give_up: Some(give_up),
        shared,
    };
    let turn = (!own_owner).then(|| shared.turns.of(resource, &request.owner));
    let shared = Arc::clone(shared);
    let work = async move {
        let _turn = match turn {
            Some(turn) => Some(turn.lock_owned().await),
            None => None,
        };
        let mut taking = Taking {
            wire,
            backoff: shared.backoff,
            request,
            own_id,
            own_owner,
            margin,
            unheard_of: false,
            given_up,
            releasing: None,
        };
        match taking.take(wait).await {
            Ok(Some((lock, granted))) => {
                tracing::debug!(token = lock.fencing_token, "acquired");
                let after = began.elapsed();
                taking.wire.told.observe(&Event::Acquired { after });
                let guard = Guard::start(&shared, taking.wire.clone(), lock, granted, margin);
                // Nobody there to take it: dropped, and so given back.
                let _: Result<(), _> = answer.send(Ok(guard));
            }
            Ok(None) => taking.give_back().await,
            Err(error) => {
                let releasing = Releasing::new(&shared.releasing);
                let _: Result<(), _> = answer.send(Err(error));
                taking.give_back().await;
                drop(releasing);
            }
        }
    };
    asking.shared.thread.spawn(work.instrument(span));
    answered.await.unwrap_or_else(|_gone| {
        Err(Error::Internal {
            detail: "the acquisition did not end well".to_owned(),
        })
    })
}

/// Acquisitions of one resource by one owner, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// By resource and owner.
    turns: Mutex<HashMap<(String, String), Weak<Turn>>>,
}

type Turn = tokio::sync::Mutex<()>;

impl Turns {
    fn of(&self, resource: &str, owner: &str) -> Arc<Turn> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody waits for any longer.
        turns.retain(|_, turn| turn.strong_count() > 0);
        let key = (resource.to_owned(), owner.to_owned());
        if let Some(turn) = turns.get(&key).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.insert(key, Arc::downgrade(&turn));
        turn
    }
}

/// Somebody waits for the lock. Dropping it ends the acquisition.
struct Asking<'a> {
    give_up: Option<oneshot::Sender<Releasing>>,
    shared: &'a Shared,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(give_up) = self.give_up.take() {
            // Nobody there: it has ended by itself.
            let _: Result<(), _> = give_up.send(Releasing::new(&self.shared.releasing));
        }
    }
}

/// One acquisition, however many tries it takes.
struct Taking {
    wire: Wire,
    backoff: Backoff,
    request: v1::AcquireRequest,
    /// Whether the request's id is ours, and not the caller's.
    own_id: bool,
    /// Whether its owner is.
    own_owner: bool,
    margin: Option<Duration>,
    /// A try may have been granted without our knowing.
    unheard_of: bool,
    /// Nobody waits for the lock any longer.
    given_up: oneshot::Receiver<Releasing>,
    /// What was said then: counted until what is to be undone is.
    releasing: Option<Releasing>,
}

impl Taking {
    /// None when it was given up before it was granted.
    async fn take(
        &mut self,
        wait: Option<Duration>,
    ) -> Result<Option<(Lock, Confirmation)>, Error> {
        let once = wait == Some(Duration::ZERO);
        // A time that no clock can tell is no limit.
        let deadline = wait.and_then(|wait| Instant::now().checked_add(wait));
        let mut tries = 0;
        let mut refused: Option<Holder> = None;
        let mut spent = 0;
        loop {
            let left = match deadline {
                Some(deadline) if !once => deadline.saturating_duration_since(Instant::now()),
                Some(_) | None => Duration::MAX,
            };
            let wire = self.wire.within(self.wire.timeout.min(left));
            if let Ok(releasing) = self.given_up.try_recv() {
                self.releasing = Some(releasing);
                return Ok(None);
            }
            let mut trying = pin!(wire.acquire(self.request.clone()));
            let outcome = tokio::select! {
                outcome = &mut trying => outcome,
                releasing = &mut self.given_up => {
                    self.releasing = releasing.ok();
                    // Of a fixed owner, a grant that comes later would take the lock
                    // from whoever is next.
                    let patience = if self.own_owner { LAST_TRY } else { wire.timeout };
                    let Ok(outcome) = timeout(patience, &mut trying).await else {
                        self.unheard_of = true;
                        return Ok(None);
                    };
                    outcome
                }
            };
            let error = match outcome {
                Ok((Acquisition::Acquired(lock), Some(granted))) => {
                    // The answer may have taken most of the lease's time.
                    if !granted.trusted_for(self.margin).is_zero() {
                        return Ok(Some((lock, granted)));
                    }
                    self.unheard_of = true;
                    Error::TimedOut
                }
                Ok((Acquisition::Refused(holder), _)) => {
                    self.unheard_of = false;
                    Error::Refused { holder }
                }
                Ok((Acquisition::Acquired(_), None)) => Error::TimedOut,
                Err(Error::RequestSpent) if self.own_id && spent < MOST_SPENT => {
                    spent += 1;
                    self.unheard_of = false;
                    self.request.request_id = new_request_id();
                    continue;
                }
                Err(error) => {
                    self.unheard_of |= error.may_have_happened();
                    error
                }
            };
            tries += 1;
            let pause = match &error {
                _ if once => return Err(error),
                Error::Refused { holder } => {
                    let same = refused.replace(holder.clone()).is_some_and(|before| {
                        before.owner == holder.owner && before.acquired_at == holder.acquired_at
                    });
                    if !same {
                        tries = tries.min(MOVING);
                    }
                    // A little after it, not all at the same time.
                    let free = holder.remaining + self.backoff.pause(1);
                    self.backoff.pause(tries).min(free)
                }
                error if error.is_transient() => self.backoff.pause(tries),
                _ => return Err(error),
            };
            tracing::trace!(%error, ?pause, "not acquired yet");
            if self.releasing.is_some() {
                return Ok(None);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let last = left.filter(|left| *left <= pause + SHORTEST_TRY);
            tokio::select! {
                () = sleep(last.unwrap_or(pause)) => {}
                releasing = &mut self.given_up => {
                    self.releasing = releasing.ok();
                    return Ok(None);
                }
            }
            if last.is_some() {
                return Err(error);
            }
        }
    }

    /// Asks once more what became of a try nobody heard of, and undoes it.
    async fn give_back(self) {
        if !(self.unheard_of && self.own_id && self.own_owner) {
            return;
        }
        let wire = self.wire.within(LAST_QUESTION);
        if let Ok((Acquisition::Acquired(lock), _)) = wire.acquire(self.request).await {
            let key = Key {
                resource: lock.resource,
                owner: lock.owner,
                token: lock.fencing_token,
            };
            let outcome = wire.release(&key).await;
            tracing::debug!(?outcome, "gave back what nobody waits for any longer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_random_below_a_bound_that_doubles() {
        for (tries, bound) in [(1, 20), (2, 40), (5, 320), (7, 1000), (u32::MAX, 1000)] {
            let bound = Duration::from_millis(bound);
            let pauses: Vec<_> = (0..200).map(|_| Backoff::DEFAULT.pause(tries)).collect();
            assert!(pauses.iter().all(|p| (SHORTEST_PAUSE..=bound).contains(p)));
            assert!(pauses.iter().any(|pause| *pause > bound / 2));
            assert!(pauses.iter().any(|pause| *pause < bound / 2));
        }
    }
}
