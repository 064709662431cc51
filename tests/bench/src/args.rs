//! The flags.

use std::{path::PathBuf, time::Duration};

use clap::{Parser, Subcommand, ValueEnum};

use crate::load::Timing;

/// Measures Fencepost and its peers on this machine, in turn, in one run.
#[derive(Debug, Parser)]
#[command(name = "fencepost-bench")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    /// How often each cell is measured; the median counts.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,

    /// How long a cell is measured in each round, s.
    #[arg(long, default_value = "2", value_parser = seconds)]
    seconds: Duration,

    /// How long a cell runs before it is measured, s.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    warm_up: Duration,

    /// How long at most whoever was refused the hot name waits, s; a random part
    /// of it each time.
    #[arg(long, default_value = "0", value_parser = seconds)]
    pub(crate) hot_pause: Duration,

    /// Only these systems.
    #[arg(long, value_enum, value_delimiter = ',')]
    systems: Vec<Kind>,

    /// Only these scenarios.
    #[arg(long, value_enum, value_delimiter = ',')]
    scenarios: Vec<Scenario>,

    /// Only the cells with these numbers of clients.
    #[arg(long, value_delimiter = ',')]
    clients: Vec<usize>,

    /// One short round on a small table: shows that all works, measures nothing.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Where peers.json and peers.svg go [target/bench].
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve calls that do nothing, for the benchmark itself.
    #[command(hide = true)]
    Noop,
}

/// A system; its name on the command line is its name in peers.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Fencepost,
    /// Its metrics are read each second, and tell the prefixes of names apart.
    FencepostScraped,
    /// With an audit log.
    FencepostAudited,
    /// Each call is traced, for a collector next door.
    FencepostTraced,
    /// Through TLS.
    FencepostTls,
    Etcd,
    Zookeeper,
    RedisAof,
    Redis,
    SqlPerCall,
    Advisory,
    GrpcNoop,
}

/// What is done to it; named as [`Kind`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    Uncontended,
    Hot,
    Renew,
    Keepalive,
    MillionRows,
    SlowFsync,
    Overhead,
}

impl Kind {
    pub(crate) fn name(self) -> String {
        name(&self)
    }
}

impl Scenario {
    pub(crate) fn name(self) -> String {
        name(&self)
    }
}

fn name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

impl Args {
    pub(crate) fn rounds(&self) -> u16 {
        if self.quick { 1 } else { self.rounds }
    }

    pub(crate) fn timing(&self) -> Timing {
        if self.quick {
            return Timing {
                warm_up: Duration::from_millis(200),
                measured: Duration::from_millis(300),
            };
        }
        Timing {
            warm_up: self.warm_up,
            measured: self.seconds,
        }
    }

    pub(crate) fn wants_system(&self, kind: Kind) -> bool {
        self.systems.is_empty() || self.systems.contains(&kind)
    }

    pub(crate) fn wants_scenario(&self, scenario: Scenario) -> bool {
        self.scenarios.is_empty() || self.scenarios.contains(&scenario)
    }

    pub(crate) fn wants_clients(&self, clients: usize) -> bool {
        self.clients.is_empty() || self.clients.contains(&clients)
    }
}
