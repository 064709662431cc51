//! `fencepost-patroni`: switchovers and failovers of a real Patroni cluster, under
//! load, and what holders of locks notice.
//!
//! For each mode of replication and each way to the leader: a cluster of three nodes
//! from the templates in `deploy/patroni`, three replicas of Fencepost, the random
//! clients of [`fencepost_model`] and [holders] of long leases. Then rounds, of which
//! every second is a switchover, and the others in turn
//!
//! - a kill -9 of the leader's Patroni and Postgres;
//! - the same, after its standbys were cut off for a second;
//! - a freeze of both, which goes on when another leads.
//!
//! The node comes back, under load as well. At the end the whole history is checked.
#![expect(clippy::print_stdout, reason = "its output is what it is for")]

mod cluster;
mod holders;
mod measure;
mod moments;
mod node;
mod programs;
mod report;
mod rest;
mod run;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, ValueEnum};

use crate::moments::Fault;

#[derive(Debug, Parser)]
#[command(
    name = "fencepost-patroni",
    about = "Failovers of a Patroni cluster under load"
)]
struct Args {
    /// For each mode and route.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// In every round; all in turn when not given.
    #[arg(long)]
    fault: Option<Fault>,

    /// How the cluster replicates; both when not given.
    #[arg(long)]
    mode: Option<Mode>,

    /// How Fencepost finds the leader; both when not given.
    #[arg(long)]
    route: Option<Route>,

    /// Of the random choices; random unless given.
    #[arg(long)]
    seed: Option<u64>,

    /// Where the figures go; `target/chaos/patroni.json` when not given.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// How the cluster replicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// `synchronous_mode` and `synchronous_mode_strict`.
    Synchronous,
    /// Patroni's default.
    Asynchronous,
}

/// How Fencepost finds the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Route {
    /// Through HAProxy, which asks Patroni.
    Haproxy,
    /// All nodes in the database URL.
    Hosts,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let missing = programs::missing();
    if !missing.is_empty() {
        println!(
            "patroni: not measured: {} not installed (deploy/setup.sh patroni)",
            missing.join(", ")
        );
        return ExitCode::from(69);
    }
    let modes = args
        .mode
        .map_or(vec![Mode::Synchronous, Mode::Asynchronous], |one| vec![one]);
    let routes = args
        .route
        .map_or(vec![Route::Haproxy, Route::Hosts], |one| vec![one]);
    let mut cells = Vec::new();
    for mode in &modes {
        for route in &routes {
            let seed = args.seed.unwrap_or_else(rand::random);
            match run::run(*mode, *route, args.rounds, args.fault, seed).await {
                Ok(cell) => cells.push(cell),
                Err(error) => {
                    println!("patroni: {mode:?}, {route:?}: not measured: {error}");
                    return ExitCode::from(70);
                }
            }
        }
    }
    println!("\n{}", report::table(&cells));
    let out = args.out.unwrap_or_else(report::default_path);
    match report::save(&cells, &out) {
        Ok(()) => println!("figures: {}", out.display()),
        Err(error) => {
            println!("patroni: cannot write {}: {error}", out.display());
            return ExitCode::from(73);
        }
    }
    if cells.iter().all(run::Cell::is_good) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
