//! Thin helpers around the generated client: requests, answers, errors.

use std::time::Duration;

use fencepost_proto::v1::{
    AcquireRequest, AcquireResponse, GetRequest, Holder, Lock, ReleaseRequest, RenewRequest,
};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::server::Client;

/// The domain of every error of the lock service.
pub const DOMAIN: &str = "fencepost";

/// A protobuf duration.
pub fn seconds(seconds: u64) -> prost_types::Duration {
    duration(Duration::from_secs(seconds))
}

/// A protobuf duration.
pub fn duration(duration: Duration) -> prost_types::Duration {
    duration.try_into().expect("a duration of sensible length")
}

/// The standard duration of a field that must be set and not negative.
pub fn span(duration: Option<prost_types::Duration>) -> Duration {
    let duration = duration.expect("the duration is set");
    duration.try_into().expect("the duration is not negative")
}

/// A timestamp as a standard time, of a field that must be set.
pub fn time(timestamp: Option<prost_types::Timestamp>) -> std::time::SystemTime {
    let timestamp = timestamp.expect("the timestamp is set");
    timestamp.try_into().expect("a time after 1970")
}

/// A request without labels and request id.
pub fn request(resource: &str, owner: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest {
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        ttl: Some(duration(ttl)),
        ..AcquireRequest::default()
    }
}

/// A request with a request id.
pub fn request_with_id(resource: &str, owner: &str, ttl: Duration, id: &str) -> AcquireRequest {
    AcquireRequest {
        request_id: id.to_owned(),
        ..request(resource, owner, ttl)
    }
}

/// Calls Acquire.
///
/// # Errors
///
/// The status that the server answers.
pub async fn acquire(
    client: &mut Client,
    resource: &str,
    owner: &str,
    ttl: Duration,
) -> Result<AcquireResponse, Status> {
    send(client, request(resource, owner, ttl)).await
}

/// Calls Acquire with a request of one's own.
///
/// # Errors
///
/// The status that the server answers.
pub async fn send(client: &mut Client, request: AcquireRequest) -> Result<AcquireResponse, Status> {
    Ok(client.acquire(request).await?.into_inner())
}

/// Calls Acquire and expects a lease.
pub async fn granted(client: &mut Client, resource: &str, owner: &str, ttl: Duration) -> Lock {
    grant_in(acquire(client, resource, owner, ttl).await)
}

/// Calls Acquire and expects to hear who holds the lock.
pub async fn refused(client: &mut Client, resource: &str, owner: &str, ttl: Duration) -> Holder {
    refusal_in(acquire(client, resource, owner, ttl).await)
}

/// The lease in an answer that must be a grant, and nothing besides.
pub fn grant_in(answer: Result<AcquireResponse, Status>) -> Lock {
    match answer {
        Ok(AcquireResponse {
            acquired: true,
            lock: Some(lock),
            holder: None,
        }) => lock,
        other => panic!("expected a grant, got {other:?}"),
    }
}

/// The holder in an answer that must be a refusal, and nothing besides.
pub fn refusal_in(answer: Result<AcquireResponse, Status>) -> Holder {
    match answer {
        Ok(AcquireResponse {
            acquired: false,
            lock: None,
            holder: Some(holder),
        }) => holder,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Calls Renew.
///
/// # Errors
///
/// The status that the server answers.
pub async fn renew(
    client: &mut Client,
    resource: &str,
    owner: &str,
    token: i64,
    ttl: Option<Duration>,
) -> Result<Lock, Status> {
    let request = RenewRequest {
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        fencing_token: token,
        ttl: ttl.map(duration),
    };
    let answer = client.renew(request).await?.into_inner();
    Ok(answer.lock.expect("a renewal carries the lease"))
}

/// Calls Release.
///
/// # Errors
///
/// The status that the server answers.
pub async fn release(
    client: &mut Client,
    resource: &str,
    owner: &str,
    token: i64,
) -> Result<(), Status> {
    let request = ReleaseRequest {
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        fencing_token: token,
    };
    client.release(request).await.map(|_| ())
}

/// Calls Get.
///
/// # Errors
///
/// The status that the server answers.
pub async fn get(client: &mut Client, resource: &str) -> Result<Lock, Status> {
    let request = GetRequest {
        resource: resource.to_owned(),
    };
    let answer = client.get(request).await?.into_inner();
    Ok(answer.lock.expect("an answer to Get carries the lease"))
}

/// The reason of an error of the lock service; none for a bare status, or one
/// of somebody else.
pub fn reason(status: &Status) -> Option<String> {
    let info = status.get_details_error_info()?;
    (info.domain == DOMAIN).then_some(info.reason)
}

/// The fields that an error complains of.
pub fn violations(status: &Status) -> Vec<String> {
    status
        .get_details_bad_request()
        .map(|bad| bad.field_violations)
        .unwrap_or_default()
        .into_iter()
        .map(|violation| violation.field)
        .collect()
}

/// Expects an error of this code and reason, with the resource in its
/// metadata unless the input was bad, and no cause in its message. Returns it.
#[track_caller]
pub fn expect_error<T: std::fmt::Debug>(
    answer: Result<T, Status>,
    code: Code,
    expected: &str,
) -> Status {
    let status = answer.expect_err(expected);
    assert_eq!(status.code(), code, "{status:?}");
    assert_eq!(reason(&status).as_deref(), Some(expected), "{status:?}");
    assert_no_secrets(&status);
    status
}

/// Expects that an error names the resource in its metadata.
#[track_caller]
pub fn expect_resource(status: &Status, resource: &str) {
    let info = status.get_details_error_info().expect("an ErrorInfo");
    assert_eq!(
        info.metadata.get("resource").map(String::as_str),
        Some(resource),
        "{status:?}"
    );
}

/// Expects that an error is `INVALID_REQUEST` and complains of `field`.
#[track_caller]
pub fn expect_violation<T: std::fmt::Debug>(answer: Result<T, Status>, field: &str) -> Status {
    let status = expect_error(answer, Code::InvalidArgument, "INVALID_REQUEST");
    assert_eq!(violations(&status), [field], "{status:?}");
    status
}

/// Expects that an error can be retried and says when: `RetryInfo`, and the
/// trailer that gRPC libraries obey. Returns the shorter wait.
#[track_caller]
pub fn expect_retryable(status: &Status) -> Duration {
    let pushback = status
        .metadata()
        .get("grpc-retry-pushback-ms")
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
        .map(Duration::from_millis);
    let info = status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay);
    let (Some(pushback), Some(delay)) = (pushback, info) else {
        panic!("no RetryInfo or no grpc-retry-pushback-ms: {status:?}");
    };
    for wait in [pushback, delay] {
        let sensible = Duration::from_millis(1)..Duration::from_secs(10);
        assert!(sensible.contains(&wait), "wait {wait:?}: {status:?}");
    }
    pushback.min(delay)
}

/// Expects that repeating the call is not suggested.
#[track_caller]
pub fn expect_final(status: &Status) {
    assert!(
        status.get_details_retry_info().is_none(),
        "RetryInfo: {status:?}"
    );
    let pushback = status.metadata().get("grpc-retry-pushback-ms");
    assert!(pushback.is_none(), "pushback: {status:?}");
}

/// Expects that a message says nothing of SQL, the schema or a connection.
#[track_caller]
pub fn assert_no_secrets(status: &Status) {
    let message = status.message().to_lowercase();
    let telling = [
        "select",
        "insert",
        "update ",
        "sqlstate",
        "postgres",
        "error:",
        "fencepost.locks",
        "violates",
        "127.0.0.1",
        "db error",
    ];
    for word in telling {
        assert!(!message.contains(word), "{word:?} in {message:?}");
    }
}
