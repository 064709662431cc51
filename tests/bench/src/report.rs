//! The table, and the list of what must be reached.

use std::fmt::Write as _;

use crate::{
    args::{Kind, Scenario},
    figures::{Bound, Figure},
    stats::Row,
};

/// One scenario with so many clients, a system a line.
pub(crate) fn table(scenario: Scenario, clients: usize, rows: &[Row]) -> String {
    let fencepost = rows.iter().find(|row| row.kind == Kind::Fencepost);
    let ours = fencepost.and_then(Row::cycles_per_s);
    let mut table = format!(
        "\n{}, {}\n  {:<18}{:>10}{:>19}{:>11}{:>11}{:>14}  cpu % of a core",
        scenario.name(),
        counted(scenario, clients),
        "system",
        "cycles/s",
        "min - max",
        "p50 us",
        "p99 us",
        "fencepost/it",
    );
    for row in rows {
        let spread = row.spread(|round| round.cycles_per_s).map_or_else(
            || "-".to_owned(),
            |spread| format!("{:.0} - {:.0}", spread.min, spread.max),
        );
        let ratio = ours.zip(row.cycles_per_s()).map(|(ours, its)| ours / its);
        let _ = write!(
            table,
            "\n  {:<18}{:>10}{spread:>19}{:>11}{:>11}{:>14}  {}",
            row.kind.name(),
            shown(row.cycles_per_s(), 0),
            shown(row.p50_us(), 0),
            shown(row.p99_us(), 0),
            shown(ratio.filter(|_| row.kind != Kind::Fencepost), 2),
            remarks(row),
        );
    }
    table
}

fn counted(scenario: Scenario, clients: usize) -> String {
    match scenario {
        Scenario::Keepalive => format!("{clients} streams (a cycle is a renewal)"),
        Scenario::Renew => format!("{clients} clients (a cycle is a renewal)"),
        Scenario::Hot => format!("{clients} clients want one name"),
        _ if clients == 1 => "1 client".to_owned(),
        _ => format!("{clients} clients"),
    }
}

fn shown(figure: Option<f64>, decimals: usize) -> String {
    figure
        .filter(|figure| figure.is_finite())
        .map_or_else(|| "-".to_owned(), |figure| format!("{figure:.decimals$}"))
}

/// Processor time, errors, what a scenario has of its own, and notes.
fn remarks(row: &Row) -> String {
    let mut remarks = Vec::new();
    let processes = row
        .rounds
        .first()
        .map(|round| round.cpu.iter().map(|(name, _)| *name));
    for (n, name) in processes.into_iter().flatten().enumerate() {
        let percent = row.median(|round| round.cpu.get(n).map_or(0.0, |(_, percent)| *percent));
        remarks.push(format!("{name} {}", shown(percent, 0)));
    }
    if row.scenario == Scenario::Hot && !row.rounds.is_empty() {
        let answers = row.median(|round| round.answers_per_s);
        remarks.push(format!("{} acquires/s answered", shown(answers, 0)));
    }
    for (key, value) in &row.extra {
        remarks.push(format!("{key} {value}"));
    }
    if row.errors() > 0 {
        let first = row
            .rounds
            .iter()
            .find_map(|round| round.first_error.as_deref());
        remarks.push(format!(
            "{} ERRORS: {}",
            row.errors(),
            first.unwrap_or("see notes")
        ));
    }
    remarks.extend(row.notes.iter().cloned());
    remarks.join(", ")
}

/// What must be reached, with a mark each; without, where figures mean nothing.
pub(crate) fn figures(figures: &[Figure], is_judged: bool) -> String {
    let mut list = "\nto be reached".to_owned();
    for figure in figures {
        let mark = match figure.is_reached() {
            Some(_) if !is_judged => " ",
            Some(true) => "✓",
            Some(false) => "✗",
            None => "?",
        };
        let (word, limit) = match figure.bound {
            Bound::AtLeast(limit) => ("at least", limit),
            Bound::AtMost(limit) => ("at most", limit),
        };
        let measured = figure.measured.map_or_else(
            || "not measured".to_owned(),
            |measured| format!("{measured:.2}"),
        );
        let _ = write!(
            list,
            "\n  {mark} {measured:>12}  {word} {limit:<5} {}",
            figure.what
        );
    }
    list
}
