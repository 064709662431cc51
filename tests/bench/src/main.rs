//! `fencepost-bench`: Fencepost and its peers, measured in one run.
//!
//! `scenarios` decides who is measured at what; `systems` start and speak to
//! each; `turns` gives them rounds in turn, each a closed loop of `load`;
//! `stats` makes a row of them, and `report`, `figures` and `chart` show it.

mod args;
mod chart;
mod cpu;
mod figures;
mod keepalive;
mod load;
mod report;
mod scenarios;
mod stats;
mod systems;
mod turns;

use std::{env, fs, path::PathBuf};

use clap::Parser as _;
use rustix::fs::statfs;
use serde_json::Value;

use crate::{
    args::{Args, Command},
    load::Result,
    scenarios::Bench,
    stats::Row,
    systems::noop,
};

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(Command::Noop) = args.command {
        return noop::serve().await;
    }
    check_disk()?;
    let out = args.out.clone().map_or_else(default_out, Ok)?;
    let doubts = doubts(&args);
    show(&doubts);
    let rows = Bench::new(args).run().await;

    fs::create_dir_all(&out)?;
    let json: Value = rows.iter().map(Row::json).collect();
    fs::write(out.join("peers.json"), format!("{json:#}\n"))?;
    fs::write(out.join("peers.svg"), chart::svg(&rows))?;
    show(&report::figures(&figures::all(&rows), doubts.is_empty()));
    // Whoever looks at the end sees it as well.
    show(&doubts);
    show(&format!(
        "\nwritten: {0}/peers.json, {0}/peers.svg",
        out.display()
    ));
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the table is what a run is for")]
fn show(text: &str) {
    if !text.is_empty() {
        println!("{text}");
    }
}

/// What takes all meaning from the figures of this run.
fn doubts(args: &Args) -> String {
    let mut doubts = String::new();
    if cfg!(debug_assertions) {
        doubts += "\nA DEBUG BUILD: these figures mean nothing.";
    }
    if args.quick {
        doubts += "\nA QUICK RUN: these figures mean nothing.";
    }
    doubts
}

/// `target/bench`, beside the profile's directory that this program lies in.
fn default_out() -> Result<PathBuf> {
    let this = env::current_exe()?;
    let target = this
        .ancestors()
        .nth(2)
        .ok_or("this program is in no target directory")?;
    Ok(target.join("bench"))
}

/// Data lies in the temporary directory; where that is memory, nothing would
/// be flushed, and every durable system would be measured too well.
fn check_disk() -> Result<()> {
    const TMPFS: i128 = 0x0102_1994;
    let directory = env::temp_dir();
    if i128::from(statfs(&directory)?.f_type) == TMPFS {
        let directory = directory.display();
        return Err(format!("{directory} is not on a disk: set TMPDIR to one that is").into());
    }
    Ok(())
}
