//! The connections of the store, and the one way a statement is run on them.
//!
//! On a direct connection a statement is prepared once and runs in a
//! transaction of its own: one round trip. Behind PgBouncer it travels as
//! `BEGIN; SET LOCAL …; statement; COMMIT`, pipelined and unnamed: one round
//! trip as well, and nothing is left behind on a connection that is another
//! client's next.
//!
//! A statement is never cancelled: cancelling a commit that waits for its
//! standby would report success for something that is not replicated. When we
//! stop waiting, the outcome is unknown, and the connection keeps its place in
//! the pool until its answer comes or the database is found not to answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::{Manager, ManagerConfig, Object, RecyclingMethod, Runtime, Timeouts};
use futures_util::future::{join_all, try_join_all};
use tokio::time::Instant;
use tokio_postgres::{Client, Row, types::ToSql};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::{
    config::StoreConfig,
    connection::{Connector, Hosts, Settings},
    failure::{Because, Failure},
    statement::{Statement, Statements},
};
use crate::{
    clock::Moment,
    metrics::{PoolMetrics, count},
    trace::Trace,
};

pub(super) type Param<'a> = &'a (dyn ToSql + Sync);

/// A statement with its arguments.
pub(super) struct Bound<'a> {
    pub(super) statement: &'static Statement,
    pub(super) arguments: Vec<Box<dyn ToSql + Sync + Send + 'a>>,
}

/// The rows of a statement, and when it was sent.
pub(super) struct Answer<R = Vec<Row>> {
    pub(super) rows: R,
    /// Just before the statement went out: what it says was true no earlier.
    pub(super) sent: Moment,
}

/// How long the place of a connection with an overdue statement is kept.
const LONGEST_LINGER: Duration = Duration::from_secs(3600);

pub(super) struct Pool {
    connections: deadpool_postgres::Pool,
    /// Set behind PgBouncer: what to open each transaction with.
    begin: Option<String>,
    /// How long we wait for one statement before its outcome is unknown.
    patience: Duration,
    /// Connections with an overdue statement.
    lingering: TaskTracker,
    hosts: Arc<Hosts>,
    /// WARNINGs seen on any connection. They are rare, so a statement that
    /// was in flight when one came counts as unknown, whoever it was for.
    warnings: Arc<AtomicU64>,
    statements: Arc<Statements>,
    metrics: PoolMetrics,
}

impl Pool {
    pub(super) fn new(
        hosts: &Arc<Hosts>,
        config: &StoreConfig,
        size: usize,
        statements: &Arc<Statements>,
        metrics: PoolMetrics,
    ) -> Result<Self, deadpool_postgres::BuildError> {
        let pg = hosts.first();
        let begin = config.pgbouncer.then(|| Settings::new(config).as_begin());
        let warnings = Arc::new(AtomicU64::new(0));
        let connector = Connector::new(Arc::clone(hosts), config, Arc::clone(&warnings));
        let manager = Manager::from_connect(
            pg,
            connector,
            ManagerConfig {
                recycling_method: RecyclingMethod::Fast,
            },
        );
        let connections = deadpool_postgres::Pool::builder(manager)
            .max_size(size)
            .timeouts(Timeouts {
                wait: Some(config.limits.wait),
                create: Some(config.limits.connect),
                recycle: Some(config.limits.connect),
            })
            .runtime(Runtime::Tokio1)
            .build()?;
        Ok(Self {
            connections,
            begin,
            patience: config.limits.patience(),
            lingering: TaskTracker::new(),
            hosts: Arc::clone(hosts),
            warnings,
            statements: Arc::clone(statements),
            metrics,
        })
    }

    /// Runs one statement in a transaction of its own.
    ///
    /// Nothing is sent after `deadline`; once sent, the statement has its own
    /// limit, since abandoning it would only lose the answer.
    pub(super) async fn run(
        &self,
        statement: &'static Statement,
        params: &[Param<'_>],
        deadline: Instant,
    ) -> Result<Answer, Failure> {
        let connection = self.check_out(deadline).await?;
        if Instant::now() >= deadline {
            connection.keep();
            return Err(Failure::TooLate);
        }
        let work = Trace::current().statement(statement.name);
        let sent = self.send(connection, &[(statement, params)]).await;
        let answer = sent.inspect_err(|failure| work.failed(failure.kind()))?;
        let [rows] = <[Vec<Row>; 1]>::try_from(answer.rows)
            .map_err(|_| Failure::unknown("not as many answers as statements"))?;
        Ok(Answer {
            rows,
            sent: answer.sent,
        })
    }

    /// Runs several statements in one transaction, and in one round trip. Those
    /// that are none have no rows.
    pub(super) async fn run_all<const N: usize>(
        &self,
        connection: Checkout,
        statements: &[Option<Bound<'_>>; N],
    ) -> Result<Answer<[Vec<Row>; N]>, Failure> {
        let params: Vec<(&'static Statement, Vec<Param<'_>>)> = statements
            .iter()
            .flatten()
            .map(|bound| {
                let params = bound.arguments.iter().map(|argument| &**argument as _);
                (bound.statement, params.collect())
            })
            .collect();
        let params: Vec<_> = params
            .iter()
            .map(|(statement, params)| (*statement, params.as_slice()))
            .collect();
        let answer = self.send(connection, &params).await?;
        let mut rows = answer.rows.into_iter();
        Ok(Answer {
            rows: statements
                .each_ref()
                .map(|bound| bound.as_ref().and_then(|_| rows.next()).unwrap_or_default()),
            sent: answer.sent,
        })
    }

    async fn send(
        &self,
        connection: Checkout,
        statements: &[(&'static Statement, &[Param<'_>])],
    ) -> Result<Answer<Vec<Vec<Row>>>, Failure> {
        let warnings = self.warnings.load(Ordering::Acquire);
        let sent = Moment::now();
        let work = async {
            let client = connection.client()?;
            match (&self.begin, statements) {
                (None, [(statement, params)]) => {
                    let prepared = prepare(client, statement).await?;
                    Ok(vec![client.query(&prepared, params).await?])
                }
                (None, _) => {
                    let prepared = statements.iter().map(|(named, _)| prepare(client, named));
                    let prepared = try_join_all(prepared).await?;
                    let queries = prepared.iter().zip(statements);
                    let queries = queries
                        .map(async |(prepared, (_, params))| client.query(prepared, params).await);
                    in_transaction(client, "BEGIN", queries).await
                }
                (Some(begin), _) => {
                    let queries = statements.iter().copied().map(async |(statement, params)| {
                        let types = statement.types.iter().cloned();
                        let typed: Vec<_> = params.iter().copied().zip(types).collect();
                        client.query_typed(statement.sql, &typed).await
                    });
                    in_transaction(client, begin, queries).await
                }
            }
        };
        let names = || statements.iter().map(|(statement, _)| statement.name);
        let span = tracing::debug_span!("statement", name = ?names().collect::<Vec<_>>());
        let ended = |failure| {
            self.statements
                .ended(names(), Moment::now().since(sent), failure)
        };
        let Ok(result) = tokio::time::timeout(self.patience, work.instrument(span)).await else {
            self.linger(connection);
            let failure = Failure::unknown("no answer from the database in time");
            ended(Some(&failure));
            return Err(failure);
        };
        let result = match result {
            Ok(_) if self.warnings.load(Ordering::Acquire) != warnings => {
                Err(Failure::unknown("a warning came with the commit"))
            }
            other => other,
        };
        ended(result.as_ref().err());
        match &result {
            Ok(_) => connection.keep(),
            Err(failure) if failure.keeps_connection() => connection.keep(),
            Err(Failure::ReadOnly(_)) => self.drop_idle(),
            Err(_) => {}
        }
        Ok(Answer {
            rows: result?,
            sent,
        })
    }

    /// Takes a connection to the Postgres that was met last.
    pub(super) async fn check_out(&self, deadline: Instant) -> Result<Checkout, Failure> {
        let taken = self.take(deadline).await;
        taken.inspect_err(|failure| self.metrics.failed(failure.kind()))
    }

    async fn take(&self, deadline: Instant) -> Result<Checkout, Failure> {
        loop {
            #[expect(
                clippy::disallowed_methods,
                reason = "its one home: the wait is bounded here"
            )]
            let taken = self.connections.get();
            match tokio::time::timeout_at(deadline, taken).await {
                Ok(Ok(connection)) => {
                    let created = Object::metrics(&connection).created;
                    // Dropped without keep, it does not go back.
                    let connection = Checkout(Some(connection));
                    if !self.hosts.is_stale(created) {
                        return Ok(connection);
                    }
                }
                Ok(Err(error)) => return Err(Failure::NotSent(Box::new(error))),
                Err(_) => return Err(Failure::TooLate),
            }
        }
    }

    /// For an answer that shows its server to be a standby or read-only: after a
    /// switchover, every connection must look for the new primary.
    pub(super) fn read_only(&self) -> Failure {
        self.drop_idle();
        Failure::ReadOnly(Box::new(Because(
            "the server answers as a standby or read-only",
        )))
    }

    /// Keeps the place of a connection whose statement is overdue until its
    /// answer comes, and its link is known to be good, or is lost.
    ///
    /// A commit that waits for a standby or a disk outlives a closed connection:
    /// replacing it at once would fill the database with such sessions.
    fn linger(&self, mut connection: Checkout) {
        let Some(connection) = connection.0.take() else {
            return;
        };
        if self.hosts.is_stale(Object::metrics(&connection).created) {
            drop(Object::take(connection));
            return;
        }
        let told_to_let_go = self.hosts.told_to_let_go();
        self.lingering.spawn(async move {
            // Queued behind the statement, so answered after it.
            let answered = connection.batch_execute("");
            let good = tokio::select! {
                () = told_to_let_go => false,
                answered = tokio::time::timeout(LONGEST_LINGER, answered) => matches!(answered, Ok(Ok(()))),
            };
            if !good {
                drop(Object::take(connection));
            }
        });
    }

    /// Whether a connection can be had at once, or made.
    pub(super) fn is_free(&self) -> bool {
        let status = self.connections.status();
        status.available > 0 || status.size < status.max_size
    }

    /// How many connections have a statement that is overdue.
    pub(super) fn lingering(&self) -> usize {
        self.lingering.len()
    }

    /// Brings the gauges up to date.
    pub(super) fn measure(&self) {
        let status = self.connections.status();
        let (idle, overdue) = (status.available, self.lingering());
        self.metrics.idle.set(count(idle));
        self.metrics.overdue.set(count(overdue));
        let in_use = status.size.saturating_sub(idle + overdue);
        self.metrics.in_use.set(count(in_use));
    }

    fn drop_idle(&self) {
        self.connections.retain(|_, _| false);
    }

    pub(super) async fn close(&self) {
        self.connections.close();
        self.lingering.close();
        self.hosts.let_go();
        self.lingering.wait().await;
    }
}

async fn prepare(
    client: &deadpool_postgres::ClientWrapper,
    statement: &Statement,
) -> Result<tokio_postgres::Statement, tokio_postgres::Error> {
    client
        .prepare_typed_cached(statement.sql, statement.types)
        .await
}

async fn in_transaction<Q>(
    client: &Client,
    begin: &str,
    queries: impl IntoIterator<Item = Q>,
) -> Result<Vec<Vec<Row>>, Failure>
where
    Q: Future<Output = Result<Vec<Row>, tokio_postgres::Error>>,
{
    // Polled in this order, and each is written when first polled: one round trip.
    let (begun, answers, committed) = tokio::join!(
        biased;
        client.batch_execute(begin),
        join_all(queries),
        client.batch_execute("COMMIT"),
    );
    begun?;
    // The first error is the cause; the others, and a COMMIT that rolls back, follow
    // from it.
    let rows: Result<Vec<_>, _> = answers.into_iter().collect();
    let rows = rows?;
    committed?;
    Ok(rows)
}

/// A connection that goes back to the pool only when told so: one with a
/// statement still in flight must not serve another caller.
pub(super) struct Checkout(Option<Object>);

impl Checkout {
    fn client(&self) -> Result<&Object, Failure> {
        self.0
            .as_ref()
            .ok_or_else(|| Failure::unknown("the connection is gone"))
    }

    pub(super) fn keep(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}
