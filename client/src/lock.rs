//! What the server's answers say, in the types of Rust.
//!
//! An answer is checked once, here. One that makes no sense (granted, but no
//! lease; a token of 0) is an [`Internal`](Error::Internal) error and never
//! half a lock.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use fencepost_proto::v1;

use crate::{Error, clock::Moment, lease::Confirmation};

/// The last second that RFC 3339 can write, since 1970.
const END_OF_9999: i64 = 253_402_300_799;

/// One lease of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lock {
    /// The name that is locked.
    pub resource: String,
    /// Who holds it.
    pub owner: String,
    /// Above 0, below 2^53, strictly increasing per resource. Hand it to the
    /// protected resource with every write.
    pub fencing_token: i64,
    /// When the lease was granted, by the database's clock.
    pub acquired_at: SystemTime,
    /// When the lease ends, by the database's clock. For people and logs.
    pub expires_at: SystemTime,
    /// What is left of the lease, counted from the return of the call: the time
    /// since the request was sent is taken off. Programs use this.
    pub remaining: Duration,
    /// The time to live that the lease was granted or last renewed with.
    pub ttl: Duration,
    /// What the holder said of itself when it acquired the lock.
    pub labels: BTreeMap<String, String>,
}

/// Who has the lock that was refused. It has no token.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The owner of the live lease.
    pub owner: String,
    /// When that lease was granted, by the database's clock.
    pub acquired_at: SystemTime,
    /// What is left of it unless it is renewed or released: when to try again.
    pub remaining: Duration,
    /// What the holder said of itself when it acquired the lock.
    pub labels: BTreeMap<String, String>,
}

/// The answer to an acquire that went through: granted or refused.
#[must_use = "the lock may have been refused"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquisition {
    /// The caller has the lock.
    Acquired(Lock),
    /// Another owner has it.
    Refused(Holder),
}

/// `sent` is just before the request was sent.
pub(crate) fn lock(lock: Option<v1::Lock>, sent: Moment) -> Result<(Lock, Confirmation), Error> {
    let lock = lock.ok_or_else(|| nonsense("lock"))?;
    if lock.fencing_token <= 0 {
        return Err(nonsense("fencing_token"));
    }
    let ttl = duration(lock.ttl, "ttl")?;
    let until = sent + duration(lock.remaining, "remaining")?;
    let lock = Lock {
        resource: lock.resource,
        owner: lock.owner,
        fencing_token: lock.fencing_token,
        acquired_at: time(lock.acquired_at, "acquired_at")?,
        expires_at: time(lock.expires_at, "expires_at")?,
        remaining: until.since(Moment::now()),
        ttl,
        labels: lock.labels.into_iter().collect(),
    };
    Ok((
        lock,
        Confirmation {
            seen: sent,
            until,
            ttl,
        },
    ))
}

/// `sent` is just before the request was sent.
pub(crate) fn acquisition(
    answer: v1::AcquireResponse,
    sent: Moment,
) -> Result<(Acquisition, Option<Confirmation>), Error> {
    if answer.acquired {
        let (lock, confirmation) = lock(answer.lock, sent)?;
        return Ok((Acquisition::Acquired(lock), Some(confirmation)));
    }
    let holder = answer.holder.ok_or_else(|| nonsense("holder"))?;
    let holder = Holder {
        owner: holder.owner,
        acquired_at: time(holder.acquired_at, "acquired_at")?,
        remaining: duration(holder.remaining, "remaining")?.saturating_sub(sent.elapsed()),
        labels: holder.labels.into_iter().collect(),
    };
    Ok((Acquisition::Refused(holder), None))
}

pub(crate) fn duration(
    duration: Option<prost_types::Duration>,
    field: &'static str,
) -> Result<Duration, Error> {
    duration
        .and_then(|duration| positive(duration.seconds, duration.nanos))
        .ok_or_else(|| nonsense(field))
}

fn time(time: Option<prost_types::Timestamp>, field: &'static str) -> Result<SystemTime, Error> {
    time.filter(|time| time.seconds <= END_OF_9999)
        .and_then(|time| positive(time.seconds, time.nanos))
        .and_then(|since_1970| SystemTime::UNIX_EPOCH.checked_add(since_1970))
        .ok_or_else(|| nonsense(field))
}

/// By hand, because the conversions of prost-types normalise first and panic on
/// the smallest number of seconds.
fn positive(seconds: i64, nanos: i32) -> Option<Duration> {
    let nanos = u32::try_from(nanos).ok().filter(|n| *n < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

fn nonsense(field: &'static str) -> Error {
    Error::Internal {
        detail: format!("the server's answer has no usable {field}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted() -> v1::Lock {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        v1::Lock {
            resource: "r".into(),
            owner: "o".into(),
            fencing_token: 7,
            acquired_at: at(100),
            expires_at: at(130),
            remaining: seconds(30),
            ttl: seconds(30),
            labels: [("k".into(), "v".into())].into(),
        }
    }

    #[test]
    fn what_is_left_counts_from_before_the_request() {
        let left = |ago| {
            let sent = Moment::now().before(Duration::from_secs(ago));
            let (lock, confirmed) = lock(Some(granted()), sent).expect("a lock");
            assert_eq!(confirmed.until, sent + Duration::from_secs(30));
            lock.remaining
        };
        assert!(left(0) <= Duration::from_secs(30));
        assert!(left(10) <= Duration::from_secs(20));
        assert!(left(10) > Duration::from_secs(19));
        assert_eq!(left(31), Duration::ZERO);
    }

    #[test]
    fn nonsense_is_never_half_a_lock() {
        let hostile = prost_types::Duration {
            seconds: i64::MIN,
            nanos: i32::MIN,
        };
        let late = prost_types::Timestamp {
            seconds: i64::MAX,
            nanos: i32::MAX,
        };
        let without_token = v1::Lock {
            fencing_token: 0,
            ..granted()
        };
        let negative = v1::Lock {
            remaining: Some(hostile),
            ..granted()
        };
        let never = v1::Lock {
            expires_at: Some(late),
            ..granted()
        };
        let unset = v1::Lock {
            ttl: None,
            ..granted()
        };
        for lock_ in [without_token, negative, never, unset] {
            let answer = lock(Some(lock_), Moment::now());
            assert!(matches!(answer, Err(Error::Internal { .. })), "{answer:?}");
        }
        let empty = v1::AcquireResponse {
            acquired: true,
            ..Default::default()
        };
        assert!(acquisition(empty, Moment::now()).is_err());
        assert!(acquisition(v1::AcquireResponse::default(), Moment::now()).is_err());
    }
}
