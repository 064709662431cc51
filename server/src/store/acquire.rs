//! Acquire: a grant, or who holds the lock.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;
use tokio_postgres::Row;
use uuid::Uuid;

use super::{
    Abandoned, Inner, Store, failure::Failure, give_back::Orphan, identity::Need, pool::Answer,
    rest_before_retry, row, statement,
};
use crate::{
    clock::Moment,
    lock::{
        AcquireError, FencingToken, Holder, Labels, Lease, Outage, Owner, RequestId, Resource, Ttl,
    },
};

/// What Acquire asks for.
#[derive(Debug, Clone)]
pub(crate) struct Acquire {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) ttl: Ttl,
    pub(crate) labels: Labels,
    pub(crate) request_id: RequestId,
}

/// Who has the lock now.
pub(crate) enum Acquired {
    /// The caller has.
    Granted(Grant),
    /// Another owner has.
    Held(Holder),
}

/// A lease that its caller has not been told of yet. Dropped unclaimed, it is
/// given back: the caller has gone, and a lock that nobody knows of would block
/// others for a whole TTL.
pub(crate) struct Grant {
    lease: Lease,
    unclaimed: Unclaimed,
}

impl Grant {
    /// Takes the lease to hand it to the caller. Nothing may be awaited
    /// between this and the answer.
    pub(crate) fn claim(mut self) -> Lease {
        self.unclaimed.orphan = None;
        self.lease
    }
}

/// Gives a lease back on drop.
struct Unclaimed {
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
        deadline: Instant,
    ) -> Result<Acquired, AcquireError> {
        let (inner, name) = (Arc::clone(&self.0), ask.resource.clone());
        self.detach(&name, deadline, Abandoned::Skip, async move {
            inner.acquire(&ask, deadline).await
        })
        .await
    }
}

/// What one statement came to.
enum Verdict {
    Acquired(Acquired),
    Spent,
    /// The sequence must leap before the next try.
    Leap(Need),
    /// The name was fought over for longer than the statement tries.
    Contended,
    /// A grant that must not be used: it has no time left, or a token that is
    /// not above all that went before.
    Unusable(Orphan, Option<Need>),
}

impl Inner {
    async fn acquire(
        self: Arc<Self>,
        ask: &Acquire,
        deadline: Instant,
    ) -> Result<Acquired, AcquireError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let cause = match self.try_acquire(ask, deadline).await {
                Ok(Verdict::Acquired(acquired)) => return Ok(acquired),
                Ok(Verdict::Spent) => return Err(AcquireError::RequestSpent),
                Ok(Verdict::Leap(need)) => {
                    self.leap(need, deadline).await.map_err(Outage::from)?;
                    Failure::unknown("the fencing tokens had to leap")
                }
                Ok(Verdict::Contended) => Failure::unknown("the name is fought over"),
                Ok(Verdict::Unusable(orphan, need)) => {
                    // Gone before the next try, which would find it and take
                    // its own request for spent.
                    self.give_back_now(orphan, deadline)
                        .await
                        .map_err(Outage::from)?;
                    if let Some(need) = need {
                        self.leap(need, deadline).await.map_err(Outage::from)?;
                    }
                    Failure::unknown("each grant came with no time left")
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
        let highest = self.highest.load(Ordering::Acquire);
        let orphan = Orphan::new(
            ask.resource.clone(),
            Uuid::new_v4(),
            ask.ttl,
            &self.config.limits,
        );
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
            Ok(answer) => self.judge(ask, highest, &answer, orphan),
            Err(Failure::TokenBehind(_)) => Ok(Verdict::Leap(Need::now())),
            Err(failure) => {
                if failure.may_have_happened() {
                    self.returns.push(orphan.perhaps());
                }
                Err(failure)
            }
        }
    }

    fn judge(
        self: &Arc<Self>,
        ask: &Acquire,
        highest: i64,
        answer: &Answer,
        orphan: Orphan,
    ) -> Result<Verdict, Failure> {
        let sent = answer.sent;
        let row = row::only(&answer.rows)?;
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
        let went_back = lease.token.get() <= highest;
        let over = lease.deadline.remaining().is_zero();
        match unclaimed.orphan.take() {
            Some(orphan) if went_back => {
                Ok(Verdict::Unusable(orphan, Some(Need::above(highest, sent))))
            }
            Some(orphan) if over => Ok(Verdict::Unusable(orphan, None)),
            None if over => Ok(Verdict::Spent),
            orphan => {
                self.saw(lease.token);
                unclaimed.orphan = orphan;
                Ok(Verdict::Acquired(Acquired::Granted(Grant {
                    lease,
                    unclaimed,
                })))
            }
        }
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
