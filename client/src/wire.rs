//! The contract's calls, as the client's thread makes them.

use std::{sync::Arc, time::Duration};

use fencepost_proto::v1;
use tokio::time::Instant;
use tonic::metadata::AsciiMetadataValue;

use crate::{
    Acquisition, Error, FieldViolation, KeepAliveOptions, Lock, LostReason,
    call::{Budget, Failure, Servers},
    keep_alive::Stream,
    lease::Confirmation,
    lock,
    observe::Told,
};

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Wire {
    pub(crate) servers: Arc<Servers>,
    /// For a call, all its attempts together.
    pub(crate) timeout: Duration,
    /// The trace that the calls belong to.
    pub(crate) traceparent: Option<AsciiMetadataValue>,
    /// Who is told what becomes of the leases.
    pub(crate) told: Told,
}

/// Which lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) resource: String,
    pub(crate) owner: String,
    pub(crate) token: i64,
}

impl Wire {
    /// The same servers with another time budget.
    pub(crate) fn within(&self, timeout: Duration) -> Self {
        Self {
            timeout,
            ..self.clone()
        }
    }

    fn budget(&self) -> Budget<'_> {
        Budget {
            time: self.timeout,
            traceparent: self.traceparent.as_ref(),
        }
    }

    pub(crate) async fn acquire(
        &self,
        request: v1::AcquireRequest,
    ) -> Result<(Acquisition, Option<Confirmation>), Error> {
        let answer = self
            .servers
            .call(self.budget(), request, async |mut stub, request| {
                stub.acquire(request).await
            })
            .await?;
        lock::acquisition(answer.message, answer.sent)
    }

    pub(crate) async fn renew(
        &self,
        key: &Key,
        ttl: Option<Duration>,
    ) -> Result<(Lock, Confirmation), Error> {
        let request = v1::RenewRequest {
            resource: key.resource.clone(),
            owner: key.owner.clone(),
            fencing_token: key.token,
            ttl: ttl.map(proto_ttl).transpose()?,
        };
        let answer = self
            .servers
            .call(self.budget(), request, async |mut stub, request| {
                stub.renew(request).await
            })
            .await?;
        lock::lock(answer.message.lock, answer.sent)
    }

    pub(crate) async fn release(&self, key: &Key) -> Result<(), Error> {
        let request = v1::ReleaseRequest {
            resource: key.resource.clone(),
            owner: key.owner.clone(),
            fencing_token: key.token,
        };
        let outcome = self
            .servers
            .call(self.budget(), request, async |mut stub, request| {
                stub.release(request).await
            })
            .await;
        match outcome {
            Ok(_) => Ok(()),
            // Gone after an attempt whose answer was lost: that one did it.
            Err(failure) if failure.maybe_done_before && is_not_found(&failure) => Ok(()),
            Err(failure) => Err(failure.error),
        }
    }

    pub(crate) async fn keep_alive(
        &self,
        key: &Key,
        options: KeepAliveOptions,
    ) -> Result<Stream, Error> {
        let request = v1::KeepAliveRequest {
            resource: key.resource.clone(),
            owner: key.owner.clone(),
            fencing_token: key.token,
            ttl: options.ttl.map(proto_ttl).transpose()?,
            max_duration: options.max_duration.map(proto_ttl).transpose()?,
        };
        let begun = Instant::now();
        let opened = self
            .servers
            .open(self.budget(), request, async |mut stub, request| {
                stub.keep_alive(request).await
            })
            .await?;
        let servers = Arc::clone(&self.servers);
        Ok(Stream::new(servers, opened, begun + self.timeout))
    }

    pub(crate) async fn get(&self, resource: String) -> Result<Option<Lock>, Error> {
        let request = v1::GetRequest { resource };
        let outcome = self
            .servers
            .call(self.budget(), request, async |mut stub, request| {
                stub.get(request).await
            })
            .await;
        match outcome {
            Ok(answer) => {
                let (lock, _) = lock::lock(answer.message.lock, answer.sent)?;
                Ok(Some(lock))
            }
            Err(failure) if is_not_found(&failure) => Ok(None),
            Err(failure) => Err(failure.error),
        }
    }
}

fn is_not_found(failure: &Failure) -> bool {
    let reason = LostReason::NotFound;
    failure.error == Error::Lost { reason }
}

/// # Errors
///
/// [`Invalid`](Error::Invalid) above 2^63 seconds, which no server takes.
pub(crate) fn proto_ttl(ttl: Duration) -> Result<prost_types::Duration, Error> {
    ttl.try_into().map_err(|_| invalid("ttl", "too long"))
}

pub(crate) fn invalid(field: &str, description: &str) -> Error {
    Error::Invalid {
        violations: vec![FieldViolation {
            field: field.to_owned(),
            description: description.to_owned(),
        }],
    }
}
