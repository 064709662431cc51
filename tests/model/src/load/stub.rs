//! A client with generated stubs: one call is one request to one replica.

use std::{collections::VecDeque, time::Duration};

use fencepost_proto::v1::{
    AcquireRequest, GetRequest, KeepAliveRequest, KeepAliveResponse, Lock, ReleaseRequest,
    RenewRequest, lock_service_client::LockServiceClient,
};
use fencepost_support::calls;
use rand::Rng as _;
use tokio::time::timeout;
use tonic::{
    Request, Status, Streaming,
    transport::{Channel, Endpoint},
};

use super::{Context, Error, PATIENCE};
use crate::{
    history::{Call, Outcome, Shown, Time, Via},
    recorder::Caller,
};

type Stub = LockServiceClient<Channel>;

/// So many leases that are over are remembered, to be tried again.
const PAST: usize = 6;

#[derive(Debug)]
pub(super) struct Client {
    context: Context,
    replicas: Vec<Endpoint>,
    stubs: Vec<Stub>,
    owner: String,
    held: Option<Held>,
    past: VecDeque<Held>,
}

/// A lease that this client has, or had.
#[derive(Clone, Debug)]
struct Held {
    resource: String,
    owner: String,
    request_id: String,
    ttl: Duration,
    token: i64,
}

/// How a call ends before its time.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Not,
    /// Its future is dropped.
    Drop(Duration),
    /// By a deadline that the server is told of.
    Deadline(Duration),
}

impl Client {
    pub(super) fn new(mut context: Context, endpoints: &[String]) -> Result<Self, Error> {
        let endpoint = |url: &String| {
            let endpoint = Endpoint::from_shared(url.clone())?;
            Ok(endpoint
                .connect_timeout(Duration::from_secs(2))
                .tcp_nodelay(true))
        };
        let replicas = endpoints
            .iter()
            .map(endpoint)
            .collect::<Result<Vec<_>, Error>>()?;
        let stub = |endpoint: &Endpoint| Stub::new(endpoint.connect_lazy());
        Ok(Self {
            owner: context.fresh(),
            stubs: replicas.iter().map(stub).collect(),
            replicas,
            context,
            held: None,
            past: VecDeque::new(),
        })
    }

    pub(super) async fn run(mut self) {
        while !self.context.stop.is_cancelled() {
            self.step().await;
            self.context.rest(self.context.pause).await;
        }
    }

    async fn step(&mut self) {
        let what = self.context.rng.random_range(0..100);
        match self.held.clone() {
            None => match what {
                0..72 => self.acquire().await,
                72..84 => self.get().await,
                84..92 => self.late_call().await,
                92..96 => self.late_write().await,
                _ => self.late_duplicate().await,
            },
            Some(held) => match what {
                0..20 => {
                    self.context
                        .write(&held.resource, &held.owner, held.token)
                        .await;
                }
                20..40 => self.renew(&held).await,
                40..70 => self.release(held).await,
                70..75 => self.acquire_again(held).await,
                75..83 => self.keep_alive(held).await,
                83..88 => self.get().await,
                88..92 => self.late_call().await,
                92..94 => self.late_write().await,
                // Leaves it to run out.
                94..96 => self.let_go(),
                // Holds on, beyond its end or not.
                _ => self.context.rest(held.ttl.mul_f64(1.5)).await,
            },
        }
    }

    fn let_go(&mut self) {
        let held = self.held.take();
        self.past.extend(held);
        if self.past.len() > PAST {
            self.past.pop_front();
        }
    }

    /// A new acquisition, under a name that is often new as well.
    async fn acquire(&mut self) {
        if self.context.chance(70) {
            self.owner = self.context.fresh();
        }
        let request_id = match self.context.chance(4) {
            true => String::new(),
            false => self.context.fresh(),
        };
        let wish = Held {
            resource: self.context.resource(),
            owner: self.owner.clone(),
            request_id,
            ttl: self.context.ttl(),
            token: 0,
        };
        self.take(wish).await;
    }

    /// The same owner asks for what it has already.
    async fn acquire_again(&mut self, held: Held) {
        let request_id = self.context.fresh();
        self.let_go();
        self.take(Held { request_id, ..held }).await;
    }

    /// Asks, and mostly asks another replica when the answer was lost.
    async fn take(&mut self, wish: Held) {
        let mut replica = self.replica();
        for _ in 0..4 {
            let cut = self.cut(14);
            match self.send_acquire(replica, &wish, cut).await {
                Outcome::Lock(Shown { token, .. }) => {
                    self.held = Some(Held { token, ..wish });
                    return;
                }
                Outcome::Unknown(_) if self.context.chance(85) => {
                    replica += 1 + self
                        .context
                        .rng
                        .random_range(0..self.stubs.len().max(2) - 1);
                    self.context.rest(Duration::from_millis(10)).await;
                }
                Outcome::Unknown(_) => break,
                _ => {
                    self.context.rest(Duration::from_millis(40)).await;
                    return;
                }
            }
        }
        // Whatever became of it is nobody's.
        self.owner = self.context.fresh();
    }

    /// A request that was answered long ago comes once more.
    async fn late_duplicate(&mut self) {
        let Some(past) = self.any_past() else { return };
        let replica = self.replica();
        if let Outcome::Lock(Shown { token, .. }) =
            self.send_acquire(replica, &past, Cut::Not).await
        {
            self.held = Some(Held { token, ..past });
        }
    }

    async fn send_acquire(&mut self, replica: usize, wish: &Held, cut: Cut) -> Outcome {
        let request = AcquireRequest {
            request_id: wish.request_id.clone(),
            ..calls::request(&wish.resource, &wish.owner, wish.ttl)
        };
        let call = Call::Acquire {
            request_id: wish.request_id.clone(),
            ttl: wish.ttl,
        };
        self.call(
            replica,
            (&wish.resource, &wish.owner),
            call,
            cut,
            request,
            async |mut stub, request| {
                let answer = stub.acquire(request).await?.into_inner();
                Ok(match (answer.lock, answer.holder) {
                    (Some(lock), None) if answer.acquired => Outcome::Lock(shown(lock)),
                    (None, Some(holder)) => Outcome::Held {
                        owner: holder.owner,
                    },
                    _ => Outcome::Unknown("neither granted nor refused".to_owned()),
                })
            },
        )
        .await
    }

    async fn renew(&mut self, held: &Held) {
        let request = RenewRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
            ttl: None,
        };
        let (replica, cut) = (self.replica(), self.cut(6));
        let call = Call::Renew { token: held.token };
        let of = (&*held.resource, &*held.owner);
        let outcome = self.call(
            replica,
            of,
            call,
            cut,
            request,
            async |mut stub, request| {
                let answer = stub.renew(request).await?.into_inner();
                Ok(answer
                    .lock
                    .map_or_else(nothing, |lock| Outcome::Lock(shown(lock))))
            },
        );
        if matches!(outcome.await, Outcome::No(_)) {
            self.lost(held);
        }
    }

    fn lost(&mut self, held: &Held) {
        if self
            .held
            .as_ref()
            .is_some_and(|mine| mine.token == held.token)
        {
            self.let_go();
        }
    }

    async fn release(&mut self, held: Held) {
        for _ in 0..3 {
            let cut = self.cut(6);
            if !matches!(self.send_release(&held, cut).await, Outcome::Unknown(_)) {
                break;
            }
        }
        self.lost(&held);
        if self.context.chance(8) {
            self.late_duplicate().await;
        }
    }

    async fn send_release(&mut self, held: &Held, cut: Cut) -> Outcome {
        let request = ReleaseRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
        };
        let replica = self.replica();
        let call = Call::Release { token: held.token };
        let of = (&*held.resource, &*held.owner);
        self.call(
            replica,
            of,
            call,
            cut,
            request,
            async |mut stub, request| stub.release(request).await.map(|_| Outcome::Done),
        )
        .await
    }

    /// Renews or releases what is over.
    async fn late_call(&mut self) {
        let Some(past) = self.any_past() else { return };
        if self.context.chance(50) {
            self.renew(&past).await;
        } else {
            self.send_release(&past, Cut::Not).await;
        }
    }

    /// Writes with the token of a lease that is over.
    async fn late_write(&mut self) {
        let Some(past) = self.any_past() else { return };
        self.context
            .write(&past.resource, &past.owner, past.token)
            .await;
    }

    fn any_past(&mut self) -> Option<Held> {
        let n = self.context.rng.random_range(0..PAST);
        self.past.get(n).or(self.past.back()).cloned()
    }

    async fn get(&mut self) {
        let held = self.held.as_ref().map(|held| held.resource.clone());
        let resource = held.filter(|_| self.context.chance(50));
        let resource = resource.unwrap_or_else(|| self.context.resource());
        let request = GetRequest {
            resource: resource.clone(),
        };
        let (replica, cut) = (self.replica(), self.cut(2));
        self.call(
            replica,
            (&resource, ""),
            Call::Get,
            cut,
            request,
            async |mut stub, request| {
                let answer = stub.get(request).await?.into_inner();
                Ok(answer
                    .lock
                    .map_or_else(nothing, |lock| Outcome::Lock(shown(lock))))
            },
        )
        .await;
    }

    /// Keeps a lease by a stream for a while, and leaves it then.
    async fn keep_alive(&mut self, held: Held) {
        let replica = self.replica();
        let caller = self.caller(replica, &held.resource, &held.owner);
        let request = KeepAliveRequest {
            resource: held.resource.clone(),
            owner: held.owner.clone(),
            fencing_token: held.token,
            ttl: None,
            max_duration: None,
        };
        let longest = held.ttl.mul_f64(self.context.rng.random_range(0.1..2.5));
        let call = Call::KeepAlive { token: held.token };
        let recorder = self.context.recorder.clone();
        let mut stub = self.stubs[replica % self.stubs.len()].clone();
        let opened = recorder.now();
        let mut words = Words::default();
        let listening = async {
            let mut stream: Streaming<KeepAliveResponse> = match stub.keep_alive(request).await {
                Ok(answer) => answer.into_inner(),
                Err(status) => return failed(&status),
            };
            loop {
                match stream.message().await {
                    Ok(Some(word)) => {
                        let outcome = match word.lock {
                            Some(lock) => Outcome::Lock(words.shown(lock, opened, recorder.now())),
                            None => nothing(),
                        };
                        recorder.record(recorder.next_id(), &caller, call.clone(), opened, outcome);
                    }
                    Ok(None) => return Outcome::Unknown("the stream ended OK".to_owned()),
                    Err(status) => return failed(&status),
                }
            }
        };
        let stop = self.context.stop.clone();
        let end = tokio::select! {
            end = listening => end,
            () = tokio::time::sleep(longest) => Outcome::Unknown("left".to_owned()),
            () = stop.cancelled() => Outcome::Unknown("left".to_owned()),
        };
        recorder.record(recorder.next_id(), &caller, call, opened, end.clone());
        if matches!(end, Outcome::No(_)) {
            self.lost(&held);
        }
    }

    fn replica(&mut self) -> usize {
        self.context.rng.random_range(0..self.stubs.len())
    }

    fn cut(&mut self, percent: u32) -> Cut {
        let after = Duration::from_micros(self.context.rng.random_range(0..20_000));
        match self.context.rng.random_range(0..100) {
            n if n >= percent => Cut::Not,
            n if n % 3 == 0 => Cut::Deadline(after + Duration::from_millis(1)),
            _ => Cut::Drop(after),
        }
    }

    fn caller(&self, replica: usize, resource: &str, owner: &str) -> Caller {
        Caller {
            client: self.context.number,
            via: Via::Stub(replica % self.stubs.len()),
            resource: resource.to_owned(),
            owner: owner.to_owned(),
        }
    }

    /// Calls a replica, and records it.
    async fn call<T>(
        &mut self,
        replica: usize,
        (resource, owner): (&str, &str),
        call: Call,
        cut: Cut,
        message: T,
        work: impl AsyncFnOnce(Stub, Request<T>) -> Result<Outcome, Status>,
    ) -> Outcome {
        let caller = self.caller(replica, resource, owner);
        let replica = replica % self.stubs.len();
        let mut request = Request::new(message);
        let patience = match cut {
            Cut::Not => PATIENCE,
            Cut::Drop(after) => after,
            Cut::Deadline(after) => {
                request.set_timeout(after);
                PATIENCE
            }
        };
        let stub = self.stubs[replica].clone();
        let work = async {
            match timeout(patience, work(stub, request)).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(status)) => failed(&status),
                Err(_) => Outcome::Unknown("dropped".to_owned()),
            }
        };
        let recorder = self.context.recorder.clone();
        let sent = recorder.now();
        let outcome = recorder.call(&caller, call, work).await;
        if matches!(outcome, Outcome::Unknown(_)) && recorder.now().since(sent) >= PATIENCE {
            // A channel may never come back by itself.
            self.stubs[replica] = Stub::new(self.replicas[replica].connect_lazy());
        }
        outcome
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
    fn shown(&mut self, lock: Lock, opened: Time, arrived: Time) -> Shown {
        let mut shown = shown(lock);
        let first = self.first.get_or_insert_with(|| shown.clone());
        let later = u64::try_from(shown.expires_at - first.expires_at).unwrap_or(0);
        let from_first = first.remaining + Duration::from_micros(later);
        shown.remaining = from_first.min(arrived.since(opened) + shown.remaining);
        shown
    }
}

fn nothing() -> Outcome {
    Outcome::Unknown("no lock in the answer".to_owned())
}

/// Anything that the contract does not call final may have happened.
fn failed(status: &Status) -> Outcome {
    let last = [
        "LOCK_NOT_FOUND",
        "LOCK_EXPIRED",
        "NOT_OWNER",
        "TOKEN_SUPERSEDED",
        "TOKEN_UNKNOWN",
        "REQUEST_SPENT",
        "INVALID_REQUEST",
    ];
    match calls::reason(status) {
        Some(reason) if last.contains(&reason.as_str()) => Outcome::No(reason),
        reason => Outcome::Unknown(format!(
            "{:?} {}",
            status.code(),
            reason.unwrap_or_default()
        )),
    }
}

fn shown(lock: Lock) -> Shown {
    let micros = |time| {
        let since = calls::time(time).duration_since(std::time::UNIX_EPOCH);
        i64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(i64::MAX)
    };
    Shown {
        token: lock.fencing_token,
        owner: lock.owner,
        remaining: calls::span(lock.remaining),
        ttl: calls::span(lock.ttl),
        acquired_at: micros(lock.acquired_at),
        expires_at: micros(lock.expires_at),
    }
}
