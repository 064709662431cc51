//! The flags of `fencepostd`, each with a `FENCEPOST_*` twin in the
//! environment. What they mean is for [`crate::config`].

use std::{iter, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{
    Args, CommandFactory as _, Parser, Subcommand,
    builder::BoolishValueParser,
    error::{ContextKind, ContextValue},
};

use crate::{
    store::SynchronousCommit,
    telemetry::{LogFormat, check_filter},
};

/// A distributed lock server: named locks with a TTL and a fencing token,
/// over gRPC, kept in PostgreSQL.
#[derive(Debug, Parser)]
#[command(name = "fencepostd", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,

    #[command(flatten)]
    pub(crate) tls: TlsArgs,

    #[command(flatten)]
    pub(crate) database: DatabaseArgs,

    /// The form of the log on standard error.
    #[arg(
        long,
        env = "FENCEPOST_LOG_FORMAT",
        value_enum,
        default_value = "text",
        global = true
    )]
    pub(crate) log_format: LogFormat,

    /// What is logged: a level, or directives such as info,fencepostd=debug.
    #[arg(long, env = "FENCEPOST_LOG", default_value = "info", value_parser = check_filter, global = true)]
    pub(crate) log: String,
}

/// Without a command, the server serves.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Command {
    /// Make or update the schema, and stop.
    Migrate,
    /// Move the fencing tokens ahead by hand: after a data-only restore beside
    /// running servers, or after a virtual machine was rolled back together with its memory.
    AdvanceTokens {
        /// Go at least this far. Never lowers.
        #[arg(long, value_name = "TOKEN", value_parser = clap::value_parser!(i64).range(1..))]
        at_least: Option<i64>,
        /// Go there although it is more than a year ahead of the clock.
        #[arg(long, requires = "at_least")]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Where gRPC is served.
    #[arg(long, env = "FENCEPOST_LISTEN", default_value = "127.0.0.1:50051", value_parser = address)]
    pub(crate) listen: SocketAddr,

    /// Where /livez, /readyz and /metrics are served over HTTP.
    #[arg(long, env = "FENCEPOST_HTTP_LISTEN", default_value = "127.0.0.1:50052", value_parser = address)]
    pub(crate) http_listen: SocketAddr,

    /// A second gRPC port with the health service alone, always in the clear.
    #[arg(long, env = "FENCEPOST_HEALTH_LISTEN", value_parser = address)]
    pub(crate) health_listen: Option<SocketAddr>,

    /// The shortest TTL that is granted.
    #[arg(long, env = "FENCEPOST_MIN_TTL", default_value = "500ms", value_parser = humantime::parse_duration)]
    pub(crate) min_ttl: Duration,

    /// The longest TTL that is granted.
    #[arg(long, env = "FENCEPOST_MAX_TTL", default_value = "24h", value_parser = humantime::parse_duration)]
    pub(crate) max_ttl: Duration,

    /// How long a call may take before it is answered DEADLINE_EXCEEDED.
    #[arg(long, env = "FENCEPOST_REQUEST_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration,
          global = true)]
    pub(crate) request_timeout: Duration,

    /// How long a KeepAlive stream renews at most. A holder that hangs blocks
    /// its lock for this long plus one TTL.
    #[arg(
        long,
        env = "FENCEPOST_KEEPALIVE_MAX_DURATION",
        default_value = "10m",
        value_parser = humantime::parse_duration
    )]
    pub(crate) keepalive_max_duration: Duration,

    /// KeepAlive streams that may be open at one time. More are refused as
    /// RESOURCE_EXHAUSTED.
    #[arg(long, env = "FENCEPOST_KEEPALIVE_MAX_STREAMS", default_value = "50000", value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) keepalive_max_streams: u32,

    /// How long a name is kept after its last lease ended.
    #[arg(long, env = "FENCEPOST_PURGE_RETENTION", default_value = "1h", value_parser = humantime::parse_duration)]
    pub(crate) purge_retention: Duration,

    /// The least that --purge-retention may be. For tests, which cannot wait: a
    /// replica with longer limits than ours may still hold a token that it drew
    /// before a purged row went.
    #[arg(
        long,
        env = "FENCEPOST_PURGE_RETENTION_FLOOR",
        default_value = "1m",
        value_parser = humantime::parse_duration,
        hide = true
    )]
    pub(crate) purge_retention_floor: Duration,

    /// After SIGTERM: how long calls are still taken while health says
    /// NOT_SERVING, so that balancers can look away first.
    #[arg(long, env = "FENCEPOST_DRAIN_DELAY", default_value = "3s", value_parser = humantime::parse_duration)]
    pub(crate) drain_delay: Duration,

    /// After SIGTERM: when the process ends, whatever clients do. Includes the
    /// delay.
    #[arg(long, env = "FENCEPOST_DRAIN_TIMEOUT", default_value = "25s", value_parser = humantime::parse_duration)]
    pub(crate) drain_timeout: Duration,

    /// Tell this many prefixes of resources apart in metrics: what comes before the
    /// first / or . of the name. They are shown to whoever reads the metrics.
    #[arg(long, env = "FENCEPOST_METRICS_PREFIXES", default_value = "0", value_name = "N",
          value_parser = clap::value_parser!(u16).range(..=1000))]
    pub(crate) metrics_prefixes: u16,

    /// Export traces by OTLP over gRPC to a collector, such as http://127.0.0.1:4317.
    /// Unset: none.
    // One with a password in it is refused, and must not be printed either.
    #[arg(
        long,
        env = "FENCEPOST_OTLP_ENDPOINT",
        hide_env_values = true,
        value_name = "URL"
    )]
    pub(crate) otlp_endpoint: Option<String>,

    /// How many of the calls are traced, from 0 to 1, whose callers do not say it
    /// themselves.
    #[arg(
        long,
        env = "FENCEPOST_OTLP_SAMPLE_RATIO",
        default_value = "1",
        value_name = "RATIO"
    )]
    pub(crate) otlp_sample_ratio: f64,

    /// Tell in the log, as JSON, who acquired, released and lost what.
    #[arg(long, env = "FENCEPOST_AUDIT_LOG", value_parser = BoolishValueParser::new())]
    pub(crate) audit_log: bool,
}

/// Of the port of --listen.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// A PEM file with the server's certificate, and those that lead to its root.
    /// Files that change are used for new connections.
    #[arg(long, env = "FENCEPOST_TLS_CERT", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// A PEM file with its private key.
    #[arg(long, env = "FENCEPOST_TLS_KEY", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// A PEM file with the roots of clients' certificates. With it, clients must
    /// have one.
    #[arg(long, env = "FENCEPOST_TLS_CLIENT_CA", value_name = "FILE")]
    pub(crate) tls_client_ca: Option<PathBuf>,

    /// Serve without TLS on an address that other machines can reach. Whoever
    /// reaches it can take and release every lock, and read what others send.
    #[arg(long, env = "FENCEPOST_ALLOW_PLAINTEXT", value_parser = BoolishValueParser::new())]
    pub(crate) allow_plaintext: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DatabaseArgs {
    /// Where the database is: postgresql://user:password@host:port/name. Also
    /// DATABASE_URL. Other users of the machine can read flags: prefer a file.
    /// Without any, a private Postgres is started in the data directory.
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        global = true,
        conflicts_with = "database_url_file"
    )]
    pub(crate) database_url: Option<String>,

    /// A file that holds the database URL.
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL_FILE",
        value_name = "FILE",
        global = true
    )]
    pub(crate) database_url_file: Option<PathBuf>,

    /// Connections to the database.
    #[arg(long, env = "FENCEPOST_DATABASE_POOL_SIZE", default_value = "16", value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) database_pool_size: u16,

    /// PgBouncer in transaction mode stands before the database.
    #[arg(long, env = "FENCEPOST_PGBOUNCER", global = true, value_parser = BoolishValueParser::new())]
    pub(crate) pgbouncer: bool,

    /// Calls that may be at work in the database or wait for a connection at
    /// one time. More are refused as RESOURCE_EXHAUSTED.
    #[arg(long, env = "FENCEPOST_MAX_IN_FLIGHT", default_value = "4096", value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_in_flight: u32,

    /// When a commit counts as done. With a synchronous standby, both wait for it.
    #[arg(
        long,
        env = "FENCEPOST_SYNCHRONOUS_COMMIT",
        value_enum,
        default_value = "on"
    )]
    pub(crate) synchronous_commit: SynchronousCommit,

    /// Serve on a database with fsync=off. A crash then forgets tokens.
    #[arg(long, env = "FENCEPOST_ALLOW_FSYNC_OFF", global = true, value_parser = BoolishValueParser::new())]
    pub(crate) allow_fsync_off: bool,

    /// Where the private Postgres lives [root: /var/lib/fencepost, else
    /// $XDG_STATE_HOME/fencepost].
    #[arg(long, env = "FENCEPOST_DATA_DIR", value_name = "DIR", global = true)]
    pub(crate) data_dir: Option<PathBuf>,
}

/// Where to listen. Names are not looked up.
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse()
        .map_err(|_| "an IP address and a port are wanted, such as 0.0.0.0:50051 or [::]:50051")
}

/// Takes URLs out of a message about bad usage: one that landed in the wrong
/// place has its password in it all the same.
pub(crate) fn without_urls(mut error: clap::Error) -> clap::Error {
    for kind in [
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
        ContextKind::InvalidValue,
    ] {
        let is_secret = matches!(
            error.get(kind),
            Some(ContextValue::String(text))
                if ["://", "@", "password"].iter().any(|part| text.contains(part))
        );
        if is_secret {
            error.insert(kind, ContextValue::String("a database URL".to_owned()));
        }
    }
    error
}

/// What the environment says beside the flags' twins.
#[derive(Debug)]
pub(crate) struct Environment {
    pub(crate) database_url: Option<std::ffi::OsString>,
    pub(crate) xdg_state_home: Option<std::ffi::OsString>,
    pub(crate) home: Option<std::ffi::OsString>,
}

#[expect(clippy::disallowed_methods, reason = "its one home")]
impl Environment {
    pub(crate) fn read() -> Self {
        Self {
            database_url: std::env::var_os("DATABASE_URL"),
            xdg_state_home: std::env::var_os("XDG_STATE_HOME"),
            home: std::env::var_os("HOME"),
        }
    }

    /// Names of variables that look like a flag's twin and are none: a mistyped one would
    /// be left out without a word.
    pub(crate) fn unknown() -> Vec<String> {
        let command = Cli::command();
        let twins: Vec<_> = iter::once(&command)
            .chain(command.get_subcommands())
            .flat_map(clap::Command::get_arguments)
            .filter_map(clap::Arg::get_env)
            .collect();
        std::env::vars_os()
            .filter(|(name, _)| !twins.contains(&name.as_os_str()))
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("FENCEPOST_") && !is_of_a_service(name))
            .collect()
    }
}

/// Kubernetes sets these for a service called fencepost.
fn is_of_a_service(name: &str) -> bool {
    name == "FENCEPOST_PORT"
        || ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"]
            .iter()
            .any(|part| name.contains(part))
}
