//! `fencepost-chaos`: see the library.
#![expect(clippy::print_stdout, reason = "its output is what it is for")]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, builder::PossibleValuesParser};
use fencepost_chaos::{Options, names, run};

#[derive(Debug, Parser)]
#[command(
    name = "fencepost-chaos",
    about = "Breaks replicas and their Postgres under load, and checks what clients see"
)]
struct Args {
    /// Of the first episode; random unless given. The next one has the next seed.
    #[arg(long)]
    seed: Option<u64>,

    /// No episode begins after this time; an episode takes about a minute.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,

    /// Only these kinds of faults, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(names()))]
    only: Vec<String>,

    /// How many rounds of faults an episode has.
    #[arg(long, default_value_t = 7)]
    rounds: usize,

    /// Where the report is written, and histories that are contradictory.
    #[arg(long, default_value = "target/chaos")]
    out: PathBuf,

    /// The `fencepostd` of an older version: one of the three replicas is that.
    #[arg(long)]
    older: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let options = Options {
        seed: args.seed.unwrap_or_else(|| rand::random::<u32>().into()),
        time: Duration::from_secs_f64(args.minutes * 60.0),
        only: args.only,
        rounds: args.rounds,
        directory: args.out.clone(),
        older: args.older,
    };
    let report = run(&options).await;
    let file = args.out.join("report.json");
    println!("{report}");
    match report.save(&file) {
        Ok(()) => println!("written to {}", file.display()),
        Err(error) => println!("not written to {}: {error}", file.display()),
    }
    if report.is_good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
