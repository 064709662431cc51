//! The lock service's handlers: check, call the store, answer.
//!
//! A handler may be dropped at every await. What the store does is detached
//! from it, and a grant that its handler did not hand over is given back.

use fencepost_proto::v1::{self, lock_service_server::LockService};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{convert, edge::Deadline, keep_alive_stream::KeepAliveStream, status};
use crate::{
    caller::Caller,
    keep_alive::KeepAlive,
    lock::{AcquireError, ReleaseError, RenewError, Resource, TtlLimits},
    metrics::{AcquireMetrics, Counter, Metrics, RenewalMetrics},
    store::{Acquired, Renewed, Store},
    trace::Trace,
};

pub(crate) struct Locks {
    store: Store,
    keep_alive: KeepAlive,
    ttl: TtlLimits,
    acquires: AcquireMetrics,
    renewals: RenewalMetrics,
    /// Releases of these.
    forgotten: Counter,
}

impl Locks {
    pub(crate) fn new(
        store: Store,
        keep_alive: KeepAlive,
        ttl: TtlLimits,
        metrics: &Metrics,
    ) -> Self {
        Self {
            store,
            keep_alive,
            ttl,
            acquires: metrics.acquires.clone(),
            renewals: metrics.renewals.clone(),
            forgotten: metrics.forgotten.clone(),
        }
    }

    fn observe_acquire(
        &self,
        resource: &Resource,
        answer: &Result<Acquired, AcquireError>,
        trace: &Trace,
    ) {
        let (counter, outcome) = match answer {
            Ok(Acquired::Granted(grant)) if grant.is_replay() => {
                (&self.acquires.replayed, "replayed")
            }
            Ok(Acquired::Granted(grant)) if grant.took_over() => {
                (&self.acquires.taken_over, "taken_over")
            }
            Ok(Acquired::Granted(_)) => (&self.acquires.granted, "granted"),
            Ok(Acquired::Held(_)) => (&self.acquires.held, "held"),
            Err(AcquireError::RequestSpent) => (&self.acquires.spent, "spent"),
            Err(AcquireError::Outage(_)) => return,
        };
        counter.inc();
        trace.note(OUTCOME, outcome);
        match answer {
            Ok(Acquired::Granted(grant)) => {
                trace.note(TOKEN, grant.token().get());
                if !grant.is_replay() {
                    self.acquires.prefixes.granted(resource.as_str());
                }
            }
            Ok(Acquired::Held(_)) => self.acquires.prefixes.refused(resource.as_str()),
            Err(_) => {}
        }
    }

    fn count_renewal(&self, answer: &Result<Renewed, RenewError>) {
        match answer {
            Ok(renewed) => self.renewals.landed(renewed.slack),
            Err(RenewError::Lost(loss)) => self.renewals.lost(*loss),
            Err(RenewError::Outage(_)) => {}
        }
    }
}

/// What a span tells of a call, besides its resource.
const OUTCOME: &str = "fencepost.outcome";
const TOKEN: &str = "fencepost.token";

/// The trace of the call that is carried out here, which is about this resource.
fn traced(resource: &Resource) -> Trace {
    let trace = Trace::current();
    trace.resource(resource.as_str());
    trace
}

/// When the call is over. The edge set it; without one, no time is left.
fn deadline<T>(request: &Request<T>) -> Instant {
    request
        .extensions()
        .get::<Deadline>()
        .map_or_else(Instant::now, |deadline| deadline.call)
}

#[tonic::async_trait]
impl LockService for Locks {
    async fn acquire(
        &self,
        request: Request<v1::AcquireRequest>,
    ) -> Result<Response<v1::AcquireResponse>, Status> {
        let (deadline, caller) = (deadline(&request), Caller::of(request.extensions()));
        let peer = caller.peer();
        let ask = convert::acquire(request.into_inner(), self.ttl, caller)?;
        let resource = ask.resource.clone();
        let trace = traced(&resource);
        let answer = self.store.acquire(ask, peer, deadline).await;
        self.observe_acquire(&resource, &answer, &trace);
        match answer {
            Ok(acquired) => Ok(Response::new(convert::acquired(acquired))),
            Err(error) => Err(status::acquire(error, &resource)),
        }
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseResponse>, Status> {
        let (deadline, caller) = (deadline(&request), Caller::of(request.extensions()));
        let peer = caller.peer();
        let ask = convert::release(request.into_inner(), caller)?;
        let resource = ask.resource.clone();
        let trace = traced(&resource);
        trace.note(TOKEN, ask.token.get());
        match self.store.release(ask, peer, deadline).await {
            Ok(()) => {
                trace.note(OUTCOME, "released");
                Ok(Response::new(v1::ReleaseResponse {}))
            }
            Err(error) => {
                if matches!(error, ReleaseError::TokenUnknown) {
                    self.forgotten.inc();
                }
                Err(status::release(error, &resource))
            }
        }
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        let (peer, deadline) = (Caller::of(request.extensions()).peer(), deadline(&request));
        let ask = convert::renew(request.into_inner(), self.ttl)?;
        let resource = ask.resource.clone();
        let trace = traced(&resource);
        trace.note(TOKEN, ask.token.get());
        let answer = self.store.renew(ask, peer, deadline).await;
        self.count_renewal(&answer);
        match answer {
            Ok(renewed) => {
                tracing::debug!(slack_ms = renewed.slack.as_millis(), "renewed");
                trace.note(OUTCOME, "renewed");
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
        let (peer, deadline) = (Caller::of(request.extensions()).peer(), deadline(&request));
        let resource = convert::get(request.into_inner())?;
        let trace = traced(&resource);
        match self.store.get(resource.clone(), peer, deadline).await {
            Ok(lease) => {
                trace.note(OUTCOME, "held");
                let lock = Some(convert::lock(lease));
                Ok(Response::new(v1::GetResponse { lock }))
            }
            Err(error) => Err(status::get(error, &resource)),
        }
    }

    type KeepAliveStream = KeepAliveStream;

    async fn keep_alive(
        &self,
        request: Request<v1::KeepAliveRequest>,
    ) -> Result<Response<KeepAliveStream>, Status> {
        let peer = Caller::of(request.extensions()).peer();
        let caller = request
            .extensions()
            .get::<Deadline>()
            .and_then(|deadline| deadline.caller);
        let keep = convert::keep_alive(request.into_inner(), self.ttl, caller)?;
        let resource = keep.renew.resource.clone();
        traced(&resource).note(TOKEN, keep.renew.token.get());
        match self.keep_alive.open(keep, peer).await {
            Ok(listener) => Ok(Response::new(KeepAliveStream::new(resource, listener))),
            Err(outage) => Err(status::keep_alive(outage, &resource)),
        }
    }
}
