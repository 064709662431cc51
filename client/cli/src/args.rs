//! The command line, and the environment that stands in for some of it.

use std::{path::PathBuf, time::Duration};

use clap::{
    Args, Parser, Subcommand,
    error::{ContextKind, ContextValue},
};
use humantime::parse_duration;

use crate::{acquire, fence, get, keepalive, output::Format, release, renew, run, sidecar};

/// Takes, renews, gives back and looks at locks.
#[derive(Debug, Parser)]
#[command(name = "fencepost", version, after_help = crate::exit::HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Where our own exit codes begin, if somebody has asked.
    pub(crate) fn own_exit_codes(&self) -> Option<u8> {
        match &self.command {
            Command::Run(args) => args.own_exit_codes,
            _ => None,
        }
    }
}

/// What every subcommand takes.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// URLs of the servers, replicas of one another, separated by commas; https for
    /// those with TLS.
    // Not parsed here: a bad one is a matter of configuration, not of usage.
    #[arg(
        long,
        global = true,
        env = "FENCEPOST_ENDPOINT",
        default_value = "http://127.0.0.1:50051",
        hide_env_values = true
    )]
    pub(crate) endpoint: String,

    /// A PEM file with the roots of the servers' certificates, for https [default:
    /// those that the machine trusts].
    #[arg(long, global = true, env = "FENCEPOST_TLS_CA", value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,

    /// A PEM file with a certificate to show to servers that ask for one.
    #[arg(long, global = true, env = "FENCEPOST_TLS_CERT", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// A PEM file with its private key.
    #[arg(long, global = true, env = "FENCEPOST_TLS_KEY", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// How long a call may take, all its attempts together, at most 24h.
    #[arg(long, global = true, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,

    /// How answers are printed.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(crate) output: Format,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take a lock, or see who has it. Does not wait.
    Acquire(acquire::Args),
    /// Make a lease last longer.
    Renew(renew::Args),
    /// Renew a lease until it is over, and print each renewal.
    Keepalive(keepalive::Args),
    /// Give a lock back.
    Release(release::Args),
    /// See who has a lock.
    Get(get::Args),
    /// Run a command while holding a lock.
    Run(run::Args),
    /// Stand for election, and keep the lock for the process next door.
    Sidecar(sidecar::Args),
    /// What `run` starts: see [`run::exec`].
    #[command(hide = true)]
    Exec(run::exec::Args),
    /// What `run` starts besides: see [`run::guardian`].
    #[command(hide = true)]
    Guardian(run::guardian::Args),
    /// Install and look after the fencing kit in a database of yours.
    Fence(fence::Args),
}

/// Names one lease: what `acquire` printed.
#[derive(Debug, Args)]
pub(crate) struct Lease {
    /// The name that is locked.
    pub(crate) resource: String,

    /// The owner that acquired it.
    // With the token it proves who holds the lock: no values of theirs in --help,
    // which ends up in logs and bug reports.
    #[arg(long, env = "FENCEPOST_OWNER", hide_env_values = true)]
    pub(crate) owner: String,

    /// The fencing token of the lease.
    #[arg(long, env = "FENCEPOST_TOKEN", hide_env_values = true, value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) token: i64,
}

/// Takes URLs out of a message about bad usage: one of a database that landed in
/// the wrong place has its password in it all the same.
pub(crate) fn without_urls(mut error: clap::Error) -> clap::Error {
    for kind in [
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
        ContextKind::InvalidValue,
    ] {
        let is_url = matches!(
            error.get(kind),
            Some(ContextValue::String(text)) if text.contains("://") || text.contains('@')
        );
        if is_url {
            error.insert(kind, ContextValue::String("a URL".to_owned()));
        }
    }
    error
}
