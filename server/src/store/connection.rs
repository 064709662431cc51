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
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::Connect;
use fencepost_tls::postgres::{PostgresTls, Stream};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::{
    sync::{Notify, futures::OwnedNotified},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_postgres::{
    AsyncMessage, Client, Config, Connection, SimpleQueryMessage, Socket,
    config::TargetSessionAttrs, error::Severity,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    config::{DatabaseUrl, StoreConfig},
    failure::is_refused_as_read_only,
    pooled::PooledSessions,
};
use crate::telemetry::Chain;

/// Where to connect, and with which settings: one entry for each host of the
/// URL, in its order.
///
/// Shared by all pools: connections to two servers at a time, one of which may
/// be an old primary that nobody has stopped, would grant a lock twice. So once
/// one connection meets another running Postgres, all that were made before are
/// not used again.
pub(super) struct Hosts {
    hosts: Vec<Config>,
    tls: PostgresTls,
    /// The host that was connected to last.
    preferred: AtomicUsize,
    limit: Duration,
    met: Mutex<Option<Met>>,
    let_go: Arc<Notify>,
    /// Set behind a pooler, whose sessions outlive our connections.
    pooled: Option<PooledSessions>,
}

/// The running Postgres that was met last.
struct Met {
    /// When it started, in seconds since 1970.
    postmaster_start: String,
    since: std::time::Instant,
}

impl Hosts {
    pub(super) fn new(url: &DatabaseUrl, config: &StoreConfig) -> Self {
        let settings = Settings::new(config);
        let mut hosts = url.hosts();
        for pg in &mut hosts {
            if pg.get_application_name().is_none() {
                pg.application_name("fencepostd");
            }
            pg.tcp_user_timeout(config.limits.statement)
                .keepalives(true)
                .keepalives_idle(Duration::from_secs(5))
                .keepalives_interval(Duration::from_secs(2))
                .keepalives_retries(3)
                // With several hosts, this finds the primary.
                .target_session_attrs(TargetSessionAttrs::ReadWrite);
            if !config.pgbouncer {
                settings.add_to(pg);
            }
        }
        Self {
            hosts,
            tls: url.tls(),
            preferred: AtomicUsize::new(0),
            limit: config.limits.connect,
            met: Mutex::new(None),
            let_go: Arc::default(),
            pooled: config.pgbouncer.then(PooledSessions::default),
        }
    }

    /// Notes which Postgres a connection has met that was begun at `begun`.
    /// False when a later one has met another meanwhile.
    fn meet(&self, postmaster_start: String, begun: std::time::Instant) -> bool {
        let mut met = self.met();
        if let Some(met) = &*met {
            if met.postmaster_start == postmaster_start {
                return true;
            }
            if begun < met.since {
                return false;
            }
            tracing::warn!(
                "another Postgres answers, or it restarted: earlier connections are dropped"
            );
        }
        *met = Some(Met {
            postmaster_start,
            since: Instant::now().into_std(),
        });
        drop(met);
        self.let_go();
        true
    }

    /// Whether a connection was made before another Postgres was met.
    pub(super) fn is_stale(&self, created: std::time::Instant) -> bool {
        self.met().as_ref().is_some_and(|met| created < met.since)
    }

    /// Waits for no overdue statement any longer: the database does not answer
    /// at all, so its sessions are gone, or new ones cannot be had either.
    pub(super) fn let_go(&self) {
        self.let_go.notify_waiters();
    }

    /// Ends with the next [`let_go`](Self::let_go) from this call on.
    pub(super) fn told_to_let_go(&self) -> OwnedNotified {
        Arc::clone(&self.let_go).notified_owned()
    }

    fn met(&self) -> MutexGuard<'_, Option<Met>> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of them, for those who want just one.
    pub(super) fn first(&self) -> Config {
        self.hosts.first().cloned().unwrap_or_default()
    }

    /// Tries the hosts in turn, beginning with the one that worked last. The next has
    /// its turn when one refuses, or has kept us waiting for a share of the time,
    /// greeting included: one that hangs keeps no other from being found. It is not
    /// given up for that, since it may be the primary, on a busy machine, and all
    /// others will refuse. Our caller allows all of it so long.
    async fn connect(&self) -> Result<Connected, tokio_postgres::Error> {
        let count = self.hosts.len();
        let share = self.limit / u32::try_from(count).unwrap_or(u32::MAX);
        let first = self.preferred.load(Ordering::Relaxed);
        let begin = |tried: usize| async move {
            let index = (first + tried) % count;
            (index, self.connect_to(&self.hosts[index]).await)
        };
        let mut attempts = FuturesUnordered::from_iter([begin(0)]);
        let mut begun = 1;
        loop {
            let answer = if begun == count {
                attempts.next().await
            } else {
                timeout(share, attempts.next()).await.unwrap_or_default()
            };
            match answer {
                Some((index, Ok(connected))) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(connected);
                }
                Some((_, Err(error))) if begun == count && attempts.is_empty() => {
                    return Err(error);
                }
                Some((_, Err(error))) => {
                    tracing::debug!(error = %Chain(&error), "another host may be the primary");
                }
                None => {}
            }
            if begun < count {
                attempts.push(begin(begun));
                begun += 1;
            }
        }
    }
}

impl Hosts {
    async fn connect_to(&self, host: &Config) -> Result<Connected, tokio_postgres::Error> {
        loop {
            match (self.tls.connect(host).await, &self.pooled) {
                (Err(error), Some(pooled)) if is_refused_as_read_only(&error) => {
                    if !pooled.end_read_only(host, &self.tls).await {
                        return Err(error);
                    }
                }
                (connected, _) => return connected,
            }
        }
    }
}

type Connected = (Client, Connection<Socket, Stream>);

/// A connection outside the pool, for a migration; closed on drop.
pub(super) struct OwnConnection {
    pub(super) client: Client,
    _driver: AbortOnDropHandle<()>,
}

impl OwnConnection {
    /// With the same settings as the pool's, so that a pooler that refuses them
    /// shows at once.
    pub(super) async fn open(hosts: &Hosts) -> Result<Self, tokio_postgres::Error> {
        let (client, connection) = hosts.connect().await?;
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
            // A wait for the standby that was cut short is told as a WARNING.
            ("client_min_messages", "warning".into()),
            ("search_path", "pg_catalog".into()),
            ("enable_seqscan", "off".into()),
            ("enable_bitmapscan", "off".into()),
            ("enable_mergejoin", "off".into()),
            ("jit", "off".into()),
            // Each statement has one good plan, whatever its arguments.
            ("plan_cache_mode", "force_generic_plan".into()),
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
    hosts: Arc<Hosts>,
    /// Sent once on each new connection.
    greeting: String,
    /// How many WARNINGs came after it.
    warnings: Arc<AtomicU64>,
}

impl Connector {
    pub(super) fn new(hosts: Arc<Hosts>, config: &StoreConfig, warnings: Arc<AtomicU64>) -> Self {
        let mut greeting = String::from("SELECT extract(epoch FROM pg_postmaster_start_time())");
        if !config.pgbouncer {
            // Unknown before 17, where naming it at start-up would be refused.
            greeting.push_str(&format!(
                "; SELECT set_config('transaction_timeout', '{}ms', false) \
                 WHERE current_setting('server_version_num')::integer >= 170000",
                config.limits.patience().as_millis()
            ));
        }
        Self {
            hosts,
            greeting,
            warnings,
        }
    }
}

type Connecting<'a> = Pin<
    Box<dyn Future<Output = Result<(Client, JoinHandle<()>), tokio_postgres::Error>> + Send + 'a>,
>;

impl Connect for Connector {
    /// The pool knows one host; we know all.
    fn connect(&self, _: &Config) -> Connecting<'_> {
        Box::pin(async move {
            loop {
                let begun = Instant::now().into_std();
                let (client, driver, postmaster_start) = self.greet().await?;
                if self.hosts.meet(postmaster_start, begun) {
                    // From here the pool's wrapper owns it, and aborts it on drop.
                    return Ok((client, driver.detach()));
                }
            }
        })
    }
}

impl Connector {
    /// A connection, and when the Postgres behind it started.
    async fn greet(
        &self,
    ) -> Result<(Client, AbortOnDropHandle<()>, String), tokio_postgres::Error> {
        let (client, mut connection) = self.hosts.connect().await?;
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
                        tracing::warn!(warning = %Chain(&notice), "the database warns");
                        if in_use.load(Ordering::Acquire) {
                            warnings.fetch_add(1, Ordering::AcqRel);
                        }
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::debug!(error = %Chain(&error), "a database connection ended");
                        break;
                    }
                }
            }
        }));
        // Waits, too, until the greeting's own notices have passed, such as
        // one about collation versions: they are about no commit.
        let answers = client.simple_query(&self.greeting).await?;
        greeted.store(true, Ordering::Release);
        let start = answers.iter().find_map(|answer| match answer {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        let start = start.unwrap_or_default().to_owned();
        Ok((client, driver, start))
    }
}
