//! The calls.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use fencepost_proto::v1;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    Acquisition, EndpointsError, Error, FieldViolation, KeepAlive, KeepAliveOptions, Lock,
    LostReason, call::Servers, endpoints, lock,
};

/// Longer budgets count as this one.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A connection to one or more replicas of a Fencepost server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    servers: Arc<Servers>,
    timeout: Duration,
}

/// What an acquire may carry besides what it must.
#[derive(Debug, Clone, Default)]
pub struct AcquireOptions {
    /// Shown to whoever is refused: host, pid, build, trace id. Up to 16, 4 KiB
    /// together.
    pub labels: BTreeMap<String, String>,
    /// Names this acquisition, at most 128 bytes; a repeated call with the same
    /// id gets the same lease. Unset: a new UUID for each call of
    /// [`Client::acquire`].
    pub request_id: Option<String>,
}

impl Client {
    /// How long a call may take, unless said otherwise.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Names the servers: one or more URLs like `http://127.0.0.1:50051`,
    /// separated by commas, all of them replicas on the same database. Nothing
    /// is connected before the first call. Must be called within a Tokio runtime.
    ///
    /// # Errors
    ///
    /// When one of them is not `http://host:port`.
    pub fn connect_lazy(endpoints: &str) -> Result<Self, EndpointsError> {
        Ok(Self {
            servers: Arc::new(Servers::new(&endpoints::parse(endpoints)?)),
            timeout: Self::DEFAULT_TIMEOUT,
        })
    }

    /// The same servers with another time budget for each call, all its
    /// attempts together. At most 24 h.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self {
            timeout: timeout.min(LONGEST_TIMEOUT),
            ..self
        }
    }

    /// Takes the lock, or learns who has it. Never waits for the holder.
    ///
    /// `owner` must name one holder, never a host or a service: an owner that
    /// already holds the lock gets a new lease, and its earlier one is dead.
    /// `ttl` is 500 ms to 24 h unless the server is configured otherwise.
    ///
    /// # Errors
    ///
    /// [`RequestSpent`](Error::RequestSpent) when the lease of this
    /// `request_id` is gone, which also happens when an answer was lost and the
    /// lease expired before the call was repeated; else
    /// [`Invalid`](Error::Invalid), [`Unavailable`](Error::Unavailable),
    /// [`TimedOut`](Error::TimedOut), [`Rejected`](Error::Rejected) or
    /// [`Internal`](Error::Internal).
    pub async fn acquire(
        &self,
        resource: &str,
        owner: &str,
        ttl: Duration,
        options: AcquireOptions,
    ) -> Result<Acquisition, Error> {
        let request = v1::AcquireRequest {
            resource: resource.to_owned(),
            owner: owner.to_owned(),
            ttl: Some(proto_ttl(ttl)?),
            labels: options.labels.into_iter().collect(),
            request_id: options
                .request_id
                .unwrap_or_else(|| Uuid::new_v4().to_string()),
        };
        let answer = self
            .servers
            .call(self.timeout, request, async |mut stub, request| {
                stub.acquire(request).await
            })
            .await?;
        lock::acquisition(answer.message, answer.elapsed)
    }

    /// Makes the lease last for `ttl` from now on, or for its own time to live
    /// when that is `None`. It never gets shorter.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when the lease is over, also when nobody took the
    /// lock since; else as [`acquire`](Self::acquire).
    pub async fn renew(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
        ttl: Option<Duration>,
    ) -> Result<Lock, Error> {
        let request = v1::RenewRequest {
            resource: resource.to_owned(),
            owner: owner.to_owned(),
            fencing_token,
            ttl: ttl.map(proto_ttl).transpose()?,
        };
        let answer = self
            .servers
            .call(self.timeout, request, async |mut stub, request| {
                stub.renew(request).await
            })
            .await?;
        lock::lock(answer.message.lock, answer.elapsed)
    }

    /// Gives the lock back.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when there was nothing to give back; else as
    /// [`acquire`](Self::acquire).
    pub async fn release(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
    ) -> Result<(), Error> {
        let request = v1::ReleaseRequest {
            resource: resource.to_owned(),
            owner: owner.to_owned(),
            fencing_token,
        };
        let outcome = self
            .servers
            .call(self.timeout, request, async |mut stub, request| {
                stub.release(request).await
            })
            .await;
        match outcome {
            Ok(_) => Ok(()),
            // Gone after an attempt whose answer was lost: that one did it.
            Err(failure) if failure.maybe_done_before && is_not_found(&failure.error) => Ok(()),
            Err(failure) => Err(failure.error),
        }
    }

    /// Opens a stream that renews the lease until the stream's own time is over.
    /// It is opened once, at the first server that takes it.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire). That the lease is over is said by
    /// [`KeepAlive::next`].
    pub async fn keep_alive(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
        options: KeepAliveOptions,
    ) -> Result<KeepAlive, Error> {
        let request = v1::KeepAliveRequest {
            resource: resource.to_owned(),
            owner: owner.to_owned(),
            fencing_token,
            ttl: options.ttl.map(proto_ttl).transpose()?,
            max_duration: options.max_duration.map(proto_ttl).transpose()?,
        };
        let begun = Instant::now();
        let (messages, asked) = self
            .servers
            .open(self.timeout, request, async |mut stub, request| {
                stub.keep_alive(request).await
            })
            .await?;
        Ok(KeepAlive::new(messages, asked, begun + self.timeout))
    }

    /// Looks at the lock: its live lease, or `None` when it is free. A caller
    /// that did not acquire a lease does not hold it, whatever token it sees.
    ///
    /// # Errors
    ///
    /// [`Invalid`](Error::Invalid), [`Unavailable`](Error::Unavailable),
    /// [`TimedOut`](Error::TimedOut), [`Rejected`](Error::Rejected) or
    /// [`Internal`](Error::Internal).
    pub async fn get(&self, resource: &str) -> Result<Option<Lock>, Error> {
        let request = v1::GetRequest {
            resource: resource.to_owned(),
        };
        let outcome = self
            .servers
            .call(self.timeout, request, async |mut stub, request| {
                stub.get(request).await
            })
            .await;
        match outcome {
            Ok(answer) => lock::lock(answer.message.lock, answer.elapsed).map(Some),
            Err(failure) if is_not_found(&failure.error) => Ok(None),
            Err(failure) => Err(failure.error),
        }
    }
}

fn is_not_found(error: &Error) -> bool {
    let reason = LostReason::NotFound;
    *error == Error::Lost { reason }
}

/// # Errors
///
/// [`Invalid`](Error::Invalid) above 2^63 seconds, which no server takes.
fn proto_ttl(ttl: Duration) -> Result<prost_types::Duration, Error> {
    ttl.try_into().map_err(|_| Error::Invalid {
        violations: vec![FieldViolation {
            field: "ttl".to_owned(),
            description: "too long".to_owned(),
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers spawn these.
    fn sendable<T: Send>(_: T) {}

    #[tokio::test]
    async fn calls_can_be_spawned() -> Result<(), EndpointsError> {
        let client = Client::connect_lazy("http://127.0.0.1:1")?;
        sendable(client.acquire("r", "o", Duration::ZERO, AcquireOptions::default()));
        sendable(client.renew("r", "o", 1, None));
        sendable(client.release("r", "o", 1));
        sendable(client.get("r"));
        Ok(())
    }
}
