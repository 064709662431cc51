//! Connections to Postgres, and the one way a statement is run on them.
//!
//! What a statement depends on is set by us and not merely found: isolation,
//! `synchronous_commit`, time limits, and the plan settings that keep a
//! statement planned on an empty table from scanning a full one. On a direct
//! connection these are start-up options, which a reload of the server's
//! configuration does not touch. Behind PgBouncer in transaction mode a plain
//! `SET` would be inherited by another client, so each statement travels as
//! `BEGIN; SET LOCAL …; statement; COMMIT`, pipelined and unnamed.
//!
//! A statement is never cancelled: cancelling a commit that waits for its
//! standby would report success for something that is not replicated. When we
//! stop waiting, the connection is dropped and the outcome is unknown.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::{
    Connect, Manager, ManagerConfig, Object, RecyclingMethod, Runtime, Timeouts,
};
use tokio::{task::JoinHandle, time::Instant};
use tokio_postgres::{
    AsyncMessage, Client, Config, NoTls, Row,
    config::TargetSessionAttrs,
    error::Severity,
    types::{ToSql, Type},
};

use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::{
    config::{DatabaseUrl, StoreConfig},
    failure::{Because, Failure},
    statement::Statement,
};
use crate::clock::Moment;

pub(super) type Param<'a> = &'a (dyn ToSql + Sync);

/// The rows of a statement, and when it was sent.
pub(super) struct Answer {
    pub(super) rows: Vec<Row>,
    /// Just before the statement went out: what it says was true no earlier.
    pub(super) sent: Moment,
}

pub(super) struct Pool {
    connections: deadpool_postgres::Pool,
    /// Set behind PgBouncer: what to open each transaction with.
    begin: Option<String>,
    /// How long we wait for one statement before its outcome is unknown.
    patience: Duration,
    /// WARNINGs seen on any connection. They are rare, so a statement that
    /// was in flight when one came counts as unknown, whoever it was for.
    warnings: Arc<AtomicU64>,
}

impl Pool {
    pub(super) fn new(
        url: &DatabaseUrl,
        config: &StoreConfig,
    ) -> Result<Self, deadpool_postgres::BuildError> {
        let settings = Settings::new(config);
        let mut pg = client_config(url, config);
        let begin = if config.pgbouncer {
            Some(settings.as_begin())
        } else {
            pg.options(settings.as_options());
            None
        };
        let warnings = Arc::new(AtomicU64::new(0));
        let connector = Connector {
            pgbouncer: config.pgbouncer,
            statement_limit: config.limits.statement,
            warnings: Arc::clone(&warnings),
        };
        let manager = Manager::from_connect(
            pg,
            connector,
            ManagerConfig {
                recycling_method: RecyclingMethod::Fast,
            },
        );
        let connections = deadpool_postgres::Pool::builder(manager)
            .max_size(config.pool_size)
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
            patience: config.limits.statement + GRACE,
            warnings,
        })
    }

    /// Runs one statement in a transaction of its own.
    ///
    /// Nothing is sent after `deadline`; once sent, the statement has its own
    /// limit, since abandoning it would only lose the answer.
    pub(super) async fn run(
        &self,
        statement: &Statement,
        params: &[Param<'_>],
        deadline: Instant,
    ) -> Result<Answer, Failure> {
        let taken = tokio::time::timeout_at(deadline, self.connections.get()).await;
        let mut connection = match taken {
            Ok(Ok(connection)) => Checkout(Some(connection)),
            Ok(Err(error)) => return Err(Failure::NotSent(Box::new(error))),
            Err(_) => return Err(Failure::TooLate),
        };
        let warnings = self.warnings.load(Ordering::Acquire);
        let sent = Moment::now();
        let span = tracing::debug_span!("statement", name = statement.name);
        let work = async {
            let client = connection.client()?;
            match &self.begin {
                Some(begin) => run_in_transaction(client, begin, statement, params).await,
                None => {
                    let prepared = client
                        .prepare_typed_cached(statement.sql, statement.types)
                        .await?;
                    Ok(client.query(&prepared, params).await?)
                }
            }
        };
        let result = tokio::time::timeout(self.patience, work.instrument(span))
            .await
            .unwrap_or_else(|_| Err(Failure::unknown("no answer from the database in time")));
        let result = match result {
            Ok(_) if self.warnings.load(Ordering::Acquire) != warnings => {
                Err(Failure::unknown("a warning came with the commit"))
            }
            other => other,
        };
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

    /// For an answer that shows its server to be a standby or read-only: after a
    /// switchover, every connection must look for the new primary.
    pub(super) fn read_only(&self) -> Failure {
        self.drop_idle();
        Failure::ReadOnly(Box::new(Because(
            "the server answers as a standby or read-only",
        )))
    }

    fn drop_idle(&self) {
        self.connections.retain(|_, _| false);
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }
}

/// The server's own limit comes first, so that we hear from it.
const GRACE: Duration = Duration::from_millis(500);

/// A connection outside the pool, for a migration; closed on drop.
pub(super) struct OwnConnection {
    pub(super) client: Client,
    _driver: AbortOnDropHandle<()>,
}

impl OwnConnection {
    pub(super) async fn open(
        url: &DatabaseUrl,
        config: &StoreConfig,
    ) -> Result<Self, tokio_postgres::Error> {
        let (client, connection) = client_config(url, config).connect(NoTls).await?;
        let driver = tokio::spawn(async move {
            // Its error reaches the client's own calls.
            let _ = connection.await;
        });
        Ok(Self {
            client,
            _driver: AbortOnDropHandle::new(driver),
        })
    }
}

/// What every connection of ours has in common.
fn client_config(url: &DatabaseUrl, config: &StoreConfig) -> Config {
    let mut pg = url.client_config();
    pg.application_name("fencepostd")
        .connect_timeout(config.limits.connect)
        .tcp_user_timeout(config.limits.statement)
        .keepalives(true)
        .keepalives_idle(Duration::from_secs(5))
        .keepalives_interval(Duration::from_secs(2))
        .keepalives_retries(3)
        // With several hosts, this finds the primary.
        .target_session_attrs(TargetSessionAttrs::ReadWrite);
    pg
}

async fn run_in_transaction(
    client: &Client,
    begin: &str,
    statement: &Statement,
    params: &[Param<'_>],
) -> Result<Vec<Row>, Failure> {
    let typed: Vec<(Param<'_>, Type)> = params
        .iter()
        .copied()
        .zip(statement.types.iter().cloned())
        .collect();
    // Polled in this order, and each is written when first polled: one round trip.
    let (begun, rows, committed) = tokio::join!(
        biased;
        client.batch_execute(begin),
        client.query_typed(statement.sql, &typed),
        client.batch_execute("COMMIT"),
    );
    begun?;
    let rows = rows?;
    committed?;
    Ok(rows)
}

/// A connection that goes back to the pool only when told so: one with a
/// statement still in flight must not serve another caller.
struct Checkout(Option<Object>);

impl Checkout {
    fn client(&self) -> Result<&Object, Failure> {
        self.0
            .as_ref()
            .ok_or_else(|| Failure::unknown("the connection is gone"))
    }

    fn keep(&mut self) {
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

/// What every statement depends on.
struct Settings(Vec<(&'static str, String)>);

impl Settings {
    fn new(config: &StoreConfig) -> Self {
        let ms = |limit: Duration| format!("{}ms", limit.as_millis());
        Self(vec![
            (
                "synchronous_commit",
                config.synchronous_commit.as_str().into(),
            ),
            ("statement_timeout", ms(config.limits.statement)),
            ("lock_timeout", ms(config.limits.lock)),
            (
                "idle_in_transaction_session_timeout",
                ms(config.limits.statement),
            ),
            ("search_path", "pg_catalog".into()),
            ("enable_seqscan", "off".into()),
            ("enable_bitmapscan", "off".into()),
            ("enable_mergejoin", "off".into()),
            ("jit", "off".into()),
            // A peer that vanished must not hold a row: find out in seconds.
            ("tcp_keepalives_idle", "5".into()),
            ("tcp_keepalives_interval", "2".into()),
            ("tcp_keepalives_count", "3".into()),
            ("tcp_user_timeout", ms(config.limits.statement)),
        ])
    }

    fn as_begin(&self) -> String {
        let mut sql = String::from("BEGIN ISOLATION LEVEL READ COMMITTED");
        // The server's side of the connection is PgBouncer's, not ours to tune.
        for (name, value) in self.0.iter().filter(|(name, _)| !name.starts_with("tcp_")) {
            sql.push_str(&format!("; SET LOCAL {name} = '{value}'"));
        }
        sql
    }

    fn as_options(&self) -> String {
        let mut options = String::from("-c default_transaction_isolation=read\\ committed");
        for (name, value) in &self.0 {
            options.push_str(&format!(" -c {name}={value}"));
        }
        options
    }
}

/// Opens connections and watches what comes with them.
struct Connector {
    pgbouncer: bool,
    statement_limit: Duration,
    warnings: Arc<AtomicU64>,
}

type Connecting<'a> = Pin<
    Box<dyn Future<Output = Result<(Client, JoinHandle<()>), tokio_postgres::Error>> + Send + 'a>,
>;

impl Connect for Connector {
    fn connect(&self, config: &Config) -> Connecting<'_> {
        let config = config.clone();
        Box::pin(async move {
            let (client, mut connection) = config.connect(NoTls).await?;
            let greeted = Arc::new(AtomicBool::new(false));
            let in_use = Arc::clone(&greeted);
            let warnings = Arc::clone(&self.warnings);
            let driver = AbortOnDropHandle::new(tokio::spawn(async move {
                while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
                    match message {
                        Ok(AsyncMessage::Notice(notice))
                            if notice.parsed_severity() == Some(Severity::Warning) =>
                        {
                            tracing::warn!(warning = notice.message(), "the database warns");
                            if in_use.load(Ordering::Acquire) {
                                warnings.fetch_add(1, Ordering::AcqRel);
                            }
                        }
                        Ok(_) => {}
                        Err(error) => {
                            tracing::debug!(%error, "a database connection ended");
                            break;
                        }
                    }
                }
            }));
            // Waits, too, until the greeting's own notices have passed, such as
            // one about collation versions: they are about no commit.
            client.batch_execute(&self.greeting()).await?;
            greeted.store(true, Ordering::Release);
            // From here the pool's wrapper owns it, and aborts it on drop.
            Ok((client, driver.detach()))
        })
    }
}

impl Connector {
    /// Sent once on each new connection.
    fn greeting(&self) -> String {
        if self.pgbouncer {
            return "SELECT 1".into();
        }
        // Unknown before 17, where naming it at start-up would be refused.
        format!(
            "SELECT set_config('transaction_timeout', '{}ms', false) \
             WHERE current_setting('server_version_num')::integer >= 170000",
            (self.statement_limit + GRACE).as_millis()
        )
    }
}
