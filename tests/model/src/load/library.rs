//! A client with the client library: guards that renew by themselves, and single
//! calls. One call may be several requests, to any replica.

use std::time::Duration;

use fencepost_client::{
    AcquireOptions, Acquisition, Client as Library, Error as Failure, Holder, Lock, LostReason,
};
use rand::Rng as _;
use tokio::time::timeout;

use super::{Context, Error, PATIENCE, line::micros};
use crate::{
    history::{Call, Outcome, Shown, Status, Via},
    recorder::{Answer, Caller},
};

#[derive(Debug)]
pub(super) struct Client {
    context: Context,
    library: Library,
}

impl Client {
    pub(super) fn new(context: Context, endpoints: &[String]) -> Result<Self, Error> {
        let library = Library::builder(endpoints.join(","))
            .timeout(PATIENCE)
            .build()?;
        Ok(Self { context, library })
    }

    pub(super) async fn run(mut self) {
        while !self.context.stop.is_cancelled() {
            match self.context.rng.random_range(0..100) {
                0..50 => self.guard().await,
                50..75 => self.calls().await,
                _ => self.get().await,
            }
            self.context.rest(self.context.pause).await;
        }
        // Guards that were dropped are given back in the background.
        self.library.released().await;
    }

    fn caller(&mut self) -> Caller {
        Caller {
            client: self.context.number,
            via: Via::Library,
            resource: self.context.resource(),
            owner: self.context.fresh(),
        }
    }

    /// Options, and the request id in them.
    fn options(&mut self, caller: &Caller) -> (AcquireOptions, Call) {
        let ttl = self.context.ttl();
        let options = AcquireOptions::default().ttl(ttl).owner(&caller.owner);
        if self.context.chance(50) {
            let request_id = self.context.fresh();
            return (
                options.request_id(&request_id),
                Call::Acquire { request_id, ttl },
            );
        }
        (
            options,
            Call::Acquire {
                request_id: String::new(),
                ttl,
            },
        )
    }

    /// Holds a lock for a while, as a program does.
    async fn guard(&mut self) {
        let caller = self.caller();
        let (options, call) = self.options(&caller);
        let recorder = self.context.recorder.clone();
        let patience = self.patience();
        let mut guard = None;
        let acquiring = async {
            match timeout(patience, self.library.acquire(&caller.resource, options)).await {
                Ok(Ok(taken)) => {
                    let outcome = Outcome::Lock(shown(taken.granted()));
                    guard = Some(taken);
                    outcome.into()
                }
                Ok(Err(error)) => failed(&error),
                Err(_) => dropped().into(),
            }
        };
        recorder.call(&caller, call, acquiring).await;
        let Some(guard) = guard else {
            self.context.rest(Duration::from_millis(40)).await;
            return;
        };
        let token = guard.fencing_token();
        let begun = recorder.now();
        let stop = self.context.stop.clone();
        let mut lost = None;
        for _ in 0..self.context.rng.random_range(1..6) {
            self.context
                .write(&caller.resource, &caller.owner, token)
                .await;
            let work = Duration::from_millis(self.context.rng.random_range(0..700));
            lost = tokio::select! {
                reason = guard.lost() => Some(reason),
                () = tokio::time::sleep(work) => None,
                () = stop.cancelled() => None,
            };
            if lost.is_some() || stop.is_cancelled() {
                break;
            }
        }
        let id = recorder.next_id();
        let sent = recorder.now();
        let given_back = if lost.is_some() || self.context.chance(30) {
            drop(guard);
            Outcome::Unknown("the guard was dropped".to_owned()).into()
        } else {
            guard
                .release()
                .await
                .map_or_else(|error| failed(&error), |()| Outcome::Done.into())
        };
        let end = lost.map_or_else(|| Outcome::Unknown("left".to_owned()), lost_by);
        recorder.record(id, &caller, Call::Release { token }, sent, given_back);
        recorder.record(
            recorder.next_id(),
            &caller,
            Call::KeepAlive { token },
            begun,
            end,
        );
    }

    /// Takes, renews and releases by single calls.
    async fn calls(&mut self) {
        let caller = self.caller();
        let (options, call) = self.options(&caller);
        let recorder = self.context.recorder.clone();
        let library = self.library.calls();
        let patience = self.patience();
        let acquiring = async {
            match timeout(patience, library.acquire(&caller.resource, options)).await {
                Ok(Ok(Acquisition::Acquired(lock))) => Outcome::Lock(shown(&lock)).into(),
                Ok(Ok(Acquisition::Refused(holder))) => held(&holder).into(),
                Ok(Err(error)) => failed(&error),
                Err(_) => dropped().into(),
            }
        };
        let outcome = recorder.call(&caller, call, acquiring).await;
        let Outcome::Lock(Shown { token, .. }) = outcome else {
            self.context.rest(Duration::from_millis(40)).await;
            return;
        };
        for _ in 0..self.context.rng.random_range(0..3) {
            self.context
                .write(&caller.resource, &caller.owner, token)
                .await;
            self.context.rest(Duration::from_millis(300)).await;
            let patience = self.patience();
            let renewing = async {
                let renewing = library.renew(&caller.resource, &caller.owner, token, None);
                match timeout(patience, renewing).await {
                    Ok(Ok(lock)) => Outcome::Lock(shown(&lock)).into(),
                    Ok(Err(error)) => failed(&error),
                    Err(_) => dropped().into(),
                }
            };
            recorder
                .call(&caller, Call::Renew { token }, renewing)
                .await;
        }
        let releasing = async {
            let released = library
                .release(&caller.resource, &caller.owner, token)
                .await;
            released.map_or_else(|error| failed(&error), |()| Outcome::Done.into())
        };
        recorder
            .call(&caller, Call::Release { token }, releasing)
            .await;
    }

    async fn get(&mut self) {
        let caller = Caller {
            owner: String::new(),
            ..self.caller()
        };
        let recorder = self.context.recorder.clone();
        let looking = async {
            match self.library.get(&caller.resource).await {
                Ok(Some(lock)) => Outcome::Lock(shown(&lock)).into(),
                Ok(None) => Outcome::No("LOCK_NOT_FOUND".to_owned()).into(),
                Err(error) => failed(&error),
            }
        };
        recorder.call(&caller, Call::Get, looking).await;
    }

    /// Now and then a call is dropped.
    fn patience(&mut self) -> Duration {
        match self.context.chance(10) {
            true => Duration::from_micros(self.context.rng.random_range(0..20_000)),
            false => PATIENCE * 2,
        }
    }
}

fn dropped() -> Outcome {
    Outcome::Unknown("dropped".to_owned())
}

/// What is a bug, the server's or the library's, is told as such.
fn failed(error: &Failure) -> Answer {
    let status = match error {
        Failure::Internal { .. } => Some(("Internal", Some("INTERNAL"))),
        Failure::Rejected { .. } => Some(("Unimplemented", None)),
        _ => None,
    };
    Answer {
        outcome: outcome_of(error),
        status: status.map(|(code, reason)| Status {
            code: code.to_owned(),
            reason: reason.map(str::to_owned),
        }),
    }
}

fn outcome_of(error: &Failure) -> Outcome {
    match error {
        Failure::Refused { holder } => held(holder),
        Failure::Lost { reason } => lost_by(*reason),
        Failure::RequestSpent => Outcome::No("REQUEST_SPENT".to_owned()),
        Failure::Invalid { .. } => Outcome::No("INVALID_REQUEST".to_owned()),
        error => Outcome::Unknown(error.to_string()),
    }
}

fn lost_by(reason: LostReason) -> Outcome {
    match reason {
        // The library gave up; nobody else said so.
        LostReason::Unconfirmed => Outcome::Unknown(reason.as_str().to_owned()),
        said => Outcome::No(said.as_str().to_owned()),
    }
}

fn held(holder: &Holder) -> Outcome {
    Outcome::Held {
        owner: holder.owner.clone(),
        acquired_at: micros(holder.acquired_at),
        remaining: holder.remaining,
    }
}

/// `remaining` counts from the return of the call: counted from its sending it is
/// less than there is.
fn shown(lock: &Lock) -> Shown {
    Shown {
        token: lock.fencing_token,
        owner: lock.owner.clone(),
        remaining: lock.remaining,
        ttl: lock.ttl,
        acquired_at: micros(lock.acquired_at),
        expires_at: micros(lock.expires_at),
    }
}
