//! `fencepost`, the command line of the Fencepost lock server.
//!
//! Made for scripts: what was asked for goes to stdout, in text or JSON; what
//! went wrong goes to stderr, in one line; and the exit code says what to do
//! next (see [`exit`]). Each subcommand is a module with its `Args` and its
//! `run`.

use std::process::ExitCode;

use clap::Parser as _;
use fencepost_client::Client;

use crate::{
    args::{Cli, Command},
    exit::{Exit, Failure},
    output::Output,
};

mod acquire;
mod args;
mod exit;
mod get;
mod keepalive;
mod output;
mod owner;
mod release;
mod renew;

fn main() -> ExitCode {
    let exit = match Cli::try_parse() {
        Ok(cli) => run(cli).unwrap_or_else(|failure| {
            output::error(&failure.to_string());
            failure.exit()
        }),
        Err(message) => output::usage(&message),
    };
    exit.into()
}

fn run(cli: Cli) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::Runtime)?;
    runtime.block_on(dispatch(cli))
}

async fn dispatch(cli: Cli) -> Result<Exit, Failure> {
    let client = Client::connect_lazy(&cli.global.endpoint)
        .map_err(Failure::Endpoints)?
        .with_timeout(cli.global.timeout);
    let output = Output::new(cli.global.output);
    match cli.command {
        Command::Acquire(args) => acquire::run(args, &client, &output).await,
        Command::Renew(args) => renew::run(args, &client, &output).await,
        Command::Release(args) => release::run(args, &client, &output).await,
        Command::Keepalive(args) => keepalive::run(args, &client, &output).await,
        Command::Get(args) => get::run(args, &client, &output).await,
    }
}
