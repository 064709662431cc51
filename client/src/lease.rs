//! For how long a lease may be trusted: what its guard and its keeper share.
//!
//! It ends a margin before the server's deadline, counted from just before the
//! request was sent whose answer confirmed it. It is judged whenever somebody
//! asks, by the clock alone, so that a process that was frozen knows on its first
//! look. Once over, it is over for good: a confirmation that comes later, or
//! that was read later, does not bring it back.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::{LostReason, clock::Moment};

/// No lease goes longer without a try to renew it, so that one that was lost is
/// known to be.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// When a renewal landed, and what it gave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Confirmation {
    /// When it was asked for, or read.
    pub(crate) seen: Moment,
    /// The lease's deadline, from the safe side.
    pub(crate) until: Moment,
    pub(crate) ttl: Duration,
}

impl Confirmation {
    /// How long a lease confirmed so may be trusted from now on.
    pub(crate) fn trusted_for(self, margin: Option<Duration>) -> Duration {
        Trust::new(self, margin).until.since(Moment::now())
    }
}

#[derive(Debug)]
pub(crate) struct Lease {
    state: Mutex<State>,
    lost: CancellationToken,
    margin: Option<Duration>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Held(Trust),
    Lost(LostReason),
}

#[derive(Debug, Clone, Copy)]
struct Trust {
    until: Moment,
    /// With no other confirmation by then, something is wrong.
    renewed_by: Moment,
}

/// 100 ms of 1 s, 500 ms of 5 s to 1000 s, and then one in 2000: more than any
/// two clocks drift apart.
fn default_margin(ttl: Duration) -> Duration {
    (ttl / 10).min(Duration::from_millis(500)).max(ttl / 2000)
}

impl Lease {
    /// `margin` in place of the default one.
    pub(crate) fn new(granted: Confirmation, margin: Option<Duration>) -> Self {
        Self {
            state: Mutex::new(State::Held(Trust::new(granted, margin))),
            lost: CancellationToken::new(),
            margin,
        }
    }

    /// How long it may be trusted from now on, or why no longer.
    pub(crate) fn remaining(&self) -> Result<Duration, LostReason> {
        self.judge(Moment::now(), |trust, now| trust.until.since(now))
    }

    /// How long until another confirmation is overdue.
    pub(crate) fn until_overdue(&self) -> Result<Duration, LostReason> {
        self.judge(Moment::now(), |trust, now| trust.renewed_by.since(now))
    }

    /// It was confirmed, unless it is over by now. Returns what was left of it.
    pub(crate) fn renewed(&self, confirmed: Confirmation) -> Result<Duration, LostReason> {
        self.renewed_at(Moment::now(), confirmed)
    }

    /// It is over. The first reason stays.
    pub(crate) fn lose(&self, reason: LostReason) -> LostReason {
        let reason = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            match *state {
                State::Held(_) => {
                    *state = State::Lost(reason);
                    reason
                }
                State::Lost(first) => first,
            }
        };
        // Wakes others: not under the lock.
        self.lost.cancel();
        reason
    }

    /// Cancelled once it is known to be over.
    pub(crate) fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    fn renewed_at(&self, now: Moment, confirmed: Confirmation) -> Result<Duration, LostReason> {
        let newer = Trust::new(confirmed, self.margin);
        self.judge(now, |trust, now| {
            let left = trust.until.since(now);
            trust.until = trust.until.max(newer.until);
            trust.renewed_by = trust.renewed_by.max(newer.renewed_by);
            left
        })
    }

    fn judge<T>(
        &self,
        now: Moment,
        look: impl FnOnce(&mut Trust, Moment) -> T,
    ) -> Result<T, LostReason> {
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *state {
                State::Held(trust) if now < trust.until => return Ok(look(trust, now)),
                State::Held(_) => {}
                State::Lost(reason) => return Err(*reason),
            }
        }
        Err(self.lose(LostReason::Unconfirmed))
    }
}

impl Trust {
    fn new(confirmed: Confirmation, margin: Option<Duration>) -> Self {
        let Confirmation { seen, until, ttl } = confirmed;
        let until = until.before(margin.unwrap_or_else(|| default_margin(ttl)));
        Self {
            until,
            // A little later than streams renew, which is after a third.
            renewed_by: seen + (ttl * 2 / 5).min(LONGEST_SILENCE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn confirmed(seen: Moment, ttl: Duration) -> Confirmation {
        Confirmation {
            seen,
            until: seen + ttl,
            ttl,
        }
    }

    #[test]
    fn the_margin_covers_drift_and_leaves_most_of_the_lease() {
        for (ttl, margin) in [(500, 50), (3000, 300), (60_000, 500), (86_400_000, 43_200)] {
            assert_eq!(
                default_margin(Duration::from_millis(ttl)),
                Duration::from_millis(margin)
            );
        }
    }

    #[test]
    fn trust_ends_a_margin_before_the_deadline_and_for_good() {
        let start = Moment::now();
        let lease = Lease::new(confirmed(start, 10 * SECOND), Some(SECOND));
        let look = |at| lease.judge(start + at, |trust, now| trust.until.since(now));
        assert_eq!(look(Duration::ZERO), Ok(9 * SECOND));
        assert_eq!(look(8 * SECOND), Ok(SECOND));
        assert!(!lease.lost().is_cancelled());
        // Nobody looked for a while, and then a confirmation is read.
        let late = lease.renewed_at(
            start + 9 * SECOND,
            confirmed(start + 8 * SECOND, 10 * SECOND),
        );
        assert_eq!(late, Err(LostReason::Unconfirmed));
        assert!(lease.lost().is_cancelled());
        assert_eq!(look(Duration::ZERO), Err(LostReason::Unconfirmed));
    }

    #[test]
    fn confirmations_prolong_and_never_shorten() {
        let start = Moment::now();
        let lease = Lease::new(confirmed(start, 10 * SECOND), Some(SECOND));
        let renew = |sent| lease.renewed_at(start + sent, confirmed(start + sent, 10 * SECOND));
        assert_eq!(renew(5 * SECOND), Ok(4 * SECOND));
        assert_eq!(renew(3 * SECOND), Ok(11 * SECOND));
        let until = lease.judge(start, |trust, _| (trust.until, trust.renewed_by));
        assert_eq!(until, Ok((start + 14 * SECOND, start + 9 * SECOND)));
    }

    #[test]
    fn the_first_reason_stays() {
        let lease = Lease::new(confirmed(Moment::now(), 10 * SECOND), None);
        assert_eq!(lease.lose(LostReason::NotOwner), LostReason::NotOwner);
        assert_eq!(lease.lose(LostReason::Expired), LostReason::NotOwner);
        assert_eq!(lease.remaining(), Err(LostReason::NotOwner));
    }
}
