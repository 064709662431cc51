//! Renew: a later end for a live lease, for one caller or for many streams.
//!
//! Renewals of many leases go in one statement on a connection of their own,
//! so that no flood of other calls delays them. A row that somebody else has
//! locked is passed over there and goes singly, where a wait delays nobody.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_postgres::Row;

use super::{
    Inner, Store,
    call::{Abandoned, Ask, Call},
    failure::Failure,
    pool::{Answer, Bound, Param, Pool},
    rest_before_retry,
    rounds::{InRounds, by_resource},
    row, statement, unknown_outcome,
};
use crate::{
    clock::Moment,
    lock::{FencingToken, Lease, Loss, Outage, Owner, RenewError, Resource, Ttl},
    metrics::{ShedMetric, ShedMetrics},
    room::{Peer, Room},
};

/// What Renew asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Not judged here, because somebody else has locked the row, or there is none:
    /// renew it singly.
    Locked,
}

impl From<Result<Renewed, RenewError>> for Renewal {
    fn from(verdict: Result<Renewed, RenewError>) -> Self {
        match verdict {
            Ok(renewed) => Self::Renewed(renewed),
            Err(error) => Self::Failed(error),
        }
    }
}

impl Store {
    /// Moves the end of a live lease to now + TTL, never to an earlier time.
    pub(crate) async fn renew(
        &self,
        ask: Renew,
        peer: Peer,
        deadline: Instant,
    ) -> Result<Renewed, RenewError> {
        self.call(ask, Call::Renew, peer, deadline).await
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
        let ended = deadline + self.0.config.limits.patience();
        let (waiting, told) = self.admit(ask, None, ended)?;
        waiting.go_on(&self.0, move |ask, inner, _| async move {
            let verdict = inner.renew_once(&ask, deadline).await;
            verdict.unwrap_or_else(|failure| Err(Outage::from(failure).into()))
        });
        told.answer(ended).await
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
        self.0.metrics.lanes.streams.observe(asks.len() as f64);
        let answer = self.0.send_renew_all(pool, asks, deadline).await;
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
            Err(failure) if failure.may_be_of_one_row() => {
                Ok(asks.iter().map(|_| Renewal::Locked).collect())
            }
            Err(failure) => Err(failure.into()),
        }
    }
}

impl Ask for Renew {
    type Answer = Renewed;
    type Error = RenewError;

    const ABANDONED: Abandoned = Abandoned::Skip;

    fn room(inner: &Inner) -> &Arc<Room> {
        &inner.holding
    }

    fn shed(metrics: &ShedMetrics) -> &ShedMetric {
        &metrics.renew
    }

    fn resource(&self) -> &Resource {
        &self.resource
    }

    async fn alone(self, inner: Arc<Inner>, deadline: Instant) -> Result<Renewed, RenewError> {
        inner.renew(&self, deadline).await
    }
}

impl InRounds for Renew {
    fn bind<'a>(calls: impl Iterator<Item = &'a Self> + Clone) -> Bound<'a> {
        let resources: Vec<&str> = calls.clone().map(|ask| ask.resource.as_str()).collect();
        let owners: Vec<&str> = calls.clone().map(|ask| ask.owner.as_str()).collect();
        let tokens: Vec<i64> = calls.clone().map(|ask| ask.token.get()).collect();
        let ttls: Vec<Option<i64>> = calls.map(|ask| ask.ttl.map(Ttl::millis)).collect();
        Bound {
            statement: &statement::RENEW_ALL,
            arguments: vec![
                Box::new(resources),
                Box::new(owners),
                Box::new(tokens),
                Box::new(ttls),
            ],
        }
    }

    fn judge(&self, inner: &Inner, row: &Row, sent: Moment) -> Option<Result<Renewed, RenewError>> {
        let verdict = inner.judge_renewal(self, row, sent);
        Some(verdict.unwrap_or_else(|failure| Err(Outage::from(failure).into())))
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
        let params: [Param<'_>; 4] = [
            &ask.resource.as_str(),
            &ask.owner.as_str(),
            &ask.token.get(),
            &ask.ttl.map(Ttl::millis),
        ];
        let answer = self.pool.run(&statement::RENEW, &params, deadline).await?;
        self.judge_renewal(ask, row::only(&answer.rows)?, answer.sent)
    }

    async fn send_renew_all(
        &self,
        pool: &Pool,
        asks: &[Renew],
        deadline: Instant,
    ) -> Result<Vec<Renewal>, Failure> {
        // Two streams may renew one lease, and a statement has one row for each.
        let mut sent_for: HashMap<&Resource, &Renew> = HashMap::with_capacity(asks.len());
        for ask in asks {
            sent_for.entry(&ask.resource).or_insert(ask);
        }
        let mut distinct: Vec<&Renew> = sent_for.values().copied().collect();
        distinct.sort_unstable_by(|a, b| a.resource.cmp(&b.resource));
        let connection = pool.check_out(deadline).await?;
        let statement = [Some(Renew::bind(distinct.into_iter()))];
        let Answer { rows: [rows], sent } = pool.run_all(connection, &statement).await?;
        let rows = by_resource(&rows);
        let judge = |ask: &Renew| match (rows.get(ask.resource.as_str()), sent_for[&ask.resource]) {
            (Some(row), sent_for) if ask == sent_for => {
                self.judge_renewal(ask, row, sent).map(Renewal::from)
            }
            _ => Ok(Renewal::Locked),
        };
        asks.iter().map(judge).collect()
    }

    fn judge_renewal(
        &self,
        ask: &Renew,
        row: &Row,
        sent: Moment,
    ) -> Result<Result<Renewed, RenewError>, Failure> {
        Ok(Err(match row::column(row, "outcome")? {
            "renewed" => {
                let lease = row::lease(row, sent, &ask.resource, ask.owner.clone(), ask.token)?;
                if lease.deadline.remaining().is_zero() {
                    let late = Failure::unknown("the renewal came back with no time left");
                    return Ok(Err(Outage::from(late).into()));
                }
                self.saw(lease.token);
                let slack = row::micros(row, "slack_us")?;
                return Ok(Ok(Renewed { lease, slack }));
            }
            "not_found" => Loss::NotFound.into(),
            "expired" => Loss::Expired.into(),
            "not_owner" => Loss::NotOwner.into(),
            "superseded" => Loss::Superseded.into(),
            "token_unknown" => Loss::TokenUnknown.into(),
            _ => unknown_outcome().into(),
        }))
    }
}
