//! The chart: cycles per second of each system, a panel for each cell that has
//! more than one.

use std::fmt::Write as _;

use crate::{
    args::{Kind, Scenario},
    stats::{Row, Spread},
};

const WIDTH: f64 = 860.0;
const BAR: f64 = 18.0;
const LINE: f64 = 24.0;
const LEFT: f64 = 110.0;
/// Where the longest bar ends; its figure stands behind it.
const RIGHT: f64 = 740.0;
const HEAD: f64 = 34.0;

pub(crate) fn svg(rows: &[Row]) -> String {
    let mut body = String::new();
    let mut y = 16.0;
    // Nobody holds the hot name there: its bar would be all that one sees.
    let is_shown = |row: &&Row| (row.scenario, row.kind) != (Scenario::Hot, Kind::GrpcNoop);
    let rows: Vec<&Row> = rows.iter().filter(is_shown).collect();
    for panel in rows.chunk_by(|a, b| (a.scenario, a.clients) == (b.scenario, b.clients)) {
        if let [first, _, ..] = panel {
            y += title(&mut body, y, first);
            y += bars(&mut body, y, panel);
        }
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" width=\"{WIDTH}\" \
         height=\"{y}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

fn title(body: &mut String, y: f64, row: &Row) -> f64 {
    let unit = match row.scenario {
        Scenario::Renew => "renewals",
        _ => "cycles",
    };
    let _ = writeln!(
        body,
        "<text x=\"10\" y=\"{}\" font-weight=\"bold\">{}, {} client{}: {unit} per second</text>",
        y + 16.0,
        row.scenario.name(),
        row.clients,
        if row.clients == 1 { "" } else { "s" },
    );
    HEAD
}

fn bars(body: &mut String, from: f64, panel: &[&Row]) -> f64 {
    let spreads = panel
        .iter()
        .filter_map(|row| cycles(row))
        .map(|spread| spread.max);
    let longest = spreads.fold(f64::MIN_POSITIVE, f64::max);
    let x = |figure: f64| LEFT + (RIGHT - LEFT) * figure / longest;
    for (n, row) in panel.iter().enumerate() {
        let y = from + LINE * n as f64;
        let middle = y + BAR / 2.0;
        let text = y + BAR - 4.5;
        let _ = writeln!(
            body,
            "<text x=\"10\" y=\"{text}\">{}</text>",
            row.kind.name()
        );
        let Some(spread) = cycles(row) else {
            let _ = writeln!(
                body,
                "<text x=\"{LEFT}\" y=\"{text}\" fill=\"#777\">not measured</text>"
            );
            continue;
        };
        let fill = match row.kind {
            Kind::Fencepost => "#1f6feb",
            Kind::GrpcNoop => "#d0d7de",
            _ => "#8c959f",
        };
        let (low, high) = (x(spread.min), x(spread.max));
        let _ = writeln!(
            body,
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{fill}\"/>\
             <line x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#24292f\"/>\
             <text x=\"{:.1}\" y=\"{text}\">{:.0}</text>",
            x(spread.median) - LEFT,
            high + 8.0,
            spread.median,
        );
    }
    LINE * panel.len() as f64 + 14.0
}

fn cycles(row: &Row) -> Option<Spread> {
    row.spread(|round| round.cycles_per_s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Round;

    #[test]
    fn a_panel_has_a_bar_for_what_was_measured_and_says_what_was_not() {
        let round = Round {
            cycles_per_s: 1234.0,
            ..Round::default()
        };
        let svg = svg(&[
            Row::new(Kind::Fencepost, Scenario::Uncontended, 64, vec![round]),
            Row::not_measured(Kind::Etcd, Scenario::Uncontended, 64, "missing"),
        ]);
        assert_eq!(svg.matches("fill=\"#1f6feb\"").count(), 1);
        assert!(svg.contains(">1234</text>"));
        assert!(svg.contains(">not measured</text>"));
    }
}
