//! A lock service without locks: the resource's name says what the answer is.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use fencepost_proto::v1::{
    self,
    lock_service_server::{LockService, LockServiceServer},
};
use tokio::net::TcpListener;
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tonic::{Code, Request, Response, Status, transport::Server};
use tonic_types::{ErrorDetails, StatusExt as _};

/// The token of every lease here: the largest there is.
pub(crate) const TOKEN: i64 = (1 << 53) - 1;

/// What arrived, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Call {
    Acquire(v1::AcquireRequest),
    Renew(v1::RenewRequest),
    Release(v1::ReleaseRequest),
    Get(v1::GetRequest),
}

/// A server on a port of its own. Ends with the runtime of its test.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stub {
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Stub {
    pub(crate) async fn start() -> (Self, SocketAddr) {
        let stub = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder()
            .add_service(LockServiceServer::new(stub.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        (stub, address)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// Notes the call, and fails it when its name says so.
    async fn receive(&self, resource: &str, call: Call) -> Result<(), Status> {
        let seen = {
            let mut calls = self.calls.lock().unwrap();
            calls.push(call);
            calls.len()
        };
        match resource {
            "not-found" => Err(ours(Code::NotFound, "LOCK_NOT_FOUND")),
            "expired" => Err(ours(Code::Aborted, "LOCK_EXPIRED")),
            "not-owner" => Err(ours(Code::PermissionDenied, "NOT_OWNER")),
            "superseded" => Err(ours(Code::Aborted, "TOKEN_SUPERSEDED")),
            "unknown" => Err(ours(Code::Aborted, "TOKEN_UNKNOWN")),
            "spent" => Err(ours(Code::Aborted, "REQUEST_SPENT")),
            "bug" => Err(ours(Code::Internal, "INTERNAL")),
            "down" => Err(ours(Code::Unavailable, "STORE_UNAVAILABLE")),
            "overloaded" => Err(ours(Code::ResourceExhausted, "OVERLOADED")),
            "draining-once" if seen == 1 => Err(ours(Code::Unavailable, "DRAINING")),
            "gone-after-retry" if seen == 1 => Err(ours(Code::DeadlineExceeded, "DEADLINE")),
            "gone-after-retry" => Err(ours(Code::NotFound, "LOCK_NOT_FOUND")),
            "proxy" => Err(Status::permission_denied("403")),
            "no-such-service" => Err(Status::unimplemented("")),
            "hangs" => std::future::pending().await,
            "invalid" => {
                let mut details = info("INVALID_REQUEST");
                details.add_bad_request_violation("ttl", "out of range");
                let code = Code::InvalidArgument;
                Err(Status::with_error_details(code, "constant", details))
            }
            _ => Ok(()),
        }
    }
}

fn info(reason: &str) -> ErrorDetails {
    ErrorDetails::with_error_info(reason, "fencepost", [])
}

fn ours(code: Code, reason: &str) -> Status {
    let mut details = info(reason);
    if matches!(code, Code::Unavailable | Code::ResourceExhausted) {
        details.set_retry_info(Some(Duration::from_millis(10)));
    }
    Status::with_error_details(code, "constant", details)
}

fn lock(resource: String, owner: String, ttl: Option<prost_types::Duration>) -> v1::Lock {
    v1::Lock {
        resource,
        owner,
        fencing_token: TOKEN,
        acquired_at: Some(prost_types::Timestamp {
            seconds: 1_795_962_984,
            nanos: 123_456_000,
        }),
        expires_at: Some(prost_types::Timestamp {
            seconds: 1_795_963_014,
            nanos: 123_456_000,
        }),
        remaining: ttl,
        ttl,
        labels: [("host".into(), "web1\n\u{1b}[31m".into())].into(),
    }
}

#[tonic::async_trait]
impl LockService for Stub {
    async fn acquire(
        &self,
        request: Request<v1::AcquireRequest>,
    ) -> Result<Response<v1::AcquireResponse>, Status> {
        let request = request.into_inner();
        self.receive(&request.resource, Call::Acquire(request.clone()))
            .await?;
        let lock = lock(request.resource, request.owner, request.ttl);
        let answer = match lock.resource.as_str() {
            "held" => v1::AcquireResponse {
                acquired: false,
                lock: None,
                holder: Some(v1::Holder {
                    owner: "worker-b".into(),
                    acquired_at: lock.acquired_at,
                    remaining: lock.remaining,
                    labels: lock.labels,
                }),
            },
            "nonsense" => v1::AcquireResponse {
                acquired: true,
                ..Default::default()
            },
            _ => v1::AcquireResponse {
                acquired: true,
                lock: Some(lock),
                holder: None,
            },
        };
        Ok(Response::new(answer))
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseResponse>, Status> {
        let request = request.into_inner();
        self.receive(&request.resource, Call::Release(request.clone()))
            .await?;
        Ok(Response::new(v1::ReleaseResponse {}))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        let request = request.into_inner();
        self.receive(&request.resource, Call::Renew(request.clone()))
            .await?;
        let ttl = request.ttl.or(Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }));
        Ok(Response::new(v1::RenewResponse {
            lock: Some(lock(request.resource, request.owner, ttl)),
        }))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let request = request.into_inner();
        self.receive(&request.resource, Call::Get(request.clone()))
            .await?;
        let ttl = Some(prost_types::Duration {
            seconds: 30,
            nanos: 0,
        });
        Ok(Response::new(v1::GetResponse {
            lock: Some(lock(request.resource, "worker-b".into(), ttl)),
        }))
    }

    type KeepAliveStream =
        Pin<Box<dyn Stream<Item = Result<v1::KeepAliveResponse, Status>> + Send>>;

    async fn keep_alive(
        &self,
        request: Request<v1::KeepAliveRequest>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        if request.get_ref().resource == "down" {
            return Err(ours(Code::Unavailable, "STORE_UNAVAILABLE"));
        }
        Err(Status::unimplemented("not here"))
    }
}
