//! Renew: a later end for a live lease.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Abandoned, Inner, Store, failure::Failure, rest_before_retry, row, statement, unknown_outcome,
};
use crate::lock::{FencingToken, Lease, Outage, Owner, RenewError, Resource, Ttl};

/// What Renew asks for.
#[derive(Debug, Clone)]
pub(crate) struct Renew {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
    /// Unset: the lease's own.
    pub(crate) ttl: Option<Ttl>,
}

/// A lease as renewed.
#[derive(Debug)]
pub(crate) struct Renewed {
    pub(crate) lease: Lease,
    /// What was left of it when the renewal landed.
    pub(crate) slack: Duration,
}

impl Store {
    /// Moves the end of a live lease to now + TTL, never to an earlier time.
    pub(crate) async fn renew(&self, ask: Renew, deadline: Instant) -> Result<Renewed, RenewError> {
        let (inner, name) = (Arc::clone(&self.0), ask.resource.clone());
        self.detach(&name, deadline, Abandoned::Skip, async move {
            inner.renew(&ask, deadline).await
        })
        .await
    }
}

impl Inner {
    async fn renew(&self, ask: &Renew, deadline: Instant) -> Result<Renewed, RenewError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.try_renew(ask, deadline).await {
                Ok(verdict) => return verdict,
                Err(failure @ Failure::Conflict(_)) => {
                    if !rest_before_retry(self, &failure, tries, deadline).await {
                        return Err(Outage::from(failure).into());
                    }
                }
                Err(failure) => return Err(Outage::from(failure).into()),
            }
        }
    }

    async fn try_renew(
        &self,
        ask: &Renew,
        deadline: Instant,
    ) -> Result<Result<Renewed, RenewError>, Failure> {
        let answer = self
            .pool
            .run(
                &statement::RENEW,
                &[
                    &ask.resource.as_str(),
                    &ask.owner.as_str(),
                    &ask.token.get(),
                    &ask.ttl.map(Ttl::millis),
                ],
                deadline,
            )
            .await?;
        let row = row::only(&answer.rows)?;
        let refused = match row::column(row, "outcome")? {
            "renewed" => {
                let lease = Lease {
                    resource: ask.resource.clone(),
                    owner: ask.owner.clone(),
                    token: ask.token,
                    acquired_at: row::column(row, "acquired_at")?,
                    expires_at: row::column(row, "expires_at")?,
                    deadline: answer.sent.after(row::remaining(row)?),
                    ttl: row::ttl(row)?,
                    labels: row::labels(row)?,
                };
                if lease.deadline.remaining().is_zero() {
                    return Err(Failure::unknown("the renewal came back with no time left"));
                }
                self.saw(lease.token);
                return Ok(Ok(Renewed {
                    lease,
                    slack: row::micros(row, "slack_us")?,
                }));
            }
            "not_found" => RenewError::NotFound,
            "expired" => RenewError::Expired,
            "not_owner" => RenewError::NotOwner,
            "superseded" => RenewError::Superseded,
            "token_unknown" => RenewError::TokenUnknown,
            _ => unknown_outcome().into(),
        };
        Ok(Err(refused))
    }
}
