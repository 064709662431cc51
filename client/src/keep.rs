//! Keeping a lease: the task behind a guard.
//!
//! A stream at one of the servers renews. Before its time is over the next one
//! is opened, and takes over once it has spoken, so that the renewals do not
//! pause. A stream that ends, or that says nothing for two intervals, gives way
//! to one at the next server.
//!
//! When no word came for 0.4 of the TTL, or for 30 s, it is renewed by calls as
//! well, whatever the streams do: behind a proxy that cuts streams that is what
//! keeps it. Each try has a quarter of the time that is left, so that there are
//! others.
//!
//! It is over when a server says so, at once, or when nothing was confirmed in
//! time. Nothing else ends it: one bad heartbeat is not a loss.
//!
//! The lock is given back when the guard is done with it and not before, also
//! when it is lost: until then its holder may still be at work.

use std::{future::pending, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::{
    Error, Event, KeepAliveOptions, LostReason, Renewal, Via,
    acquire::Backoff,
    clock::Moment,
    guard::Releasing,
    keep_alive::{LONGEST_INTERVAL, Stream},
    lease::{Confirmation, Lease},
    wire::{Key, Wire},
};

/// Pauses between streams that fail.
const REOPENING: Backoff = Backoff {
    first: Duration::from_millis(20),
    longest: Duration::from_secs(1),
};

/// A server that says it renews for longer, or for less, is not believed.
const LONGEST_STREAM: Duration = Duration::from_secs(24 * 60 * 60);
const SHORTEST_STREAM: Duration = Duration::from_millis(200);

/// Between calls whose time becomes shorter and shorter.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// After a refusal that no repetition will change, such as of a proxy that wants
/// credentials.
const REJECTED: Duration = Duration::from_secs(30);

/// Keeps the lease until it is lost, then waits; gives it back when `stopped`
/// says so, and tells `ends` how that went. Once `renewing` is cancelled the lease
/// runs to its end.
pub(crate) async fn keep(
    wire: Wire,
    key: Key,
    lease: Arc<Lease>,
    renewing: CancellationToken,
    mut slept: watch::Receiver<()>,
    mut stopped: oneshot::Receiver<Releasing>,
    ends: oneshot::Sender<Result<(), Error>>,
) {
    let granted = Moment::now();
    let span = tracing::info_span!(
        "lease",
        resource = key.resource,
        owner = key.owner,
        token = key.token
    );
    let work = async move {
        let watched = Watched(&lease);
        let keeper = Keeper {
            wire: &wire,
            key: &key,
            lease: &lease,
            renewing: &renewing,
        };
        let releasing = tokio::select! {
            biased;
            releasing = &mut stopped => releasing,
            reason = keeper.until_lost(&mut slept) => {
                let reason = lease.lose(reason);
                tracing::warn!(reason = reason.as_str(), "lost the lease");
                let held = granted.elapsed();
                wire.told.observe(&Event::Lost { reason, held });
                stopped.await
            }
        };
        let before = lease.remaining();
        if before.is_ok() {
            let held = granted.elapsed();
            wire.told.observe(&Event::Released { held });
        }
        // Nobody relies on it any longer.
        std::mem::forget(watched);
        let mut ends = Some(ends);
        let mut tell = |outcome| {
            // Nobody waits for it when the guard was dropped.
            let _: Option<Result<(), _>> = ends.take().map(|ends| ends.send(outcome));
        };
        if let Err(reason) = before {
            tell(Err(Error::Lost { reason }));
        }
        // What the server called over has nothing to give back.
        if matches!(before, Ok(_) | Err(LostReason::Unconfirmed)) {
            let outcome = wire.release(&key).await;
            tracing::debug!(?outcome, "released");
            tell(outcome);
        }
        drop(releasing);
    };
    work.instrument(span).await;
}

/// Whoever waits for a loss hears of it also when nobody watches any longer: when
/// the task, or its runtime, ends before its time.
struct Watched<'a>(&'a Lease);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.lose(LostReason::Unconfirmed);
    }
}

struct Keeper<'a> {
    wire: &'a Wire,
    key: &'a Key,
    lease: &'a Lease,
    /// Cancelled when nothing is to be renewed any longer.
    renewing: &'a CancellationToken,
}

type Opening<'a> = Pin<Box<dyn Future<Output = Result<Open, Error>> + Send + 'a>>;

/// A stream that has spoken.
struct Open {
    stream: Stream,
    renewal: Renewal,
    confirmed: Confirmation,
}

impl Keeper<'_> {
    async fn until_lost(&self, slept: &mut watch::Receiver<()>) -> LostReason {
        let renewed = async {
            tokio::select! {
                biased;
                () = self.renewing.cancelled() => pending().await,
                reason = self.streams() => reason,
                reason = self.calls() => reason,
            }
        };
        tokio::select! {
            reason = renewed => reason,
            reason = self.deadline(slept) => reason,
        }
    }

    async fn deadline(&self, slept: &mut watch::Receiver<()>) -> LostReason {
        loop {
            match self.lease.remaining() {
                Err(reason) => return reason,
                Ok(left) => {
                    // Which of them it is does not matter: look again.
                    let _: Result<_, _> = timeout(left, slept.changed()).await;
                }
            }
        }
    }

    /// Renews by calls when the streams do not.
    async fn calls(&self) -> LostReason {
        let mut tries = 0;
        loop {
            match self.lease.until_overdue() {
                Err(reason) => return reason,
                Ok(Duration::ZERO) => {}
                Ok(time) => {
                    tries = 0;
                    sleep(time).await;
                    continue;
                }
            }
            let left = match self.lease.remaining() {
                Err(reason) => return reason,
                Ok(left) => left,
            };
            let wire = self.wire.within(self.wire.timeout.min(left / 4));
            let outcome = match wire.renew(self.key, None).await {
                Ok((_, confirmed)) => self
                    .renewed(confirmed)
                    .map_err(|reason| Error::Lost { reason }),
                Err(error) => Err(error),
            };
            match outcome {
                Ok(()) => tracing::debug!("renewed by a call, since the streams are late"),
                Err(Error::Lost { reason }) => return reason,
                Err(error) => {
                    tries += 1;
                    self.failed(Via::Call, &error);
                    tracing::debug!(%error, "a renewal failed; the lease stands");
                    sleep(pause_after(&error, tries).min(left / 4).max(SHORTEST_PAUSE)).await;
                }
            }
        }
    }

    /// Renews by streams, one after the other.
    async fn streams(&self) -> LostReason {
        let mut current: Option<Stream> = None;
        let mut opening: Option<Opening<'_>> = None;
        let mut open_at = Instant::now();
        // Since a stream has lasted.
        let mut failures = 0;
        let mut opened_at = Instant::now();
        loop {
            let outcome = tokio::select! {
                word = next_word(&mut current) => match word {
                    Ok(confirmed) => {
                        if opened_at.elapsed() > SHORTEST_STREAM {
                            failures = 0;
                        }
                        Ok(confirmed)
                    }
                    Err(error) => {
                        failures += 1;
                        current = None;
                        open_at = open_at.min(Instant::now() + pause_after(&error, failures));
                        Err(error)
                    }
                },
                opened = finished(&mut opening) => {
                    opening = None;
                    match opened {
                        Ok(Open { stream, renewal, confirmed }) => {
                            opened_at = Instant::now();
                            open_at = opened_at + until_next(&renewal);
                            // The one before it ends here.
                            current = Some(stream);
                            Ok(confirmed)
                        }
                        Err(error) => {
                            failures += 1;
                            open_at = Instant::now() + pause_after(&error, failures);
                            Err(error)
                        }
                    }
                }
                () = sleep_until(open_at), if opening.is_none() => {
                    opening = Some(Box::pin(self.open()));
                    continue;
                }
            };
            match outcome {
                Ok(confirmed) => {
                    if let Err(reason) = self.renewed(confirmed) {
                        return reason;
                    }
                }
                Err(Error::Lost { reason }) => return reason,
                Err(error) => {
                    self.failed(Via::Stream, &error);
                    tracing::debug!(%error, "a stream failed; the lease stands");
                }
            }
        }
    }

    fn renewed(&self, confirmed: Confirmation) -> Result<(), LostReason> {
        let slack = self.lease.renewed(confirmed)?;
        self.wire.told.observe(&Event::Renewed { slack });
        Ok(())
    }

    fn failed(&self, via: Via, error: &Error) {
        self.wire.told.observe(&Event::RenewalFailed { via, error });
    }

    /// Opens a stream and waits for its first word.
    async fn open(&self) -> Result<Open, Error> {
        let left = self.lease.remaining().unwrap_or_default();
        let wire = self.wire.within(self.wire.timeout.min(left / 2));
        let options = KeepAliveOptions::default();
        let mut stream = wire.keep_alive(self.key, options).await?;
        let (renewal, confirmed) = stream.next().await?;
        Ok(Open {
            stream,
            renewal,
            confirmed,
        })
    }
}

/// Never, without a stream.
async fn next_word(current: &mut Option<Stream>) -> Result<Confirmation, Error> {
    match current {
        Some(stream) => stream.next().await.map(|(_, confirmed)| confirmed),
        None => pending().await,
    }
}

/// Never, unless one is being opened.
async fn finished(opening: &mut Option<Opening<'_>>) -> Result<Open, Error> {
    match opening {
        Some(opening) => opening.await,
        None => pending().await,
    }
}

/// When to open the next stream: some renewals before this one's time is over, but
/// not right away. At random, so that those which were opened together are
/// not replaced together.
fn until_next(renewal: &Renewal) -> Duration {
    let interval = (renewal.lock.ttl / 3).min(LONGEST_INTERVAL);
    let lead = interval.mul_f64(rand::random_range(2.0..2.5));
    let time = renewal.stream_remaining.min(LONGEST_STREAM);
    (time - lead.min(time / 2)).max(SHORTEST_STREAM)
}

fn pause_after(error: &Error, failures: u32) -> Duration {
    if error.is_transient() {
        REOPENING.pause(failures)
    } else {
        REJECTED
    }
}
