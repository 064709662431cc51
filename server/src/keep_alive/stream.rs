//! What the schedule keeps of one stream.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use super::{End, Keep, KeepAliveConfig, Kept, State};
use crate::{
    lock::{Lease, Ttl},
    store::Renewed,
};

/// The longest silence of a stream; common proxies cut after a minute.
const LONGEST_INTERVAL: Duration = Duration::from_secs(20);

/// The default of `max_duration`, in TTLs.
const DEFAULT_TTLS: u32 = 5;

pub(super) struct Stream {
    pub(super) keep: Keep,
    pub(super) out: watch::Sender<State>,
    pub(super) opened: Instant,
    /// Shortly before the deadline of the last confirmed lease: with no newer
    /// one by then, the stream must say so.
    pub(super) trusted_until: Instant,
    /// When the stream's own time is over; known once its TTL is.
    pub(super) ends_at: Option<Instant>,
    /// When to renew next. None while a renewal is queued or under way.
    pub(super) due: Option<Instant>,
    /// Counts the renewals that were queued: an earlier one that fails late
    /// changes nothing.
    pub(super) attempt: u64,
}

impl Stream {
    pub(super) fn new(keep: Keep, out: watch::Sender<State>, config: &KeepAliveConfig) -> Self {
        let now = Instant::now();
        // What is left of the lease is not known yet. Who sets a TTL hears within
        // it; nor is anything renewed past the stream's own time, whoever set it.
        let bounds = [keep.renew.ttl.map(Ttl::as_duration), keep.max_duration];
        let most = config.request_timeout.min(config.max_duration);
        let first = bounds.into_iter().flatten().fold(most, Duration::min);
        Self {
            keep,
            out,
            opened: now,
            trusted_until: now + first,
            ends_at: None,
            due: None,
            attempt: 0,
        }
    }

    /// When the stream ends at the latest, as far as is known.
    pub(super) fn ends_by(&self) -> Instant {
        [self.ends_at, self.keep.caller_deadline]
            .into_iter()
            .flatten()
            .fold(self.trusted_until, Instant::min)
    }

    /// When this stream next needs a look.
    pub(super) fn next_event(&self) -> Instant {
        let end = self.ends_by();
        self.due.map_or(end, |due| due.min(end))
    }

    /// Whether, and how, the stream ends by the clock.
    pub(super) fn end(&self, now: Instant) -> Option<End> {
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

    /// Its lease was renewed, by an attempt that began at `sent`.
    pub(super) fn renewed(
        &mut self,
        renewed: Renewed,
        sent: Instant,
        latest: bool,
        config: &KeepAliveConfig,
    ) {
        let Renewed { lease, slack } = renewed;
        let now = Instant::now();
        let trusted_until = now + trusted_for(&lease);
        // The latest answer wins: a failover may have left less of the lease than
        // an earlier one said. A late answer takes nothing back, unless what it
        // meets is a guess: neither time nor, where the database's clock was set back
        // between the two, the end.
        let ends_earlier = matches!(
            &*self.out.borrow(),
            State::Renewed(told) if told.lease.expires_at > lease.expires_at
        );
        let brings_something = trusted_until > self.trusted_until && !ends_earlier;
        let counts = latest || self.ends_at.is_none() || brings_something;
        if !counts {
            return;
        }
        self.trusted_until = trusted_until;
        let ends_at = *self.ends_at.get_or_insert_with(|| {
            let asked = self
                .keep
                .max_duration
                .unwrap_or(lease.ttl.saturating_mul(DEFAULT_TTLS));
            self.opened + asked.min(config.max_duration)
        });
        if latest {
            self.due = Some((sent + interval(lease.ttl)).max(now));
        }
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use tokio::{sync::watch, time::Instant};

    use super::Stream;
    use crate::{
        clock::Moment,
        keep_alive::{
            State,
            stage::{CONFIG, keep},
        },
        lock::{Labels, Lease},
        store::{Renew, Renewed},
    };

    const TTL: Duration = Duration::from_secs(10);

    fn stream() -> (Stream, watch::Receiver<State>) {
        let (out, told) = watch::channel(State::Opening);
        (Stream::new(keep(), out, &CONFIG), told)
    }

    fn lease_of(ask: &Renew, left: Duration) -> Lease {
        Lease {
            resource: ask.resource.clone(),
            owner: ask.owner.clone(),
            token: ask.token,
            acquired_at: SystemTime::UNIX_EPOCH,
            expires_at: SystemTime::UNIX_EPOCH + TTL + left,
            deadline: Moment::now().after(left),
            ttl: TTL,
            labels: Labels::default(),
        }
    }

    /// An answer that leaves this much of the lease.
    fn answer(stream: &mut Stream, left: u64, latest: bool) {
        let left = Duration::from_secs(left);
        let lease = lease_of(&stream.keep.renew, left);
        hear(stream, lease, latest);
    }

    fn hear(stream: &mut Stream, lease: Lease, latest: bool) {
        let (sent, slack) = (stream.opened, lease.deadline.remaining());
        stream.renewed(Renewed { lease, slack }, sent, latest, &CONFIG);
    }

    /// The database's clock was set back between two answers: the first leaves more.
    #[test]
    fn a_late_answer_moves_no_end_back() {
        let (mut stream, told) = stream();
        answer(&mut stream, 9, true);
        let ends = expires_at(&told);
        let lease = Lease {
            expires_at: ends - Duration::from_millis(8),
            ..lease_of(&stream.keep.renew, TTL)
        };
        hear(&mut stream, lease, false);
        assert_eq!(expires_at(&told), ends);
    }

    fn expires_at(told: &watch::Receiver<State>) -> SystemTime {
        match &*told.borrow() {
            State::Renewed(kept) => kept.lease.expires_at,
            other => panic!("{other:?}"),
        }
    }

    /// A renewal was sent again elsewhere, and the first answer comes last.
    #[test]
    fn a_late_answer_takes_nothing_back() {
        let (mut stream, told) = stream();
        answer(&mut stream, 9, true);
        let (ends, trusted) = (expires_at(&told), stream.trusted_until);
        answer(&mut stream, 8, false);
        assert_eq!(expires_at(&told), ends);
        assert_eq!(stream.trusted_until, trusted);
        // One that brings something is passed on, however late.
        answer(&mut stream, 10, false);
        assert!(expires_at(&told) > ends);
        assert!(stream.trusted_until > trusted);
    }

    /// The one that answered first may have been a primary that is none now,
    /// and its renewal forgotten: what the latest says is what there is.
    #[test]
    fn the_latest_answer_counts_though_it_brings_less() {
        let (mut stream, told) = stream();
        answer(&mut stream, 9, false);
        let (ends, trusted) = (expires_at(&told), stream.trusted_until);
        answer(&mut stream, 8, true);
        assert!(expires_at(&told) < ends);
        assert!(stream.trusted_until < trusted);
    }

    #[test]
    fn whatever_ends_a_stream_first_is_its_end() {
        let (mut stream, _told) = stream();
        assert_eq!(stream.ends_by(), stream.trusted_until);
        let sooner = |than: Instant| than - Duration::from_secs(1);
        let end = sooner(stream.trusted_until);
        stream.ends_at = Some(end);
        assert_eq!(stream.ends_by(), end);
        let deadline = sooner(end);
        stream.keep.caller_deadline = Some(deadline);
        assert_eq!(stream.ends_by(), deadline);
        assert_eq!(stream.next_event(), deadline);
        // Due is no end.
        stream.due = Some(sooner(deadline));
        assert_eq!(stream.ends_by(), deadline);
        assert_eq!(stream.next_event(), sooner(deadline));
    }
}
