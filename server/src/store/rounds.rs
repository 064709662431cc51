//! Rounds: calls that come while the statements of the calls before are under
//! way go to the database together, in one transaction.
//!
//! No timer gathers them: a call that comes alone goes at once, alone. A lane has
//! one round under way at a time, and more only while they are not answered; a
//! resource has one call in a round, or any number of Gets. The others wait for the
//! next round, in their order, but for Acquires of other owners that came before the
//! round was sent: where it leaves the resource held, that answers them.
//!
//! A round waits for no row. What it did not judge, because somebody else has
//! locked the row or because the case is a rare one, goes on alone, on other
//! connections. So does each call of a round that the database refused: one of
//! them may be the cause, and must not stop the others.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use tokio_postgres::Row;

use super::{
    Inner,
    acquire::{self, Acquired, Verdict},
    call::{Ask, Call, Waiting},
    failure::{Because, Failure},
    give_back::Orphan,
    lane::{Crowd, Lane, Round},
    pool::{Answer, Bound, Checkout, Pool},
    row,
};
use crate::{
    clock::Moment,
    lock::Outage,
    metrics::{LaneMetric, LaneMetrics},
    trace::Trace,
};

/// A round that is not answered for so long may be stuck on a connection that is
/// dead and does not say so: the next one goes elsewhere meanwhile. Longer than a
/// round waits in the database.
const OVERDUE: Duration = Duration::from_millis(500);

type PoolOf = fn(&Inner) -> &Pool;

/// More lanes mean smaller rounds, and more flushes in each other's way: with two
/// for Acquires and Releases, 64 and 256 clients had less.
pub(super) struct Lanes {
    calls: Arc<Lane>,
    /// Their rounds write nothing, and so wait for no flush and for no standby.
    gets: Arc<Lane>,
    /// No flood of others delays these: they have a connection of their own as well.
    renewals: Arc<Lane>,
}

impl Lanes {
    pub(super) fn new(metrics: &LaneMetrics) -> Self {
        let lane = |metrics: &LaneMetric| Arc::new(Lane::new(metrics.clone()));
        Self {
            calls: lane(&metrics.calls),
            gets: lane(&metrics.gets),
            renewals: lane(&metrics.renewals),
        }
    }

    /// Brings their gauges up to date.
    pub(super) fn measure(&self) {
        self.calls.measure();
        self.gets.measure();
        self.renewals.measure();
    }

    fn of(&self, call: &Call) -> &Arc<Lane> {
        match call {
            Call::Acquire(_) | Call::Release(_) => &self.calls,
            Call::Get(_) => &self.gets,
            Call::Renew(_) => &self.renewals,
        }
    }
}

/// A kind of call that is judged by its row alone.
pub(super) trait InRounds: Ask {
    /// The statement for many, of which there is at least one.
    fn bind<'a>(calls: impl Iterator<Item = &'a Self> + Clone) -> Bound<'a>;

    /// None when the call must go on alone.
    fn judge(
        &self,
        inner: &Inner,
        row: &Row,
        sent: Moment,
    ) -> Option<Result<Self::Answer, Self::Error>>;
}

fn bind<Q: InRounds>(calls: &mut [Waiting<Q>]) -> Option<Bound<'_>> {
    // In the order of the names, as in every statement of many rows.
    calls.sort_unstable_by(|a, b| a.ask.resource().cmp(b.ask.resource()));
    let calls: &[_] = calls;
    (!calls.is_empty()).then(|| Q::bind(calls.iter().map(|call| &call.ask)))
}

/// The row of each resource.
pub(super) fn by_resource<'a>(
    rows: impl IntoIterator<Item = &'a Row>,
) -> HashMap<&'a str, &'a Row> {
    rows.into_iter()
        .filter_map(|row| Some((row::column(row, "resource").ok()?, row)))
        .collect()
}

/// Answers what waits when a round panics.
struct Running<'a>(&'a Lane);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .abandon(|| Outage::Internal(Box::new(Because("a round panicked"))));
        }
    }
}

impl Inner {
    /// Has a call carried out, in the next round of its lane.
    pub(super) fn enqueue(self: &Arc<Self>, call: Call) {
        let lane = Arc::clone(self.lanes.of(&call));
        lane.push(call);
        self.run(&lane);
    }

    /// Sees to it that a lane's rounds are carried out.
    fn run(self: &Arc<Self>, lane: &Arc<Lane>) {
        if lane.starts() {
            let (inner, lane) = (Arc::clone(self), Arc::clone(lane));
            self.tracker.spawn(async move {
                let _running = Running(&lane);
                while lane.goes_on() {
                    inner.next_round(&lane).await;
                }
            });
        }
    }

    async fn next_round(self: &Arc<Self>, lane: &Arc<Lane>) {
        // Calls that have come are on their way here, in tasks of their own.
        tokio::task::yield_now().await;
        let pool = self.pool_of(lane);
        // Before the calls are taken, so that none is taken that is then held up.
        let patience = Instant::now() + self.config.limits.wait;
        match pool(self).check_out(patience).await {
            Ok(connection) => {
                let round = lane.take_round();
                if round.is_empty() {
                    connection.keep();
                    return;
                }
                let (inner, own) = (Arc::clone(self), Arc::clone(lane));
                let mut round = Box::pin(inner.carry_out(own, round, pool, connection));
                if timeout(OVERDUE, &mut round).await.is_err() {
                    self.tracker.spawn(round);
                }
            }
            Err(failure) => {
                let failure = Arc::new(match failure {
                    // Of the time for a connection: the calls may have more.
                    Failure::TooLate => Failure::no_connection(),
                    failure => failure,
                });
                lane.fail_all(|| outage(&failure));
            }
        }
    }

    /// Where the next round of a lane goes.
    fn pool_of(&self, lane: &Arc<Lane>) -> PoolOf {
        if Arc::ptr_eq(lane, &self.lanes.renewals) && self.renewal_calls.is_free() {
            |inner| &inner.renewal_calls
        } else {
            |inner| &inner.pool
        }
    }

    async fn carry_out(
        self: Arc<Self>,
        lane: Arc<Lane>,
        mut round: Round,
        pool: PoolOf,
        connection: Checkout,
    ) {
        let highest = self.highest();
        let orphans = acquire::attempts(&mut round.acquires, &self.config.limits);
        let answer = {
            let work = Trace::round(round.traces());
            let statements = [
                acquire::bind(&round.acquires, &orphans),
                bind(&mut round.releases),
                bind(&mut round.renewals),
                bind(&mut round.gets),
            ];
            let bound = statements.iter().flatten();
            work.statements(bound.map(|bound| bound.statement.name));
            let answer = pool(&self).run_all(connection, &statements).await;
            answer.inspect_err(|failure| work.failed(failure.kind()))
        };
        match answer {
            Ok(Answer { rows, sent }) => {
                let [acquired, released, renewed, got] = &rows;
                let (rows, mut ended) = acquire::split(acquired);
                let mut again = Vec::new();
                for (crowd, orphan) in round.acquires.into_iter().zip(orphans) {
                    let ask = &crowd.first.ask;
                    let name = ask.resource.as_str();
                    let verdict = rows
                        .get(name)
                        .map(|row| self.judge(ask, highest, row, ended.remove(name), sent, orphan));
                    again.extend(self.settle_crowd(crowd, verdict));
                }
                if !again.is_empty() {
                    lane.put_back(again);
                    self.run(&lane);
                }
                self.settle(round.releases, released, sent);
                self.settle(round.renewals, renewed, sent);
                self.settle(round.gets, got, sent);
            }
            Err(failure) if failure.may_be_of_one_row() => {
                round.into_calls().for_each(|call| call.go_alone(&self));
            }
            Err(failure) => {
                if failure.may_have_happened() {
                    let perhaps = orphans.into_iter().map(Orphan::perhaps);
                    perhaps.for_each(|orphan| self.returns.push(orphan));
                }
                let failure = Arc::new(failure);
                round
                    .into_calls()
                    .for_each(|call| call.fail(outage(&failure)));
            }
        }
    }

    fn settle<Q: InRounds>(self: &Arc<Self>, calls: Vec<Waiting<Q>>, rows: &[Row], sent: Moment) {
        let rows = by_resource(rows);
        for call in calls {
            let row = rows.get(call.ask.resource().as_str());
            match row.and_then(|row| call.ask.judge(self, row, sent)) {
                Some(answer) => call.answer(answer),
                None => call.go_alone(self),
            }
        }
    }

    /// Returns those that wait for the next round.
    fn settle_crowd(
        self: &Arc<Self>,
        crowd: Crowd,
        verdict: Option<Result<Verdict, Failure>>,
    ) -> Vec<Call> {
        let Crowd { first, others } = crowd;
        let holder = match verdict {
            Some(Ok(Verdict::Acquired(acquired))) => {
                let holder = (!others.is_empty()).then(|| acquired.holder());
                first.answer(Ok(acquired));
                holder
            }
            Some(verdict) => {
                first.go_on(self, move |ask, inner, deadline| async move {
                    inner.acquire(&ask, deadline, Some(verdict)).await
                });
                None
            }
            None => {
                first.go_alone(self);
                None
            }
        };
        let mut again = Vec::new();
        for other in others {
            match &holder {
                Some(holder) if holder.owner != other.ask.owner => {
                    other.answer(Ok(Acquired::Held(holder.clone())));
                }
                _ => again.push(Call::Acquire(other)),
            }
        }
        again
    }
}

/// The same for each call of a round.
fn outage(failure: &Arc<Failure>) -> Outage {
    Outage::Unavailable(Box::new(Arc::clone(failure)))
}
