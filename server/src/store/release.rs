//! Release: the end of a lease before its time is up.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    Abandoned, Inner, Store, failure::Failure, rest_before_retry, row, statement, unknown_outcome,
};
use crate::lock::{FencingToken, Outage, Owner, ReleaseError, Resource};

/// What Release asks for.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
}

impl Store {
    /// Gives one lease back. The row stays.
    pub(crate) async fn release(
        &self,
        ask: Release,
        deadline: Instant,
    ) -> Result<(), ReleaseError> {
        let (inner, name) = (Arc::clone(&self.0), ask.resource.clone());
        self.detach(&name, deadline, Abandoned::Finish, async move {
            inner.release(&ask, deadline).await
        })
        .await
    }
}

impl Inner {
    async fn release(&self, ask: &Release, deadline: Instant) -> Result<(), ReleaseError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.try_release(ask, deadline).await {
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

    async fn try_release(
        &self,
        ask: &Release,
        deadline: Instant,
    ) -> Result<Result<(), ReleaseError>, Failure> {
        let answer = self
            .pool
            .run(
                &statement::RELEASE,
                &[
                    &ask.resource.as_str(),
                    &ask.owner.as_str(),
                    &ask.token.get(),
                ],
                deadline,
            )
            .await?;
        let row = row::only(&answer.rows)?;
        Ok(match row::column(row, "outcome")? {
            "released" => Ok(()),
            "not_found" => Err(ReleaseError::NotFound),
            "not_owner" => Err(ReleaseError::NotOwner),
            "superseded" => Err(ReleaseError::Superseded),
            "token_unknown" => Err(ReleaseError::TokenUnknown),
            _ => Err(unknown_outcome().into()),
        })
    }
}
