//! Wire types to domain types, every field checked; and back.

use std::time::{Duration, SystemTime};

use fencepost_proto::v1;
use tokio::time::Instant;
use tonic::Status;
use tonic_types::FieldViolation;

use super::status;
use crate::{
    caller::Caller,
    keep_alive::{Keep, Kept},
    lock::{
        FencingToken, Holder, Invalid, Labels, Lease, Owner, RequestId, Resource, Ttl, TtlLimits,
    },
    store::{Acquire, Acquired, Release, Renew},
};

/// Collects what is wrong with a request, so that its caller hears all of it
/// at once.
#[derive(Default)]
struct Fields(Vec<FieldViolation>);

impl Fields {
    fn check<T>(&mut self, field: &'static str, value: Result<T, Invalid>) -> Option<T> {
        value
            .map_err(|invalid| self.0.push(FieldViolation::new(field, invalid.0)))
            .ok()
    }

    fn refuse<T>(self) -> Result<T, Status> {
        Err(status::invalid(self.0))
    }
}

pub(super) fn acquire(
    request: v1::AcquireRequest,
    limits: TtlLimits,
    caller: Caller,
) -> Result<Acquire, Status> {
    let mut fields = Fields::default();
    let resource = fields.check("resource", Resource::new(request.resource));
    let owner = fields.check("owner", Owner::new(request.owner));
    let ttl = fields.check("ttl", required_ttl(request.ttl, limits));
    let labels = fields.check("labels", Labels::new(request.labels));
    let request_id = fields.check("request_id", RequestId::new(request.request_id));
    match (resource, owner, ttl, labels, request_id) {
        (Some(resource), Some(owner), Some(ttl), Some(labels), Some(request_id)) => Ok(Acquire {
            resource,
            owner,
            ttl,
            labels,
            request_id,
            caller,
        }),
        _ => fields.refuse(),
    }
}

pub(super) fn release(request: v1::ReleaseRequest, caller: Caller) -> Result<Release, Status> {
    let mut fields = Fields::default();
    let resource = fields.check("resource", Resource::new(request.resource));
    let owner = fields.check("owner", Owner::new(request.owner));
    let token = fields.check("fencing_token", FencingToken::new(request.fencing_token));
    match (resource, owner, token) {
        (Some(resource), Some(owner), Some(token)) => Ok(Release {
            resource,
            owner,
            token,
            caller,
        }),
        _ => fields.refuse(),
    }
}

pub(super) fn renew(request: v1::RenewRequest, limits: TtlLimits) -> Result<Renew, Status> {
    let mut fields = Fields::default();
    let resource = fields.check("resource", Resource::new(request.resource));
    let owner = fields.check("owner", Owner::new(request.owner));
    let token = fields.check("fencing_token", FencingToken::new(request.fencing_token));
    let ttl = fields.check(
        "ttl",
        request.ttl.map(|ttl| self::ttl(ttl, limits)).transpose(),
    );
    match (resource, owner, token, ttl) {
        (Some(resource), Some(owner), Some(token), Some(ttl)) => Ok(Renew {
            resource,
            owner,
            token,
            ttl,
        }),
        _ => fields.refuse(),
    }
}

pub(super) fn keep_alive(
    request: v1::KeepAliveRequest,
    limits: TtlLimits,
    caller_deadline: Option<Instant>,
) -> Result<Keep, Status> {
    let mut fields = Fields::default();
    let resource = fields.check("resource", Resource::new(request.resource));
    let owner = fields.check("owner", Owner::new(request.owner));
    let token = fields.check("fencing_token", FencingToken::new(request.fencing_token));
    let ttl = fields.check(
        "ttl",
        request.ttl.map(|ttl| self::ttl(ttl, limits)).transpose(),
    );
    let max_duration = fields.check(
        "max_duration",
        request
            .max_duration
            .map(|asked| max_duration(asked, limits))
            .transpose(),
    );
    match (resource, owner, token, ttl, max_duration) {
        (Some(resource), Some(owner), Some(token), Some(ttl), Some(max_duration)) => Ok(Keep {
            renew: Renew {
                resource,
                owner,
                token,
                ttl,
            },
            max_duration,
            caller_deadline,
        }),
        _ => fields.refuse(),
    }
}

pub(super) fn get(request: v1::GetRequest) -> Result<Resource, Status> {
    let mut fields = Fields::default();
    match fields.check("resource", Resource::new(request.resource)) {
        Some(resource) => Ok(resource),
        None => fields.refuse(),
    }
}

fn required_ttl(ttl: Option<prost_types::Duration>, limits: TtlLimits) -> Result<Ttl, Invalid> {
    self::ttl(ttl.ok_or_else(|| Invalid("is required".into()))?, limits)
}

fn ttl(ttl: prost_types::Duration, limits: TtlLimits) -> Result<Ttl, Invalid> {
    limits.check(positive(ttl).ok_or_else(|| limits.out_of_range())?)
}

/// As short as the shortest lease, and no shorter: such streams would do little
/// but end. The server's own limit cuts it; `stream_remaining` tells.
fn max_duration(asked: prost_types::Duration, limits: TtlLimits) -> Result<Duration, Invalid> {
    positive(asked)
        .filter(|asked| *asked >= limits.min)
        .ok_or_else(|| {
            let min = humantime::format_duration(limits.min);
            Invalid(format!("must be at least {min}"))
        })
}

/// prost's own conversion normalises first, and panics on hostile values.
fn positive(duration: prost_types::Duration) -> Option<Duration> {
    let seconds = u64::try_from(duration.seconds).ok()?;
    let nanos = u32::try_from(duration.nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(seconds, nanos))
}

/// Claims the grant: nothing may be awaited after this.
pub(super) fn acquired(acquired: Acquired) -> v1::AcquireResponse {
    match acquired {
        Acquired::Granted(grant) => v1::AcquireResponse {
            acquired: true,
            lock: Some(lock(grant.claim())),
            holder: None,
        },
        Acquired::Held(holder) => v1::AcquireResponse {
            acquired: false,
            lock: None,
            holder: Some(self::holder(holder)),
        },
    }
}

/// Reads the clock for `remaining` as late as can be.
pub(super) fn lock(lease: Lease) -> v1::Lock {
    v1::Lock {
        resource: lease.resource.into_string(),
        owner: lease.owner.into_string(),
        fencing_token: lease.token.get(),
        acquired_at: Some(timestamp(lease.acquired_at)),
        expires_at: Some(timestamp(lease.expires_at)),
        ttl: Some(duration(lease.ttl)),
        labels: lease.labels.into_entries().into_iter().collect(),
        remaining: Some(duration(lease.deadline.remaining())),
    }
}

pub(super) fn kept(kept: &Kept) -> v1::KeepAliveResponse {
    v1::KeepAliveResponse {
        lock: Some(lock(kept.lease.clone())),
        slack: Some(duration(kept.slack)),
        stream_remaining: Some(duration(
            kept.ends_at.saturating_duration_since(Instant::now()),
        )),
    }
}

fn holder(holder: Holder) -> v1::Holder {
    v1::Holder {
        owner: holder.owner.into_string(),
        acquired_at: Some(timestamp(holder.acquired_at)),
        remaining: Some(duration(holder.deadline.remaining())),
        labels: holder.labels.into_entries().into_iter().collect(),
    }
}

fn timestamp(time: SystemTime) -> prost_types::Timestamp {
    time.into()
}

/// No lease is longer than the largest TTL, so this does not saturate.
fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod properties;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::ttl;
    use crate::lock::TtlLimits;

    #[test]
    fn hostile_durations_are_refused_without_wrapping() {
        let limits = TtlLimits {
            min: Duration::from_millis(500),
            max: Duration::from_secs(86_400),
        };
        let check = |seconds, nanos| ttl(prost_types::Duration { seconds, nanos }, limits);
        assert_eq!(check(1, 0).unwrap().millis(), 1000);
        assert_eq!(check(0, 999_999_999).unwrap().millis(), 999);
        for (seconds, nanos) in [
            (0, 0),
            (-1, 0),
            (1, -1),
            (-1, 999_999_999),
            (1, 1_000_000_000),
            (1, i32::MAX),
            (1, i32::MIN),
            (86_400, 1),
            (1 << 31, 0),
            (1 << 53, 0),
            (i64::MAX, 999_999_999),
            (i64::MIN, 0),
        ] {
            assert!(check(seconds, nanos).is_err(), "{seconds} s {nanos} ns");
        }
    }
}
