//! What the store must be told: where the database is, and how patient to be.

use std::{fmt, str::FromStr, time::Duration};

use fencepost_tls::postgres::{self, PostgresTls};
use tokio_postgres::{
    Config,
    config::{Host, SslMode},
};

/// Why a database URL was refused. Says nothing of what is in it.
pub(crate) use postgres::BadUrl as BadDatabaseUrl;

/// How the store talks to its database.
#[derive(Debug, Clone)]
pub(crate) struct StoreConfig {
    /// Whether PgBouncer in transaction mode stands in between.
    pub(crate) pgbouncer: bool,
    /// Connections of this server. Too few: calls wait for one. Too many: they
    /// take from what the database allows to everybody.
    pub(crate) pool_size: usize,
    /// Work in the database at one time; more is refused as overload.
    pub(crate) max_in_flight: usize,
    pub(crate) synchronous_commit: SynchronousCommit,
    /// Serve on a database with `fsync=off`, which forgets tokens in a crash.
    pub(crate) allow_fsync_off: bool,
    /// How long a row stays after its lease ended.
    pub(crate) purge_retention: Duration,
    pub(crate) limits: Limits,
}

/// When a commit counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum SynchronousCommit {
    /// Flushed here and, with a synchronous standby, there.
    On,
    /// And applied there, for readers on the standby.
    RemoteApply,
}

impl SynchronousCommit {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::RemoteApply => "remote_apply",
        }
    }
}

/// How long each leg may take, so that all of it fits into a call's budget.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Opening a connection.
    pub(super) connect: Duration,
    /// Waiting for a free one.
    pub(super) wait: Duration,
    /// Waiting for a row that somebody else has locked.
    pub(super) lock: Duration,
    /// A whole statement.
    pub(super) statement: Duration,
    /// A look at the health of the database, waiting for a connection included.
    pub(super) probe: Duration,
}

impl Limits {
    /// The legs of a call that is answered within `budget`.
    pub(crate) fn within(budget: Duration) -> Self {
        Self {
            connect: budget.mul_f64(0.4),
            wait: budget.mul_f64(0.6),
            lock: budget.mul_f64(0.4),
            statement: budget.mul_f64(0.8),
            probe: budget.mul_f64(0.4),
        }
    }

    /// How long after its call began a statement may still reach the database.
    pub(super) fn longest_call(&self) -> Duration {
        self.wait + self.connect + 2 * self.patience()
    }

    /// How long we wait for a statement: the server's own limit comes first, so
    /// that we hear from it.
    pub(super) fn patience(&self) -> Duration {
        self.statement + Duration::from_millis(500)
    }
}

/// Where the database is. It holds a password, so it is never printed.
#[derive(Clone)]
pub(crate) struct DatabaseUrl {
    config: Box<Config>,
    tls: PostgresTls,
}

impl DatabaseUrl {
    /// One configuration for each host, in the URL's order, with what is common
    /// to them. The driver itself would give the first host all of the time.
    pub(super) fn hosts(&self) -> Vec<Config> {
        let all = &self.config;
        let count = all.get_hosts().len().max(all.get_hostaddrs().len());
        (0..count).map(|index| self.host(index)).collect()
    }

    fn host(&self, index: usize) -> Config {
        let all = &self.config;
        let mut one = Config::new();
        match all.get_hosts().get(index) {
            Some(Host::Tcp(name)) => _ = one.host(name),
            #[cfg(unix)]
            Some(Host::Unix(path)) => _ = one.host_path(path),
            None => {}
        }
        if let Some(address) = all.get_hostaddrs().get(index) {
            one.hostaddr(*address);
            if one.get_hosts().is_empty() {
                // The name that its certificate is to have.
                one.host(address.to_string());
            }
        }
        // One port stands for all hosts.
        let ports = all.get_ports();
        if let Some(port) = ports.get(index).or(ports.first()) {
            one.port(*port);
        }
        if let Some(user) = all.get_user() {
            one.user(user);
        }
        if let Some(password) = all.get_password() {
            one.password(password);
        }
        if let Some(name) = all.get_dbname() {
            one.dbname(name);
        }
        if let Some(options) = all.get_options() {
            one.options(options);
        }
        if let Some(name) = all.get_application_name() {
            one.application_name(name);
        }
        // A Unix socket has no TLS, and needs none.
        let ssl_mode = match one.get_hosts() {
            [Host::Unix(_)] => SslMode::Disable,
            _ => all.get_ssl_mode(),
        };
        one.ssl_mode(ssl_mode)
            .ssl_negotiation(all.get_ssl_negotiation())
            .channel_binding(all.get_channel_binding());
        one
    }

    /// Where it leads, for the log: hosts and ports, without names and passwords.
    pub(crate) fn place(&self) -> String {
        let places = self.hosts().into_iter().map(|host| {
            let port = host.get_ports().first().copied().unwrap_or(5432);
            match (host.get_hostaddrs(), host.get_hosts()) {
                (_, [Host::Tcp(name)]) => format!("{name}:{port}"),
                (_, [Host::Unix(folder)]) => folder.display().to_string(),
                ([address], _) => format!("{address}:{port}"),
                _ => String::new(),
            }
        });
        places.collect::<Vec<_>>().join(",")
    }

    pub(super) fn tls(&self) -> PostgresTls {
        self.tls.clone()
    }
}

impl FromStr for DatabaseUrl {
    type Err = BadDatabaseUrl;

    fn from_str(url: &str) -> Result<Self, BadDatabaseUrl> {
        let (config, tls) = postgres::parse(url)?;
        Ok(Self {
            config: Box::new(config),
            tls,
        })
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DatabaseUrl(..)")
    }
}

#[cfg(test)]
mod tests {
    use tokio_postgres::{Config, config::SslMode};

    use super::{BadDatabaseUrl, DatabaseUrl};

    #[test]
    fn a_url_is_judged_without_repeating_it() {
        let parse = |url: &str| url.parse::<DatabaseUrl>().map(|_| ());
        assert_eq!(parse("postgresql://u:secret@127.0.0.1:5432/locks"), Ok(()));
        assert_eq!(parse("postgresql://u@a:5432,b:5433/locks"), Ok(()));
        assert_eq!(parse("host=/run/pg user=u dbname=locks"), Ok(()));
        assert_eq!(
            parse("postgresql://u:secret@:nonsense"),
            Err(BadDatabaseUrl::Malformed)
        );
        assert_eq!(parse("postgresql:///locks"), Err(BadDatabaseUrl::NoHost));
        assert_eq!(
            parse("postgresql://u:secret@h/l?sslmode=verify-full"),
            Err(BadDatabaseUrl::NoRoots)
        );
        let mixed: DatabaseUrl = "host=/run/pg,h hostaddr=127.0.0.1,127.0.0.2 sslmode=require"
            .parse()
            .unwrap();
        let modes: Vec<_> = mixed.hosts().iter().map(Config::get_ssl_mode).collect();
        assert_eq!(modes, [SslMode::Disable, SslMode::Require]);
        let several: DatabaseUrl = "postgresql://u@a,b:5433/locks".parse().unwrap();
        let ports: Vec<_> = several
            .hosts()
            .iter()
            .map(|one| one.get_ports().to_vec())
            .collect();
        assert_eq!(ports, [[5432], [5433]]);
        let url: DatabaseUrl = "postgresql://u:secret@h/l".parse().unwrap();
        assert!(!format!("{url:?}").contains("secret"));
    }
}
