//! Get: the live lease of a resource.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_postgres::Row;

use super::{
    Inner, Store,
    call::{Abandoned, Ask, Call},
    failure::Failure,
    identity::Need,
    pool::Bound,
    rest_before_retry,
    rounds::InRounds,
    row, statement,
};
use crate::{
    clock::Moment,
    lock::{FencingToken, GetError, Lease, Outage, Owner, Resource},
    metrics::{ShedMetric, ShedMetrics},
    room::{Peer, Room},
};

impl Store {
    /// The live lease of a resource. An expired one counts as none at once.
    pub(crate) async fn get(
        &self,
        resource: Resource,
        peer: Peer,
        deadline: Instant,
    ) -> Result<Lease, GetError> {
        self.call(Get::new(resource), Call::Get, peer, deadline)
            .await
    }
}

/// What Get asks for.
pub(super) struct Get(Resource);

impl Get {
    pub(super) fn new(resource: Resource) -> Self {
        Self(resource)
    }
}

impl Ask for Get {
    type Answer = Lease;
    type Error = GetError;

    const ABANDONED: Abandoned = Abandoned::Skip;

    fn room(inner: &Inner) -> &Arc<Room> {
        &inner.asking
    }

    fn shed(metrics: &ShedMetrics) -> &ShedMetric {
        &metrics.get
    }

    fn resource(&self) -> &Resource {
        &self.0
    }

    async fn alone(self, inner: Arc<Inner>, deadline: Instant) -> Result<Lease, GetError> {
        inner.get(&self.0, deadline).await
    }
}

impl InRounds for Get {
    fn bind<'a>(calls: impl Iterator<Item = &'a Self> + Clone) -> Bound<'a> {
        let mut resources: Vec<&str> = calls.map(|get| get.0.as_str()).collect();
        // In the order of the names; one may be asked for by many.
        resources.dedup();
        Bound {
            statement: &statement::GET_ALL,
            arguments: vec![Box::new(resources)],
        }
    }

    fn judge(&self, inner: &Inner, row: &Row, sent: Moment) -> Option<Result<Lease, GetError>> {
        match inner.judge_look(&self.0, row, sent) {
            Ok(Look::Live(lease)) => Some(Ok(lease)),
            Ok(Look::Free) => Some(Err(GetError::NotFound)),
            Ok(Look::Leap(_) | Look::Over) => None,
            Err(failure) => Some(Err(Outage::from(failure).into())),
        }
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
    async fn get(
        self: &Arc<Self>,
        resource: &Resource,
        deadline: Instant,
    ) -> Result<Lease, GetError> {
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
        self.judge_look(resource, row::only(&answer.rows)?, answer.sent)
    }

    fn judge_look(&self, resource: &Resource, row: &Row, sent: Moment) -> Result<Look, Failure> {
        if row::column(row, "read_only")? {
            return Err(self.pool.read_only());
        }
        if row::column::<Option<bool>>(row, "identity_holds")? != Some(true) {
            return Ok(Look::Leap(Need::since(sent)));
        }
        let Some(owner) = row::column::<Option<String>>(row, "owner")? else {
            return Ok(Look::Free);
        };
        let token = FencingToken::stored(row::column(row, "fencing_token")?);
        let lease = row::lease(row, sent, resource, Owner::stored(owner), token)?;
        if lease.deadline.remaining().is_zero() {
            return Ok(Look::Over);
        }
        self.saw(lease.token);
        Ok(Look::Live(lease))
    }
}
