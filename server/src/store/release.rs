//! Release: the end of a lease before its time is up.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_postgres::Row;

use super::{
    Inner, Store, audit,
    call::{Abandoned, Ask, Call},
    failure::Failure,
    pool::Bound,
    rest_before_retry,
    rounds::InRounds,
    row, statement, unknown_outcome,
};
use crate::{
    caller::Caller,
    clock::Moment,
    lock::{FencingToken, Outage, Owner, ReleaseError, Resource},
    metrics::{ShedMetric, ShedMetrics},
    room::{Peer, Room},
};

/// What Release asks for.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    pub(crate) resource: Resource,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
    pub(crate) caller: Caller,
}

impl Store {
    /// Gives one lease back. The row stays.
    pub(crate) async fn release(
        &self,
        ask: Release,
        peer: Peer,
        deadline: Instant,
    ) -> Result<(), ReleaseError> {
        self.call(ask, Call::Release, peer, deadline).await
    }
}

impl Ask for Release {
    type Answer = ();
    type Error = ReleaseError;

    const ABANDONED: Abandoned = Abandoned::Finish;

    fn room(inner: &Inner) -> &Arc<Room> {
        &inner.holding
    }

    fn shed(metrics: &ShedMetrics) -> &ShedMetric {
        &metrics.release
    }

    fn resource(&self) -> &Resource {
        &self.resource
    }

    async fn alone(self, inner: Arc<Inner>, deadline: Instant) -> Result<(), ReleaseError> {
        inner.release(&self, deadline).await
    }
}

impl InRounds for Release {
    fn bind<'a>(calls: impl Iterator<Item = &'a Self> + Clone) -> Bound<'a> {
        let resources: Vec<&str> = calls.clone().map(|ask| ask.resource.as_str()).collect();
        let owners: Vec<&str> = calls.clone().map(|ask| ask.owner.as_str()).collect();
        let tokens: Vec<i64> = calls.map(|ask| ask.token.get()).collect();
        Bound {
            statement: &statement::RELEASE_ALL,
            arguments: vec![Box::new(resources), Box::new(owners), Box::new(tokens)],
        }
    }

    fn judge(&self, inner: &Inner, row: &Row, _: Moment) -> Option<Result<(), ReleaseError>> {
        let verdict = inner.judge_release(self, row);
        Some(verdict.unwrap_or_else(|failure| Err(Outage::from(failure).into())))
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
        self.judge_release(ask, row::only(&answer.rows)?)
    }

    fn judge_release(&self, ask: &Release, row: &Row) -> Result<Result<(), ReleaseError>, Failure> {
        Ok(match row::column(row, "outcome")? {
            "released" => {
                let held = row::micros(row, "held_us")?;
                self.metrics.held(ask.resource.as_str(), held);
                audit::released(&ask.caller, ask, held);
                Ok(())
            }
            "not_found" => Err(ReleaseError::NotFound),
            "not_owner" => Err(ReleaseError::NotOwner),
            "superseded" => Err(ReleaseError::Superseded),
            "token_unknown" => Err(ReleaseError::TokenUnknown),
            _ => Err(unknown_outcome().into()),
        })
    }
}
