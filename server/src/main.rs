//! `fencepostd`, the Fencepost lock server: gRPC in front, the PostgreSQL that
//! its users already run behind.
//!
//! Imports follow one direction: `app` → { `service`, `keep_alive`, `purge`, `census` } →
//! `store` → `metrics` → `lock`. `lock` knows neither gRPC nor Postgres, `store` alone
//! knows SQL, and `service` alone knows tonic.

mod app;
mod args;
mod caller;
mod census;
mod clock;
mod config;
mod http;
mod keep_alive;
mod lock;
mod metrics;
mod private_postgres;
mod purge;
mod room;
mod service;
mod shutdown;
mod store;
mod telemetry;
mod tls;
mod trace;

use std::{process::ExitCode, time::Duration};

use clap::Parser as _;

use crate::{
    app::{AppError, BUG, CONFIGURATION, USAGE},
    args::{Cli, Command, Environment},
    config::Config,
    telemetry::{Chain, LostLines},
};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // --help and --version come this way too.
            let code = if error.use_stderr() {
                ExitCode::from(USAGE)
            } else {
                ExitCode::SUCCESS
            };
            let _ = args::without_urls(error).print();
            return code;
        }
    };
    let (_logs, lost_lines) = telemetry::init(cli.log_format, &cli.log, cli.serve.audit_log);
    for name in Environment::unknown() {
        tracing::warn!(
            name,
            "an environment variable that is no setting of this program"
        );
    }
    let command = cli.command.clone();
    let config = match Config::new(cli, Environment::read()) {
        Ok(config) => config,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            return ExitCode::from(CONFIGURATION);
        }
    };
    // By itself a thread that has work looks into the common queue about every sixtieth
    // time: what landed there would wait for seconds while requests flood in.
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .global_queue_interval(4)
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            return ExitCode::from(BUG);
        }
    };
    let ended = runtime.block_on(run(command, config, lost_lines));
    // What still runs belongs to connections that were given up on.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

async fn run(
    command: Option<Command>,
    config: Config,
    lost_lines: LostLines,
) -> Result<(), AppError> {
    match command {
        None => app::serve(config, lost_lines).await,
        Some(Command::Migrate) => app::migrate(config).await,
        Some(Command::AdvanceTokens { at_least, force }) => {
            let advanced = app::advance_tokens(config, at_least, force).await?;
            tracing::info!(from = advanced.from, to = advanced.to, "tokens advanced");
            Ok(())
        }
    }
}
