//! Renew: a later end for a live lease, for one caller or for many streams.
//!
//! Renewals of many leases go in one statement on a connection of their own,
//! so that no flood of other calls delays them. A row that somebody else has
//! locked is passed over there and goes singly, where a wait delays nobody.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_postgres::Row;

use super::{
    Abandoned, Inner, Store,
    failure::Failure,
    pool::{Answer, Pool},
    rest_before_retry, row, statement,
};
use crate::{
    clock::Moment,
    lock::{FencingToken, Lease, Loss, Outage, Owner, RenewError, Resource, Ttl},
};

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

/// What came of one renewal among many.
#[derive(Debug)]
pub(crate) enum Renewal {
    Renewed(Renewed),
    /// No verdict, or one that ends the lease.
    Failed(RenewError),
    /// Somebody else has locked the row: renew it singly.
    Locked,
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

    /// Renews a lease whose row somebody else has locked, by one statement that
    /// waits for it. Nothing is sent after `deadline`, but the answer comes when
    /// the statement has ended, or is overdue: whoever counts these waits counts
    /// the connections that they keep.
    pub(crate) async fn renew_locked(
        &self,
        ask: Renew,
        deadline: Instant,
    ) -> Result<Renewed, RenewError> {
        let (inner, name) = (Arc::clone(&self.0), ask.resource.clone());
        let ended = deadline + self.0.config.limits.patience();
        self.detach(&name, ended, Abandoned::Skip, async move {
            let verdict = inner.renew_once(&ask, deadline).await;
            verdict.unwrap_or_else(|failure| Err(Outage::from(failure).into()))
        })
        .await
    }

    /// Renews many leases in one statement, on a connection of their own, or
    /// `elsewhere` when that one does not answer. The answer has one entry for
    /// each, in order.
    ///
    /// Not detached: its caller is the one task that renews for all streams.
    pub(crate) async fn renew_all(
        &self,
        asks: &[Renew],
        elsewhere: bool,
    ) -> Result<Vec<Renewal>, Outage> {
        self.check_durable()?;
        let (own, deadline) = (
            &self.0.renewals,
            Instant::now() + self.0.config.limits.statement,
        );
        let elsewhere = elsewhere || own.lingering() > 0;
        let pool = if elsewhere { &self.0.pool } else { own };
        let answer = self.0.send_renew(pool, asks, true, deadline).await;
        let renewed = |renewals: &Vec<Renewal>| {
            renewals
                .iter()
                .any(|renewal| matches!(renewal, Renewal::Renewed(_)))
        };
        if elsewhere && answer.as_ref().is_ok_and(renewed) {
            // Commits come to an end, so what is overdue hangs on a link.
            self.0.hosts.let_go();
        }
        match answer {
            Ok(renewals) => Ok(renewals),
            // One of them may be the cause, and must not stop the others.
            Err(Failure::Conflict(_) | Failure::Refused(_)) => {
                Ok(asks.iter().map(|_| Renewal::Locked).collect())
            }
            Err(failure) => Err(failure.into()),
        }
    }
}

impl Inner {
    async fn renew(&self, ask: &Renew, deadline: Instant) -> Result<Renewed, RenewError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.renew_once(ask, deadline).await {
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

    /// One statement for one lease, which waits for its row.
    async fn renew_once(
        &self,
        ask: &Renew,
        deadline: Instant,
    ) -> Result<Result<Renewed, RenewError>, Failure> {
        let asks = std::slice::from_ref(ask);
        let renewals = self.send_renew(&self.pool, asks, false, deadline).await?;
        Ok(match renewals.into_iter().next() {
            Some(Renewal::Renewed(renewed)) => Ok(renewed),
            Some(Renewal::Failed(error)) => Err(error),
            Some(Renewal::Locked) | None => Err(super::unknown_outcome().into()),
        })
    }

    async fn send_renew(
        &self,
        pool: &Pool,
        asks: &[Renew],
        skip_locked: bool,
        deadline: Instant,
    ) -> Result<Vec<Renewal>, Failure> {
        let resources: Vec<&str> = asks.iter().map(|ask| ask.resource.as_str()).collect();
        let owners: Vec<&str> = asks.iter().map(|ask| ask.owner.as_str()).collect();
        let tokens: Vec<i64> = asks.iter().map(|ask| ask.token.get()).collect();
        let ttls: Vec<Option<i64>> = asks.iter().map(|ask| ask.ttl.map(Ttl::millis)).collect();
        let params: [super::pool::Param<'_>; 5] =
            [&resources, &owners, &tokens, &ttls, &skip_locked];
        let Answer { rows, sent } = pool.run(&statement::RENEW, &params, deadline).await?;
        if rows.len() != asks.len() {
            return Err(Failure::unknown("not every renewal was answered"));
        }
        asks.iter()
            .zip(&rows)
            .map(|(ask, row)| self.judge_renewal(ask, row, sent))
            .collect()
    }

    fn judge_renewal(&self, ask: &Renew, row: &Row, sent: Moment) -> Result<Renewal, Failure> {
        let refused: RenewError = match row::column(row, "outcome")? {
            "renewed" => {
                let lease = row::lease(row, sent, &ask.resource, ask.owner.clone(), ask.token)?;
                if lease.deadline.remaining().is_zero() {
                    let late = Failure::unknown("the renewal came back with no time left");
                    return Ok(Renewal::Failed(Outage::from(late).into()));
                }
                self.saw(lease.token);
                return Ok(Renewal::Renewed(Renewed {
                    lease,
                    slack: row::micros(row, "slack_us")?,
                }));
            }
            "locked" => return Ok(Renewal::Locked),
            "not_found" => Loss::NotFound.into(),
            "expired" => Loss::Expired.into(),
            "not_owner" => Loss::NotOwner.into(),
            "superseded" => Loss::Superseded.into(),
            "token_unknown" => Loss::TokenUnknown.into(),
            _ => super::unknown_outcome().into(),
        };
        Ok(Renewal::Failed(refused))
    }
}
