//! The lock service's handlers: check, call the store, answer.
//!
//! A handler may be dropped at every await. What the store does is detached
//! from it, and a grant that its handler did not hand over is given back.

use fencepost_proto::v1::{self, lock_service_server::LockService};
use tokio::time::Instant;
use tokio_stream::Pending;
use tonic::{Request, Response, Status};

use super::{convert, edge::Deadline, status};
use crate::{lock::TtlLimits, store::Store};

pub(super) struct Locks {
    store: Store,
    ttl: TtlLimits,
}

impl Locks {
    pub(super) fn new(store: Store, ttl: TtlLimits) -> Self {
        Self { store, ttl }
    }
}

/// When the call is over. The edge set it; without one, no time is left.
fn deadline<T>(request: &Request<T>) -> Instant {
    request
        .extensions()
        .get::<Deadline>()
        .map_or_else(Instant::now, |deadline| deadline.0)
}

#[tonic::async_trait]
impl LockService for Locks {
    async fn acquire(
        &self,
        request: Request<v1::AcquireRequest>,
    ) -> Result<Response<v1::AcquireResponse>, Status> {
        let deadline = deadline(&request);
        let ask = convert::acquire(request.into_inner(), self.ttl)?;
        let resource = ask.resource.clone();
        match self.store.acquire(ask, deadline).await {
            Ok(acquired) => Ok(Response::new(convert::acquired(acquired))),
            Err(error) => Err(status::acquire(error, &resource)),
        }
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseResponse>, Status> {
        let deadline = deadline(&request);
        let ask = convert::release(request.into_inner())?;
        let resource = ask.resource.clone();
        match self.store.release(ask, deadline).await {
            Ok(()) => Ok(Response::new(v1::ReleaseResponse {})),
            Err(error) => Err(status::release(error, &resource)),
        }
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        let deadline = deadline(&request);
        let ask = convert::renew(request.into_inner(), self.ttl)?;
        let resource = ask.resource.clone();
        match self.store.renew(ask, deadline).await {
            Ok(renewed) => {
                tracing::debug!(slack_ms = renewed.slack.as_millis(), "renewed");
                let lock = Some(convert::lock(renewed.lease));
                Ok(Response::new(v1::RenewResponse { lock }))
            }
            Err(error) => Err(status::renew(error, &resource)),
        }
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let deadline = deadline(&request);
        let resource = convert::get(request.into_inner())?;
        match self.store.get(resource.clone(), deadline).await {
            Ok(lease) => {
                let lock = Some(convert::lock(lease));
                Ok(Response::new(v1::GetResponse { lock }))
            }
            Err(error) => Err(status::get(error, &resource)),
        }
    }

    type KeepAliveStream = Pending<Result<v1::KeepAliveResponse, Status>>;

    async fn keep_alive(
        &self,
        _request: Request<v1::KeepAliveRequest>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        Err(status::unimplemented())
    }
}
