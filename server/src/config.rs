//! What the flags mean, checked once before anything is bound or connected.

use std::{fs, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use fencepost_tls::{BadFile, PemFile};

use crate::{
    args::{Cli, Environment, TlsArgs},
    keep_alive::KeepAliveConfig,
    lock::TtlLimits,
    private_postgres::default_data_dir,
    service::{self, ServiceConfig},
    store::{BadDatabaseUrl, DatabaseUrl, Limits, StoreConfig},
    tls::{Tls, TlsFiles},
    trace::TraceConfig,
};

/// The configuration of a server.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) listen: SocketAddr,
    pub(crate) http_listen: SocketAddr,
    pub(crate) health_listen: Option<SocketAddr>,
    pub(crate) service: ServiceConfig,
    pub(crate) keep_alive: KeepAliveConfig,
    pub(crate) database: DatabaseSource,
    pub(crate) store: StoreConfig,
    pub(crate) drain: DrainConfig,
    /// How many prefixes of resources the metrics tell apart.
    pub(crate) metrics_prefixes: usize,
    /// Where traces go, if anywhere.
    pub(crate) traces: Option<TraceConfig>,
}

/// How the server stops.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrainConfig {
    /// How long calls are still taken while health says NOT_SERVING.
    pub(crate) delay: Duration,
    /// When the process ends, counted from the signal.
    pub(crate) timeout: Duration,
}

/// Where the database is.
#[derive(Debug)]
pub(crate) enum DatabaseSource {
    Url(DatabaseUrl),
    /// A Postgres of our own in this directory.
    Private(PathBuf),
}

/// What is wrong with the flags. Names them, and repeats no secret.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error(transparent)]
    DatabaseUrl(#[from] BadDatabaseUrl),
    #[error("--database-url-file cannot be read")]
    DatabaseUrlFile(#[source] std::io::Error),
    #[error("{0} is empty: leave it out, or name the database")]
    EmptyDatabaseUrl(&'static str),
    #[error("--pgbouncer needs a database URL")]
    PgBouncer,
    #[error(
        "--database-url-file is needed, or --data-dir for a private Postgres: neither XDG_STATE_HOME nor HOME is set"
    )]
    NoDataDir,
    #[error(transparent)]
    TlsFile(#[from] BadFile),
    #[error("--tls-cert and --tls-key go together")]
    HalfAnIdentity,
    #[error("--tls-client-ca needs --tls-cert and --tls-key")]
    ClientCa,
    #[error(
        "--listen is an address that other machines can reach: give it TLS with --tls-cert and --tls-key, \
         or ask for plaintext with --allow-plaintext"
    )]
    Plaintext,
    #[error("--min-ttl must be at least 1ms and not above --max-ttl")]
    MinTtl,
    #[error("--max-ttl must be at most 365days")]
    MaxTtl,
    #[error("--request-timeout must be 100ms to 10m")]
    RequestTimeout,
    #[error("--keepalive-max-duration must be at least --min-ttl and at most 1day")]
    KeepaliveMaxDuration,
    #[error(
        "--purge-retention must be at least 1m, ten times --request-timeout (5s unless given), and at most ten years"
    )]
    PurgeRetention,
    #[error("--otlp-endpoint must be http://host:port")]
    OtlpEndpoint,
    #[error("--otlp-sample-ratio must be 0 to 1")]
    OtlpSampleRatio,
    #[error("--drain-timeout (25s unless given) must be above --drain-delay")]
    DrainTimeout,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Config {
    pub(crate) fn new(cli: Cli, environment: Environment) -> Result<Self, ConfigError> {
        let Cli {
            command,
            serve,
            tls,
            database,
            log_format: _,
            log: _,
        } = cli;
        let ttl = TtlLimits {
            min: serve.min_ttl,
            max: serve.max_ttl,
        };
        if ttl.min < Duration::from_millis(1) || ttl.min > ttl.max {
            return Err(ConfigError::MinTtl);
        }
        if ttl.max > DAY * 365 {
            return Err(ConfigError::MaxTtl);
        }
        let budget = serve.request_timeout;
        if budget < Duration::from_millis(100) || budget > Duration::from_secs(600) {
            return Err(ConfigError::RequestTimeout);
        }
        if serve.keepalive_max_duration < ttl.min || serve.keepalive_max_duration > DAY {
            return Err(ConfigError::KeepaliveMaxDuration);
        }
        // No statement of ours may be alive when a row it knew of goes.
        let least = serve.purge_retention_floor.max(budget * 10);
        if serve.purge_retention < least || serve.purge_retention > DAY * 3650 {
            return Err(ConfigError::PurgeRetention);
        }
        if serve.drain_timeout <= serve.drain_delay {
            return Err(ConfigError::DrainTimeout);
        }
        // The other commands listen to nobody.
        let tls = match command {
            None => listener_tls(tls, serve.listen)?,
            Some(_) => None,
        };
        if !(0.0..=1.0).contains(&serve.otlp_sample_ratio) {
            return Err(ConfigError::OtlpSampleRatio);
        }
        let traces = serve
            .otlp_endpoint
            .filter(|endpoint| !endpoint.is_empty())
            .map(|endpoint| traces(endpoint, serve.otlp_sample_ratio))
            .transpose()?;
        let source = database_source(
            database.database_url,
            database.database_url_file,
            database.data_dir,
            environment,
        )?;
        if database.pgbouncer && matches!(source, DatabaseSource::Private(_)) {
            return Err(ConfigError::PgBouncer);
        }
        Ok(Self {
            listen: serve.listen,
            http_listen: serve.http_listen,
            health_listen: serve.health_listen,
            service: ServiceConfig {
                ttl,
                request_timeout: budget,
                reserved_handles: usize::from(database.database_pool_size)
                    + serve.health_listen.map_or(0, |_| service::PROBES),
                tls,
            },
            keep_alive: KeepAliveConfig {
                max_duration: serve.keepalive_max_duration,
                max_streams: usize::try_from(serve.keepalive_max_streams).unwrap_or(usize::MAX),
                singles: usize::from(database.database_pool_size).div_ceil(4),
                request_timeout: budget,
            },
            database: source,
            store: StoreConfig {
                pgbouncer: database.pgbouncer,
                pool_size: database.database_pool_size.into(),
                max_in_flight: usize::try_from(database.max_in_flight).unwrap_or(usize::MAX),
                synchronous_commit: database.synchronous_commit,
                allow_fsync_off: database.allow_fsync_off,
                purge_retention: serve.purge_retention,
                limits: Limits::within(budget),
            },
            drain: DrainConfig {
                delay: serve.drain_delay,
                timeout: serve.drain_timeout,
            },
            metrics_prefixes: serve.metrics_prefixes.into(),
            traces,
        })
    }
}

/// TLS of the port of clients, if it has any; and it must, unless none can be
/// eavesdropped on, or nobody minds.
fn listener_tls(args: TlsArgs, listen: SocketAddr) -> Result<Option<Arc<Tls>>, ConfigError> {
    let client_ca = args.tls_client_ca;
    match (args.tls_cert, args.tls_key) {
        (Some(certificate), Some(key)) => {
            let tls = Tls::new(TlsFiles {
                certificate: PemFile::new("--tls-cert", certificate),
                key: PemFile::new("--tls-key", key),
                client_ca: client_ca.map(|path| PemFile::new("--tls-client-ca", path)),
            })?;
            Ok(Some(Arc::new(tls)))
        }
        (None, None) if client_ca.is_some() => Err(ConfigError::ClientCa),
        (None, None) if listen.ip().to_canonical().is_loopback() || args.allow_plaintext => {
            Ok(None)
        }
        (None, None) => Err(ConfigError::Plaintext),
        _ => Err(ConfigError::HalfAnIdentity),
    }
}

/// No credentials: they would be in the process list.
fn traces(endpoint: String, ratio: f64) -> Result<TraceConfig, ConfigError> {
    let uri: http::Uri = endpoint.parse().map_err(|_| ConfigError::OtlpEndpoint)?;
    let is_plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/");
    let is_bare = uri.authority().is_some_and(|at| !at.as_str().contains('@'));
    if !(is_plain && is_bare && uri.query().is_none()) {
        return Err(ConfigError::OtlpEndpoint);
    }
    Ok(TraceConfig { endpoint, ratio })
}

/// The first of these that is set: the URL, the file, the data directory, plain
/// `DATABASE_URL`, the default data directory.
fn database_source(
    url: Option<String>,
    file: Option<PathBuf>,
    data_dir: Option<PathBuf>,
    environment: Environment,
) -> Result<DatabaseSource, ConfigError> {
    // An empty one is a template without its value, and not passed over: locks would live
    // in another database than was meant, and each replica in one of its own.
    if let Some(url) = url {
        if url.is_empty() {
            return Err(ConfigError::EmptyDatabaseUrl("--database-url"));
        }
        return Ok(DatabaseSource::Url(url.parse()?));
    }
    if let Some(file) = file {
        let url = fs::read_to_string(file).map_err(ConfigError::DatabaseUrlFile)?;
        return Ok(DatabaseSource::Url(url.parse()?));
    }
    if let Some(dir) = data_dir {
        return Ok(DatabaseSource::Private(dir));
    }
    if let Some(url) = environment.database_url {
        if url.is_empty() {
            return Err(ConfigError::EmptyDatabaseUrl("DATABASE_URL"));
        }
        let url = url.into_string().map_err(|_| BadDatabaseUrl::Malformed)?;
        return Ok(DatabaseSource::Url(url.parse()?));
    }
    let is_root = rustix::process::geteuid().is_root();
    default_data_dir(is_root, environment.xdg_state_home, environment.home)
        .map(DatabaseSource::Private)
        .ok_or(ConfigError::NoDataDir)
}
