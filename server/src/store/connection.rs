//! How a connection to Postgres is opened, and what is set on it.
//!
//! What a statement depends on is set by us and not merely found: isolation,
//! `synchronous_commit`, time limits, and the plan settings that keep a
//! statement planned on an empty table from scanning a full one. On a direct
//! connection these are start-up options, which a reload of the server's
//! configuration does not touch. Behind PgBouncer in transaction mode a plain
//! `SET` would be inherited by another client, so they are what each
//! transaction begins with.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::Connect;
use tokio::task::JoinHandle;
use tokio_postgres::{
    AsyncMessage, Client, Config, NoTls, config::TargetSessionAttrs, error::Severity,
};
use tokio_util::task::AbortOnDropHandle;

use super::config::{DatabaseUrl, StoreConfig};

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
        let mut pg = client_config(url, config);
        if !config.pgbouncer {
            // As the pool will, so that a pooler that refuses them shows at once.
            Settings::new(config).add_to(&mut pg);
        }
        let (client, connection) = pg.connect(NoTls).await?;
        #[expect(clippy::disallowed_methods, reason = "owned by the connection itself")]
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
pub(super) fn client_config(url: &DatabaseUrl, config: &StoreConfig) -> Config {
    let mut pg = url.client_config();
    if pg.get_application_name().is_none() {
        pg.application_name("fencepostd");
    }
    pg.connect_timeout(config.limits.connect)
        .tcp_user_timeout(config.limits.statement)
        .keepalives(true)
        .keepalives_idle(Duration::from_secs(5))
        .keepalives_interval(Duration::from_secs(2))
        .keepalives_retries(3)
        // With several hosts, this finds the primary.
        .target_session_attrs(TargetSessionAttrs::ReadWrite);
    pg
}

/// What every statement depends on.
pub(super) struct Settings(Vec<(&'static str, String)>);

impl Settings {
    pub(super) fn new(config: &StoreConfig) -> Self {
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

    /// For each transaction, behind PgBouncer.
    pub(super) fn as_begin(&self) -> String {
        let mut sql = String::from("BEGIN ISOLATION LEVEL READ COMMITTED");
        // The server's side of the connection is PgBouncer's, not ours to tune.
        for (name, value) in self.0.iter().filter(|(name, _)| !name.starts_with("tcp_")) {
            sql.push_str(&format!("; SET LOCAL {name} = '{value}'"));
        }
        sql
    }

    /// As start-up options of a direct connection; the last one given wins.
    pub(super) fn add_to(&self, pg: &mut Config) {
        let mut options = pg.get_options().unwrap_or_default().to_owned();
        options.push_str(" -c default_transaction_isolation=read\\ committed");
        for (name, value) in &self.0 {
            options.push_str(&format!(" -c {name}={value}"));
        }
        pg.options(options);
    }
}

/// Opens connections and watches what comes with them.
pub(super) struct Connector {
    /// Sent once on each new connection.
    greeting: String,
    /// How many WARNINGs came after it.
    warnings: Arc<AtomicU64>,
}

impl Connector {
    pub(super) fn new(config: &StoreConfig, warnings: Arc<AtomicU64>) -> Self {
        let greeting = if config.pgbouncer {
            "SELECT 1".to_owned()
        } else {
            // Unknown before 17, where naming it at start-up would be refused.
            format!(
                "SELECT set_config('transaction_timeout', '{}ms', false) \
                 WHERE current_setting('server_version_num')::integer >= 170000",
                config.limits.patience().as_millis()
            )
        };
        Self { greeting, warnings }
    }
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
            #[expect(clippy::disallowed_methods, reason = "owned by the connection itself")]
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
            client.batch_execute(&self.greeting).await?;
            greeted.store(true, Ordering::Release);
            // From here the pool's wrapper owns it, and aborts it on drop.
            Ok((client, driver.detach()))
        })
    }
}
