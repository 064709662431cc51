//! Acquire: a grant, or who holds the lock.

use std::{collections::HashMap, sync::Arc};

use serde_json::Value;
use tokio::time::Instant;
use tokio_postgres::Row;
use uuid::Uuid;

use super::{
    Inner, Limits, Store, audit,
    call::{Abandoned, Ask, Call},
    failure::Failure,
    give_back::Orphan,
    identity::Need,
    lane::Crowd,
    pool::{Answer, Bound},
    rest_before_retry,
    rounds::by_resource,
    row, statement,
};
use crate::{
    caller::Caller,
    clock::Moment,
    lock::{
        AcquireError, FencingToken, Holder, Labels, Lease, Loss, Outage, Owner, RequestId,
        Resource, Ttl,
    },
    metrics::{ShedMetric, ShedMetrics},
    room::{Peer, Room},
};

/// What Acquire asks for.
#[derive(Debug, Clone)]
pub(crate) struct Acquire {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) ttl: Ttl,
    pub(crate) labels: Labels,
    pub(crate) request_id: RequestId,
    pub(crate) caller: Caller,
}

/// Who has the lock now.
#[expect(
    clippy::large_enum_variant,
    reason = "moved a few times; a box for each grant would cost more"
)]
pub(crate) enum Acquired {
    /// The caller has.
    Granted(Grant),
    /// Another owner has.
    Held(Holder),
}

impl Acquired {
    /// Who has it, for those who have not.
    pub(super) fn holder(&self) -> Holder {
        match self {
            Self::Held(holder) => holder.clone(),
            Self::Granted(Grant { lease, .. }) => Holder {
                owner: lease.owner.clone(),
                acquired_at: lease.acquired_at,
                deadline: lease.deadline,
                labels: lease.labels.clone(),
            },
        }
    }
}

/// A lease that its caller has not been told of yet. Dropped unclaimed, it is
/// given back: the caller has gone, and a lock that nobody knows of would block
/// others for a whole TTL.
pub(crate) struct Grant {
    lease: Lease,
    took_over: bool,
    unclaimed: Unclaimed,
}

impl Grant {
    /// Whether the lease was there already: this call asked for it again.
    pub(crate) fn is_replay(&self) -> bool {
        self.unclaimed.orphan.is_none()
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.lease.token
    }

    /// Whether the lease before it had expired, and was not released.
    pub(crate) fn took_over(&self) -> bool {
        self.took_over
    }

    /// Takes the lease to hand it to the caller. Nothing may be awaited
    /// between this and the answer.
    pub(crate) fn claim(mut self) -> Lease {
        self.unclaimed.orphan = None;
        self.lease
    }
}

/// The lease that a grant has ended: it was not released.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) owner: Owner,
    pub(super) token: FencingToken,
    pub(super) how: Loss,
}

impl Ended {
    /// What a row tells of, unless it is an answer.
    pub(super) fn told(row: &Row) -> Option<Self> {
        let how = match row::column(row, "outcome").ok()? {
            "expired" => Loss::Expired,
            "superseded" => Loss::Superseded,
            _ => return None,
        };
        Some(Self {
            owner: Owner::stored(row::column(row, "owner").ok()?),
            token: FencingToken::stored(row::column(row, "fencing_token").ok()?),
            how,
        })
    }
}

/// Gives a lease back on drop.
pub(super) struct Unclaimed {
    /// Set by the call that created the lease: a replay gives nothing back.
    orphan: Option<Orphan>,
    inner: Arc<Inner>,
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(orphan) = self.orphan.take() {
            self.inner.returns.push(orphan);
        }
    }
}

impl Store {
    /// Takes a lock or says who has it. Never waits for the holder.
    pub(crate) async fn acquire(
        &self,
        ask: Acquire,
        peer: Peer,
        deadline: Instant,
    ) -> Result<Acquired, AcquireError> {
        // It has its place while it waits for the first leap.
        let (waiting, told) = self.admit(ask, peer, deadline)?;
        self.0.begin(deadline).await.map_err(Outage::from)?;
        self.0.enqueue(Call::Acquire(waiting));
        told.answer(deadline).await
    }
}

impl Ask for Acquire {
    type Answer = Acquired;
    type Error = AcquireError;

    const ABANDONED: Abandoned = Abandoned::Skip;

    fn room(inner: &Inner) -> &Arc<Room> {
        &inner.asking
    }

    fn shed(metrics: &ShedMetrics) -> &ShedMetric {
        &metrics.acquire
    }

    fn resource(&self) -> &Resource {
        &self.resource
    }

    async fn alone(self, inner: Arc<Inner>, deadline: Instant) -> Result<Acquired, AcquireError> {
        inner.acquire(&self, deadline, None).await
    }
}

/// Puts them into the order of the names, and says what each would leave behind.
pub(super) fn attempts(crowds: &mut [Crowd], limits: &Limits) -> Vec<Orphan> {
    crowds.sort_unstable_by(|a, b| a.first.ask.resource.cmp(&b.first.ask.resource));
    let attempt = |crowd: &Crowd| Orphan::of(&crowd.first.ask, limits);
    crowds.iter().map(attempt).collect()
}

/// The statement for many, if there is one.
pub(super) fn bind<'a>(crowds: &'a [Crowd], attempts: &[Orphan]) -> Option<Bound<'a>> {
    let asks = || crowds.iter().map(|crowd| &crowd.first.ask);
    let resources: Vec<&str> = asks().map(|ask| ask.resource.as_str()).collect();
    let owners: Vec<&str> = asks().map(|ask| ask.owner.as_str()).collect();
    let request_ids: Vec<&str> = asks().map(|ask| ask.request_id.as_str()).collect();
    let attempts: Vec<Uuid> = attempts.iter().map(Orphan::attempt).collect();
    let ttls: Vec<i64> = asks().map(|ask| ask.ttl.millis()).collect();
    let labels: Vec<Value> = asks().map(|ask| row::labels_json(&ask.labels)).collect();
    (!crowds.is_empty()).then(|| Bound {
        statement: &statement::ACQUIRE_ALL,
        arguments: vec![
            Box::new(resources),
            Box::new(owners),
            Box::new(request_ids),
            Box::new(attempts),
            Box::new(ttls),
            Box::new(labels),
        ],
    })
}

/// The answers for many, and the leases that they have ended, by resource.
pub(super) fn split(rows: &[Row]) -> (HashMap<&str, &Row>, HashMap<&str, Ended>) {
    let mut all = HashMap::new();
    let answers = rows.iter().filter(|row| {
        let ended = Ended::told(row);
        let is_answer = ended.is_none();
        if let Some(ended) = ended
            && let Ok(resource) = row::column(row, "resource")
        {
            all.insert(resource, ended);
        }
        is_answer
    });
    (by_resource(answers), all)
}

/// What one statement came to.
pub(super) enum Verdict {
    Acquired(Acquired),
    Spent,
    /// The sequence must leap before the next try.
    Leap(Need),
    /// The name was fought over for longer than the statement tries.
    Contended,
    /// A grant that must not be used: it has no time left that is certain, or a token
    /// that is not above all that went before. Its call may end while it waits to go on.
    Unusable(Unclaimed, Option<Need>),
}

impl Inner {
    /// Goes on from what a round came to, if one did.
    pub(super) async fn acquire(
        self: Arc<Self>,
        ask: &Acquire,
        deadline: Instant,
        mut first: Option<Result<Verdict, Failure>>,
    ) -> Result<Acquired, AcquireError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let verdict = match first.take() {
                Some(verdict) => verdict,
                None => self.try_acquire(ask, deadline).await,
            };
            let cause = match verdict {
                Ok(Verdict::Acquired(acquired)) => return Ok(acquired),
                Ok(Verdict::Spent) => return Err(AcquireError::RequestSpent),
                Ok(Verdict::Leap(need)) => {
                    self.leap(need, deadline).await.map_err(Outage::from)?;
                    Failure::unknown("the fencing tokens had to leap")
                }
                Ok(Verdict::Contended) => Failure::unknown("the name is fought over"),
                Ok(Verdict::Unusable(mut unclaimed, need)) => {
                    // Gone before the next try, which would find it and take
                    // its own request for spent.
                    if let Some(orphan) = unclaimed.orphan.take() {
                        self.give_back_now(orphan, deadline)
                            .await
                            .map_err(Outage::from)?;
                    }
                    if let Some(need) = need {
                        self.leap(need, deadline).await.map_err(Outage::from)?;
                    }
                    Failure::unknown("no grant came that could be used")
                }
                Err(failure @ Failure::Conflict(_)) => failure,
                Err(failure) => return Err(Outage::from(failure).into()),
            };
            if !rest_before_retry(&self, &cause, tries, deadline).await {
                return Err(Outage::from(cause).into());
            }
        }
    }

    async fn try_acquire(
        self: &Arc<Self>,
        ask: &Acquire,
        deadline: Instant,
    ) -> Result<Verdict, Failure> {
        let highest = self.highest();
        let orphan = Orphan::of(ask, &self.config.limits);
        let answer = self
            .pool
            .run(
                &statement::ACQUIRE,
                &[
                    &ask.resource.as_str(),
                    &ask.owner.as_str(),
                    &ask.request_id.as_str(),
                    &orphan.attempt(),
                    &ask.ttl.millis(),
                    &row::labels_json(&ask.labels),
                ],
                deadline,
            )
            .await;
        match answer {
            Ok(Answer { rows, sent }) => {
                // Before the answer, if at all.
                let ended = rows.first().and_then(Ended::told);
                let rest = &rows[usize::from(ended.is_some())..];
                self.judge(ask, highest, row::only(rest)?, ended, sent, orphan)
            }
            Err(Failure::TokenBehind(_)) => Ok(Verdict::Leap(Need::now())),
            Err(failure) => {
                if failure.may_have_happened() {
                    self.returns.push(orphan.perhaps());
                }
                Err(failure)
            }
        }
    }

    /// Judges a row that was asked for at `sent`, when no token above `highest` was
    /// known of.
    pub(super) fn judge(
        self: &Arc<Self>,
        ask: &Acquire,
        highest: i64,
        row: &Row,
        ended: Option<Ended>,
        sent: Moment,
        orphan: Orphan,
    ) -> Result<Verdict, Failure> {
        let outcome: &str = row::column(row, "outcome")?;
        let orphan = match outcome {
            "held" => return Ok(Verdict::Acquired(Acquired::Held(holder(row, sent)?))),
            "spent" => return Ok(Verdict::Spent),
            "identity" => return Ok(Verdict::Leap(Need::since(sent))),
            "contended" => return Ok(Verdict::Contended),
            "granted" => Some(orphan),
            "replayed" => None,
            _ => {
                return Err(Failure::unknown(
                    "an outcome that this server does not know",
                ));
            }
        };
        // Any error from here on gives the lease back.
        let mut unclaimed = Unclaimed {
            orphan,
            inner: Arc::clone(self),
        };
        let token = FencingToken::stored(row::column(row, "fencing_token")?);
        let lease = row::lease(row, sent, &ask.resource, ask.owner.clone(), token)?;
        // Whatever becomes of it from here on, it was granted.
        if let Some(orphan) = &mut unclaimed.orphan {
            orphan.granted(token);
            audit::granted(&ask.caller, &lease, ended.as_ref());
            if token.get() <= highest {
                let need = Need::above(highest, sent);
                return Ok(Verdict::Unusable(unclaimed, Some(need)));
            }
        } else {
            audit::replayed(&ask.caller, &lease);
        }
        if lease.deadline.remaining().is_zero() {
            // Of a replay only the wait says so: the lease may live, and is looked at again.
            return Ok(Verdict::Unusable(unclaimed, None));
        }
        self.saw(lease.token);
        Ok(Verdict::Acquired(Acquired::Granted(Grant {
            lease,
            took_over: ended.is_some_and(|ended| ended.how == Loss::Expired),
            unclaimed,
        })))
    }
}

fn holder(row: &Row, sent: Moment) -> Result<Holder, Failure> {
    Ok(Holder {
        owner: Owner::stored(row::column(row, "owner")?),
        acquired_at: row::column(row, "acquired_at")?,
        deadline: sent.after(row::remaining(row)?),
        labels: row::labels(row)?,
    })
}
