//! Get: the live lease of a resource.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    Abandoned, Inner, Store, failure::Failure, identity::Need, rest_before_retry, row, statement,
};
use crate::lock::{FencingToken, GetError, Lease, Outage, Owner, Resource};

impl Store {
    /// The live lease of a resource. An expired one counts as none at once.
    pub(crate) async fn get(
        &self,
        resource: Resource,
        deadline: Instant,
    ) -> Result<Lease, GetError> {
        let (inner, name) = (Arc::clone(&self.0), resource.clone());
        self.detach(&name, deadline, Abandoned::Skip, async move {
            inner.get(&resource, deadline).await
        })
        .await
    }
}

/// What one look came to.
enum Look {
    Live(Lease),
    Free,
    /// The sequence must leap: these may be the leases of another past.
    Leap(Need),
    /// Nothing was left of the lease when the answer came.
    Over,
}

impl Inner {
    async fn get(&self, resource: &Resource, deadline: Instant) -> Result<Lease, GetError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let cause = match self.try_get(resource, deadline).await {
                Ok(Look::Live(lease)) => return Ok(lease),
                Ok(Look::Free) => return Err(GetError::NotFound),
                Ok(Look::Leap(need)) => {
                    self.leap(need, deadline).await.map_err(Outage::from)?;
                    Failure::unknown("the fencing tokens had to leap")
                }
                Ok(Look::Over) => Failure::unknown("each answer came with no time left"),
                Err(failure @ Failure::Conflict(_)) => failure,
                Err(failure) => return Err(Outage::from(failure).into()),
            };
            if !rest_before_retry(self, &cause, tries, deadline).await {
                return Err(Outage::from(cause).into());
            }
        }
    }

    async fn try_get(&self, resource: &Resource, deadline: Instant) -> Result<Look, Failure> {
        let answer = self
            .pool
            .run(&statement::GET, &[&resource.as_str()], deadline)
            .await?;
        let row = row::only(&answer.rows)?;
        if row::column(row, "read_only")? {
            return Err(self.pool.read_only());
        }
        if row::column::<Option<bool>>(row, "identity_holds")? != Some(true) {
            return Ok(Look::Leap(Need::since(answer.sent)));
        }
        let Some(owner) = row::column::<Option<String>>(row, "owner")? else {
            return Ok(Look::Free);
        };
        let token = FencingToken::stored(row::column(row, "fencing_token")?);
        let lease = row::lease(row, answer.sent, resource, Owner::stored(owner), token)?;
        if lease.deadline.remaining().is_zero() {
            return Ok(Look::Over);
        }
        self.saw(lease.token);
        Ok(Look::Live(lease))
    }
}
