//! One replica, as a client with generated stubs sees it.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use fencepost_proto::v1::{
    AcquireRequest, GetRequest, Holder, KeepAliveRequest, KeepAliveResponse, Lock, ReleaseRequest,
    RenewRequest, lock_service_client::LockServiceClient,
};
use fencepost_support::calls;
use tokio::time::timeout;
use tonic::{
    Code, Request, Status, Streaming,
    transport::{Channel, Endpoint},
};

use super::{Error, PATIENCE};
use crate::{
    history::{self, Call, Outcome, Shown, Time, Via},
    recorder::{Answer, Caller, Recorder},
};

type Stub = LockServiceClient<Channel>;

/// A lease that a client has, or had, or wants.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) resource: String,
    pub(super) owner: String,
    pub(super) request_id: String,
    pub(super) ttl: Duration,
    pub(super) token: i64,
}

/// How a call ends before its time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    Not,
    /// Its future is dropped.
    Drop(Duration),
    /// By a deadline that the server is told of.
    Deadline(Duration),
}

/// A connection to a replica. Each call is recorded.
#[derive(Debug)]
pub(super) struct Line {
    client: usize,
    replica: usize,
    recorder: Recorder,
    endpoint: Endpoint,
    stub: Mutex<Stub>,
}

impl Line {
    pub(super) fn new(
        client: usize,
        replica: usize,
        url: &str,
        recorder: &Recorder,
    ) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(Duration::from_secs(2))
            .tcp_nodelay(true);
        Ok(Self {
            client,
            replica,
            recorder: recorder.clone(),
            stub: Mutex::new(Stub::new(endpoint.connect_lazy())),
            endpoint,
        })
    }

    pub(super) async fn acquire(&self, wish: &Held, cut: Cut) -> Outcome {
        let request = AcquireRequest {
            request_id: wish.request_id.clone(),
            ..calls::request(&wish.resource, &wish.owner, wish.ttl)
        };
        let call = Call::Acquire {
            request_id: wish.request_id.clone(),
            ttl: wish.ttl,
        };
        self.call(
            &wish.resource,
            &wish.owner,
            call,
            cut,
            request,
            async |mut stub, request| {
                let answer = stub.acquire(request).await?.into_inner();
                Ok(match (answer.lock, answer.holder) {
                    (lock @ Some(_), None) if answer.acquired => lock_of(&wish.resource, lock),
                    (None, Some(holder)) if !answer.acquired => Outcome::from(holder).into(),
                    _ => no_answer("neither granted nor refused"),
                })
            },
        )
        .await
    }

    pub(super) async fn renew(&self, held: &Held, cut: Cut) -> Outcome {
        let request = RenewRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
            ttl: None,
        };
        let call = Call::Renew { token: held.token };
        self.call(
            &held.resource,
            &held.owner,
            call,
            cut,
            request,
            async |mut stub, request| {
                let lock = stub.renew(request).await?.into_inner().lock;
                Ok(lock_of(&held.resource, lock))
            },
        )
        .await
    }

    pub(super) async fn release(&self, held: &Held, cut: Cut) -> Outcome {
        let request = ReleaseRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
        };
        let call = Call::Release { token: held.token };
        self.call(
            &held.resource,
            &held.owner,
            call,
            cut,
            request,
            async |mut stub, request| stub.release(request).await.map(|_| Outcome::Done.into()),
        )
        .await
    }

    pub(super) async fn get(&self, resource: &str, cut: Cut) -> Outcome {
        let request = GetRequest {
            resource: resource.to_owned(),
        };
        self.call(
            resource,
            "",
            Call::Get,
            cut,
            request,
            async |mut stub, request| {
                let lock = stub.get(request).await?.into_inner().lock;
                Ok(lock_of(resource, lock))
            },
        )
        .await
    }

    /// Keeps a lease by a stream until it ends or `left` does; returns its end.
    pub(super) async fn keep_alive(&self, held: &Held, left: impl Future<Output = ()>) -> Outcome {
        let caller = self.caller(&held.resource, &held.owner);
        let request = KeepAliveRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
            ttl: None,
            max_duration: None,
        };
        let call = Call::KeepAlive { token: held.token };
        let mut stub = self.stub();
        let opened = self.recorder.now();
        let mut words = Words::default();
        let record = |answer: Answer| {
            let id = self.recorder.next_id();
            self.recorder
                .record(id, &caller, call.clone(), opened, answer);
        };
        let listening = async {
            let mut stream: Streaming<KeepAliveResponse> = match stub.keep_alive(request).await {
                Ok(answer) => answer.into_inner(),
                Err(status) => return failed(&status),
            };
            loop {
                match stream.message().await {
                    Ok(Some(word)) => {
                        let mut answer = lock_of(&held.resource, word.lock);
                        if let Outcome::Lock(shown) = &mut answer.outcome {
                            words.count(shown, opened, self.recorder.now());
                        }
                        record(answer);
                    }
                    Ok(None) => return no_answer("the stream ended OK"),
                    Err(status) => return failed(&status),
                }
            }
        };
        let end = tokio::select! {
            end = listening => end,
            () = left => Outcome::Unknown("left".to_owned()).into(),
        };
        record(end.clone());
        end.outcome
    }

    fn stub(&self) -> Stub {
        self.stub
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn caller(&self, resource: &str, owner: &str) -> Caller {
        Caller {
            client: self.client,
            via: Via::Stub(self.replica),
            resource: resource.to_owned(),
            owner: owner.to_owned(),
        }
    }

    async fn call<T>(
        &self,
        resource: &str,
        owner: &str,
        call: Call,
        cut: Cut,
        message: T,
        work: impl AsyncFnOnce(Stub, Request<T>) -> Result<Answer, Status>,
    ) -> Outcome {
        let mut request = Request::new(message);
        let patience = match cut {
            Cut::Not => PATIENCE,
            Cut::Drop(after) => after,
            Cut::Deadline(after) => {
                request.set_timeout(after);
                PATIENCE
            }
        };
        let work = async {
            match timeout(patience, work(self.stub(), request)).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(status)) => failed(&status),
                Err(_) if patience == PATIENCE => {
                    // A channel may never come back by itself.
                    let mut stub = self.stub.lock().unwrap_or_else(PoisonError::into_inner);
                    *stub = Stub::new(self.endpoint.connect_lazy());
                    Outcome::Unknown("no answer in time".to_owned()).into()
                }
                Err(_) => Outcome::Unknown("dropped".to_owned()).into(),
            }
        };
        self.recorder
            .call(&self.caller(resource, owner), call, work)
            .await
    }
}

/// The words of a stream, each as if it answered the opening.
///
/// A word may have been under way for any time. So a later one counts from the
/// first, by how much later it ends on the database's clock; or from its own
/// arrival, whichever is less.
#[derive(Debug, Default)]
struct Words {
    first: Option<Shown>,
}

impl Words {
    fn count(&mut self, shown: &mut Shown, opened: Time, arrived: Time) {
        let first = self.first.get_or_insert_with(|| shown.clone());
        let later = u64::try_from(shown.expires_at - first.expires_at).unwrap_or(0);
        let from_first = first.remaining + Duration::from_micros(later);
        shown.remaining = from_first.min(arrived.since(opened) + shown.remaining);
    }
}

/// The lease in an answer, which must be one of this resource.
fn lock_of(resource: &str, lock: Option<Lock>) -> Answer {
    match lock {
        None => no_answer("no lock in the answer"),
        Some(lock) if lock.resource != resource => no_answer("the lock of another resource"),
        Some(lock) => Outcome::Lock(lock.into()).into(),
    }
}

/// OK, with nothing in it that says what came of the call.
fn no_answer(why: &str) -> Answer {
    Answer {
        outcome: Outcome::Unknown(why.to_owned()),
        status: Some(history::Status {
            code: format!("{:?}", Code::Ok),
            reason: None,
        }),
    }
}

/// What a refused or failed call came to: anything that the contract does not call
/// final may have happened.
#[must_use]
pub fn failed(status: &Status) -> Answer {
    let last = [
        "LOCK_NOT_FOUND",
        "LOCK_EXPIRED",
        "NOT_OWNER",
        "TOKEN_SUPERSEDED",
        "TOKEN_UNKNOWN",
        "REQUEST_SPENT",
        "INVALID_REQUEST",
    ];
    let (code, reason) = (format!("{:?}", status.code()), calls::reason(status));
    let outcome = match &reason {
        Some(reason) if last.contains(&reason.as_str()) => Outcome::No(reason.clone()),
        _ => Outcome::Unknown(format!("{code} {}", status.message())),
    };
    Answer {
        outcome,
        status: Some(history::Status { code, reason }),
    }
}

impl From<Holder> for Outcome {
    fn from(holder: Holder) -> Self {
        Self::Held {
            owner: holder.owner,
            acquired_at: micros(calls::time(holder.acquired_at)),
            remaining: calls::span(holder.remaining),
        }
    }
}

/// Since 1970.
pub(super) fn micros(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(i64::MAX)
}

impl From<Lock> for Shown {
    fn from(lock: Lock) -> Self {
        Self {
            token: lock.fencing_token,
            owner: lock.owner,
            remaining: calls::span(lock.remaining),
            ttl: calls::span(lock.ttl),
            acquired_at: micros(calls::time(lock.acquired_at)),
            expires_at: micros(calls::time(lock.expires_at)),
        }
    }
}
