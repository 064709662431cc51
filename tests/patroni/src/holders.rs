//! Holders of long leases, each on a name of its own, who renew often: a failover
//! that forgets nothing takes none of them away.
//!
//! The clients of [`fencepost_model`] have leases of a second or two, which end while
//! the database is away, whoever forgets what. These outlive a failover.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use fencepost_model::{
    Answer, Recorder, failed,
    history::{Call, Op, Outcome, Via},
};
use fencepost_support::{
    Server, calls,
    server::{Client, endpoint_at},
};
use rand::Rng as _;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Longer than a failover takes.
const TTL: Duration = Duration::from_secs(90);

/// More than a server's request time-out.
const PATIENCE: Duration = Duration::from_secs(7);

/// Numbers of calls, apart from those of the model.
const FIRST_ID: u64 = 1 << 40;

/// Holders at work.
#[derive(Debug)]
pub(crate) struct Holders {
    ops: Arc<Mutex<Vec<Op>>>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Holders {
    /// Starts them, on the clock of `recorder`.
    pub(crate) fn start(servers: &[Server], count: usize, recorder: &Recorder) -> Self {
        let run: u32 = rand::random();
        let ops = Arc::default();
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let replica = number % servers.len();
            let channel = endpoint_at(servers[replica].grpc()).connect_lazy();
            let holder = Holder {
                number,
                replica,
                client: Client::new(channel),
                resource: format!("holder-{run:08x}-{number}"),
                recorder: recorder.clone(),
                ops: Arc::clone(&ops),
                made: 0,
            };
            let stop = stop.clone();
            tasks.spawn(async move { holder.run(&stop).await });
        }
        Self { ops, stop, tasks }
    }

    /// Looks at what was recorded so far.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&[Op]) -> T) -> T {
        look(&self.ops.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets them finish, and hands over what they saw.
    pub(crate) async fn stop(mut self) -> Vec<Op> {
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(error) = ended {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        self.look(<[Op]>::to_vec)
    }
}

struct Holder {
    number: usize,
    replica: usize,
    client: Client,
    resource: String,
    recorder: Recorder,
    ops: Arc<Mutex<Vec<Op>>>,
    made: u64,
}

impl Holder {
    async fn run(mut self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            self.hold(stop).await;
        }
    }

    /// Takes the lock, keeps it for some renewals, and gives it back. Unless an
    /// answer says otherwise, each call is repeated until it is answered.
    async fn hold(&mut self, stop: &CancellationToken) {
        let owner = format!("h{}-{}", self.number, self.made);
        let Some(token) = self.acquire(&owner, stop).await else {
            return;
        };
        let renewals = match self.number % 2 {
            // Many new leases, some of which a failover may forget,
            0 => rand::rng().random_range(0..8),
            // and some that are old, whatever happens.
            _ => rand::rng().random_range(100..400),
        };
        let mut renewed = 0;
        while renewed < renewals {
            let pause = Duration::from_millis(rand::rng().random_range(20..200));
            let pausing = stop.run_until_cancelled(tokio::time::sleep(pause));
            if pausing.await.is_none() {
                break;
            }
            match self.renew(&owner, token).await {
                Outcome::No(_) => return,
                Outcome::Unknown(_) => {}
                _ => renewed += 1,
            }
        }
        self.release(&owner, token).await;
    }

    async fn acquire(&mut self, owner: &str, stop: &CancellationToken) -> Option<i64> {
        let request_id = format!("{owner}-r");
        let request = calls::request_with_id(&self.resource, owner, TTL, &request_id);
        let call = Call::Acquire {
            request_id,
            ttl: TTL,
        };
        while !stop.is_cancelled() {
            let mut client = self.client.clone();
            let work = async {
                let answer = calls::send(&mut client, request.clone()).await?;
                Ok(match (answer.lock, answer.holder) {
                    (Some(lock), _) => Outcome::Lock(lock.into()),
                    (None, Some(holder)) => holder.into(),
                    (None, None) => Outcome::Unknown("neither granted nor refused".to_owned()),
                })
            };
            match self.record(owner, call.clone(), work).await {
                Outcome::Lock(shown) => return Some(shown.token),
                Outcome::No(_) => return None,
                // A former lease of its own, come back from the dead for its whole TTL.
                Outcome::Held { .. } => {
                    self.resource = format!("{}-{}", self.resource, self.made);
                    return None;
                }
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        None
    }

    async fn renew(&mut self, owner: &str, token: i64) -> Outcome {
        let (mut client, resource) = (self.client.clone(), self.resource.clone());
        let work = async {
            let lock = calls::renew(&mut client, &resource, owner, token, None).await?;
            Ok(Outcome::Lock(lock.into()))
        };
        self.record(owner, Call::Renew { token }, work).await
    }

    async fn release(&mut self, owner: &str, token: i64) {
        // It ends by itself when nobody answers.
        for _ in 0..20 {
            let (mut client, resource) = (self.client.clone(), self.resource.clone());
            let work = async {
                calls::release(&mut client, &resource, owner, token).await?;
                Ok(Outcome::Done)
            };
            let outcome = self.record(owner, Call::Release { token }, work).await;
            if !matches!(outcome, Outcome::Unknown(_)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn record(
        &mut self,
        owner: &str,
        call: Call,
        work: impl Future<Output = Result<Outcome, Status>>,
    ) -> Outcome {
        self.made += 1;
        let sent = self.recorder.now();
        let Answer { outcome, status } = match timeout(PATIENCE, work).await {
            Ok(Ok(outcome)) => outcome.into(),
            Ok(Err(status)) => failed(&status),
            Err(_) => Outcome::Unknown("no answer in time".to_owned()).into(),
        };
        let op = Op {
            id: FIRST_ID + ((self.number as u64) << 24) + self.made,
            client: 1000 + self.number,
            via: Via::Stub(self.replica),
            resource: self.resource.clone(),
            owner: owner.to_owned(),
            call,
            sent,
            answered: self.recorder.now(),
            outcome: outcome.clone(),
            status,
        };
        self.ops
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(op);
        outcome
    }
}
