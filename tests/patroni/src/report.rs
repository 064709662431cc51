//! The figures, for people and for programs.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use fencepost_model::default_directory;
use serde_json::{Value, json};

use crate::{
    moments::Fault,
    node::WayBack,
    run::{Cell, Round},
};

const KINDS: [&str; 3] = ["Acquire", "Renew", "Release"];

/// One line for each cell and fault.
pub(crate) fn table(cells: &[Cell]) -> String {
    let mut text = String::from(
        "| mode | route | fault | rounds | Acquire | Renew | Release | of that Fencepost | kept | lost |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for cell in cells {
        for (fault, rounds) in by_fault(cell) {
            let _ = write!(
                text,
                "| {:?} | {:?} | {} | {} |",
                cell.mode,
                cell.route,
                fault.name(),
                rounds.len()
            );
            for kind in KINDS {
                let times = rounds.iter().filter_map(|round| round.outage.get(kind));
                let (median, max) = median_and_max(times);
                let _ = write!(text, " {median:.1}, {max:.1} s |");
            }
            let (median, max) = median_and_max(rounds.iter().map(|round| &round.after_commit));
            let _ = write!(text, " {median:.1}, {max:.1} s |");
            let kept: usize = rounds.iter().map(|round| round.kept).sum();
            let lost: usize = rounds.iter().map(|round| round.lost).sum();
            let _ = writeln!(text, " {kept} | {lost} |");
        }
    }
    text.push_str(
        "\nTime without a success after the fault: median, maximum; of that, the time since another\n\
         node commits. Leases that were renewed on both sides of the fault; leases that were\n\
         renewed in time and are lost.\n\n",
    );
    for cell in cells {
        let _ = writeln!(
            text,
            "{:?}, {:?}: {} calls, {} of them without an answer; tokens back: {}; contradictions: {}",
            cell.mode, cell.route, cell.calls, cell.unknown, cell.tokens_back, cell.violations
        );
        let led_again = |round: &&Round| round.way_back == WayBack::LedAgain;
        let led_again = cell.rounds.iter().filter(led_again).count();
        if led_again > 0 {
            let _ = writeln!(
                text,
                "    {led_again} times the leader that thawed led again, and the new one's commits are gone"
            );
        }
        for (message, count) in &cell.errors {
            let _ = writeln!(text, "    logged {count} times: {message}");
        }
    }
    text
}

/// Writes them as JSON.
pub(crate) fn save(cells: &[Cell], path: &Path) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let cells: Vec<Value> = cells.iter().map(cell).collect();
    fs::write(path, format!("{:#}\n", json!({ "cells": cells })))
}

/// In the directory that this executable was built into.
pub(crate) fn default_path() -> PathBuf {
    default_directory()
        .with_file_name("chaos")
        .join("patroni.json")
}

fn cell(cell: &Cell) -> Value {
    let round = |round: &Round| {
        let outage = round.outage.iter();
        let outage: BTreeMap<_, _> = outage
            .map(|(kind, time)| (kind, time.as_secs_f64()))
            .collect();
        json!({
            "fault": round.fault.name(),
            "outage_seconds": outage,
            "after_first_commit_seconds": round.after_commit.as_secs_f64(),
            "leases_kept": round.kept,
            "leases_lost": round.lost,
            "way_back": round.way_back.name(),
        })
    };
    json!({
        "mode": format!("{:?}", cell.mode).to_lowercase(),
        "route": format!("{:?}", cell.route).to_lowercase(),
        "seed": cell.seed,
        "calls": cell.calls,
        "unknown": cell.unknown,
        "tokens_back": cell.tokens_back,
        "contradictions": cell.violations,
        "errors_logged": cell.errors,
        "rounds": cell.rounds.iter().map(round).collect::<Vec<_>>(),
    })
}

fn by_fault(cell: &Cell) -> BTreeMap<Fault, Vec<&Round>> {
    let mut by = BTreeMap::<_, Vec<_>>::new();
    for round in &cell.rounds {
        by.entry(round.fault).or_default().push(round);
    }
    by
}

/// In seconds.
fn median_and_max<'a>(times: impl Iterator<Item = &'a Duration>) -> (f64, f64) {
    let mut times: Vec<_> = times.map(Duration::as_secs_f64).collect();
    times.sort_by(f64::total_cmp);
    let (Some(max), half) = (times.last().copied(), times.len() / 2) else {
        return (0.0, 0.0);
    };
    ((times[half] + times[(times.len() - 1) / 2]) / 2.0, max)
}
