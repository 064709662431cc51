//! `fencepost`, the command line of the Fencepost lock server.
//!
//! Made for scripts: what was asked for goes to stdout, in text or JSON; what
//! went wrong goes to stderr, in one line; and the exit code says what to do
//! next (see [`exit`]). Each subcommand is a module with its `Args` and its
//! `run`.

use std::process::ExitCode;

use clap::Parser as _;
use fencepost_client::{Client, Tls};

use crate::{
    args::{Cli, Command, Global, without_urls},
    exit::{Exit, Failure},
    output::Output,
};

mod acquire;
mod args;
mod clock;
mod exit;
mod fence;
mod get;
mod keepalive;
mod output;
mod release;
mod renew;
mod run;
mod sidecar;
mod signals;

fn main() -> ExitCode {
    let code = match Cli::try_parse() {
        Ok(cli) => {
            let own_codes = cli.own_exit_codes();
            let exit = run(cli).unwrap_or_else(|failure| {
                output::error(&failure.to_string());
                failure.exit()
            });
            exit.code(own_codes)
        }
        Err(message) => output::usage(&without_urls(message)).code(None),
    };
    code.into()
}

fn run(cli: Cli) -> Result<Exit, Failure> {
    // These two block, or become another program: a runtime would be in the way.
    match &cli.command {
        Command::Exec(args) => return Ok(run::exec::run(args)),
        Command::Guardian(args) => return Ok(run::guardian::run(args)),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::Machine)?;
    let exit = runtime.block_on(dispatch(cli));
    // Not waited for: a thread that reads a file from a disk that hangs.
    runtime.shutdown_background();
    exit
}

async fn dispatch(cli: Cli) -> Result<Exit, Failure> {
    let Global {
        endpoint,
        tls_ca,
        tls_cert,
        tls_key,
        timeout,
        output,
    } = cli.global;
    let output = Output::new(output);
    // Whoever traces what it starts says so in the environment.
    let traceparent = std::env::var("TRACEPARENT").ok();
    // Made where it is needed: `fence` talks to no lock server, so it does not
    // mind a bad endpoint.
    let builder = || {
        let mut tls = Tls::default();
        if let Some(path) = &tls_ca {
            tls = tls.ca_file(path);
        }
        match (&tls_cert, &tls_key) {
            (Some(certificate), Some(key)) => tls = tls.identity_files(certificate, key),
            (None, None) => {}
            _ => return Err(Failure::HalfAnIdentity),
        }
        let traceparent = traceparent.clone();
        Ok(Client::builder(&*endpoint)
            .tls(tls)
            .timeout(timeout)
            .traceparent(move || traceparent.clone()))
    };
    let client = || builder()?.build().map_err(Failure::Client);
    match cli.command {
        Command::Acquire(args) => acquire::run(args, &client()?.calls(), &output).await,
        Command::Renew(args) => renew::run(args, &client()?.calls(), &output).await,
        Command::Release(args) => release::run(args, &client()?.calls(), &output).await,
        Command::Keepalive(args) => {
            keepalive::run(args, &client()?.calls(), timeout, &output).await
        }
        Command::Get(args) => get::run(args, &client()?.calls(), &output).await,
        Command::Run(args) => run::run(args, &client()?).await,
        Command::Sidecar(args) => sidecar::run(args, builder()?).await,
        Command::Exec(_) | Command::Guardian(_) => Ok(Exit::Bug),
        Command::Fence(args) => fence::run(args, timeout, &output).await,
    }
}
