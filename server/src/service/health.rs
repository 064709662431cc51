//! grpc.health.v1, for probes and for clients that check health.
//!
//! `""` and the lock service are readiness: NOT_SERVING before the first good
//! check of the store, while it cannot serve, and from the first moment of a
//! drain. `liveness` is SERVING as long as the process lives, so that an outage
//! of the database restarts nothing. A Watch of an unknown name is told
//! SERVICE_UNKNOWN and kept open, as the protocol has it. Streams end when the
//! [`HealthReporter`] does.
//!
//! tonic-health's own service starts out SERVING and refuses to watch unknown
//! names; its generated protocol is used here.

use fencepost_proto::v1::LOCK_SERVICE;
use tokio::sync::watch;
use tokio_stream::{StreamExt as _, adapters::Map, wrappers::WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus,
    health_server::{Health, HealthServer},
};

use super::status;
use crate::store;

/// What the health service answers from.
#[derive(Clone)]
pub(crate) struct HealthService {
    readiness: watch::Receiver<ServingStatus>,
    liveness: watch::Receiver<ServingStatus>,
    unknown: watch::Receiver<ServingStatus>,
}

/// What changes the answers.
pub(crate) struct HealthReporter {
    readiness: watch::Sender<ServingStatus>,
    _liveness: watch::Sender<ServingStatus>,
    _unknown: watch::Sender<ServingStatus>,
}

pub(crate) fn channel() -> (HealthReporter, HealthService) {
    let (readiness, readiness_seen) = watch::channel(ServingStatus::NotServing);
    let (liveness, liveness_seen) = watch::channel(ServingStatus::Serving);
    let (unknown, unknown_seen) = watch::channel(ServingStatus::ServiceUnknown);
    (
        HealthReporter {
            readiness,
            _liveness: liveness,
            _unknown: unknown,
        },
        HealthService {
            readiness: readiness_seen,
            liveness: liveness_seen,
            unknown: unknown_seen,
        },
    )
}

impl HealthReporter {
    /// Follows the store until the drain begins, then says NOT_SERVING; ends,
    /// and with it every Watch, when the server closes.
    pub(crate) async fn run(
        self,
        mut store: watch::Receiver<store::Health>,
        draining: CancellationToken,
        closing: CancellationToken,
    ) {
        let follow = async {
            loop {
                let ready = match *store.borrow_and_update() {
                    store::Health::Serving => ServingStatus::Serving,
                    store::Health::Starting | store::Health::Unfit(_) => ServingStatus::NotServing,
                };
                self.readiness
                    .send_if_modified(|now| std::mem::replace(now, ready) != ready);
                if store.changed().await.is_err() {
                    break;
                }
            }
        };
        draining.run_until_cancelled(follow).await;
        self.readiness.send_replace(ServingStatus::NotServing);
        closing.cancelled().await;
    }
}

impl HealthService {
    pub(super) fn into_server(self) -> HealthServer<Self> {
        HealthServer::new(self)
    }

    /// Whether new calls should come here.
    pub(crate) fn is_ready(&self) -> bool {
        *self.readiness.borrow() == ServingStatus::Serving
    }

    fn named(&self, service: &str) -> Option<&watch::Receiver<ServingStatus>> {
        match service {
            "" => Some(&self.readiness),
            "liveness" => Some(&self.liveness),
            name if name == LOCK_SERVICE => Some(&self.readiness),
            _ => None,
        }
    }
}

type Answer = Result<HealthCheckResponse, Status>;

fn answer(status: ServingStatus) -> Answer {
    Ok(HealthCheckResponse {
        status: status.into(),
    })
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let status = self
            .named(&request.get_ref().service)
            .ok_or_else(status::unknown_service)?;
        let status = *status.borrow();
        answer(status).map(Response::new)
    }

    type WatchStream = Map<WatchStream<ServingStatus>, fn(ServingStatus) -> Answer>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let status = self
            .named(&request.get_ref().service)
            .unwrap_or(&self.unknown);
        let changes = WatchStream::new(status.clone());
        Ok(Response::new(
            changes.map(answer as fn(ServingStatus) -> Answer),
        ))
    }
}
