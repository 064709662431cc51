//! What several rounds of one cell say together, and a row of `peers.json`.

use serde_json::{Map, Value, json};

use crate::{
    args::{Kind, Scenario},
    load::Round,
};

/// The median and both ends of some figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// None when there are no figures.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut figures: Vec<f64> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        let (&min, &max) = (figures.first()?, figures.last()?);
        let middle = figures.len() / 2;
        let median = if figures.len() % 2 == 1 {
            figures[middle]
        } else {
            f64::midpoint(figures[middle - 1], figures[middle])
        };
        Some(Self { median, min, max })
    }
}

/// One system in one scenario with so many clients.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) scenario: Scenario,
    pub(crate) clients: usize,
    /// None when it was not measured; `notes` say why.
    pub(crate) rounds: Vec<Round>,
    pub(crate) notes: Vec<String>,
    /// Keys of its own in `peers.json`.
    pub(crate) extra: Map<String, Value>,
}

impl Row {
    pub(crate) fn new(kind: Kind, scenario: Scenario, clients: usize, rounds: Vec<Round>) -> Self {
        Self {
            kind,
            scenario,
            clients,
            rounds,
            notes: Vec::new(),
            extra: Map::new(),
        }
    }

    /// A row that says why there are no figures in it.
    pub(crate) fn not_measured(kind: Kind, scenario: Scenario, clients: usize, why: &str) -> Self {
        let mut row = Self::new(kind, scenario, clients, Vec::new());
        row.notes.push(format!("not measured: {why}"));
        row
    }

    pub(crate) fn spread(&self, figure: impl Fn(&Round) -> f64) -> Option<Spread> {
        Spread::of(self.rounds.iter().map(figure))
    }

    pub(crate) fn median(&self, figure: impl Fn(&Round) -> f64) -> Option<f64> {
        self.spread(figure).map(|spread| spread.median)
    }

    pub(crate) fn cycles_per_s(&self) -> Option<f64> {
        self.median(|round| round.cycles_per_s)
    }

    /// Its cycles a second over those of another, round by round: what disturbs the machine
    /// for a while disturbs both.
    pub(crate) fn over(&self, other: &Self) -> Option<Spread> {
        let both = self.rounds.iter().zip(&other.rounds);
        let ratios = both.map(|(its, others)| its.cycles_per_s / others.cycles_per_s);
        Spread::of(ratios.filter(|ratio| ratio.is_finite()))
    }

    /// Null where nothing was completed: no latency is not a latency of 0.
    fn latency(&self, figure: impl Fn(&Round) -> f64) -> Option<f64> {
        self.median(figure).filter(|latency| *latency > 0.0)
    }

    pub(crate) fn p50_us(&self) -> Option<f64> {
        self.latency(|round| round.p50_us)
    }

    pub(crate) fn p99_us(&self) -> Option<f64> {
        self.latency(|round| round.p99_us)
    }

    pub(crate) fn errors(&self) -> u64 {
        self.rounds.iter().map(|round| round.errors).sum()
    }

    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.extra.get(key)?.as_f64()
    }

    /// The row of `peers.json`.
    pub(crate) fn json(&self) -> Value {
        let mut row = Map::new();
        let mut set = |key: &str, value: Value| row.insert(key.to_owned(), value);
        set("system", json!(self.kind.name()));
        set("scenario", json!(self.scenario.name()));
        set("clients", json!(self.clients));
        set("cycles_per_s", rounded(self.cycles_per_s()));
        set("p50_us", rounded(self.p50_us()));
        set("p99_us", rounded(self.p99_us()));
        set("rounds", json!(self.rounds.len()));
        if let Some(cycles) = self.spread(|round| round.cycles_per_s) {
            set("cycles_per_s_min", rounded(Some(cycles.min)));
            set("cycles_per_s_max", rounded(Some(cycles.max)));
            set(
                "answers_per_s",
                rounded(self.median(|round| round.answers_per_s)),
            );
            set("errors", json!(self.errors()));
            set("cpu_percent", self.cpu());
        }
        if !self.notes.is_empty() {
            set("notes", json!(self.notes.join("; ")));
        }
        row.extend(self.extra.clone());
        Value::Object(row)
    }

    /// By process, medians in percent of one core.
    fn cpu(&self) -> Value {
        let names = self.rounds.first().map(|round| round.cpu.iter());
        let medians = names
            .into_iter()
            .flatten()
            .enumerate()
            .map(|(n, (name, _))| {
                let median =
                    self.median(|round| round.cpu.get(n).map_or(0.0, |(_, percent)| *percent));
                ((*name).to_owned(), rounded(median))
            });
        Value::Object(medians.collect())
    }
}

/// To one decimal: what is behind it is noise.
pub(crate) fn rounded(figure: Option<f64>) -> Value {
    json!(figure.map(|figure| (figure * 10.0).round() / 10.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(cycles_per_s: f64, errors: u64) -> Round {
        Round {
            cycles_per_s,
            answers_per_s: 2.0 * cycles_per_s,
            p50_us: 1e6 / cycles_per_s,
            p99_us: 2e6 / cycles_per_s,
            errors,
            first_error: None,
            cpu: vec![("server", 50.0), ("load", 20.0)],
        }
    }

    #[test]
    fn the_median_is_the_middle_or_between_two() {
        assert_eq!(Spread::of([]), None);
        let odd = Spread::of([9.0, 1.0, 5.0]).unwrap();
        assert_eq!((odd.min, odd.median, odd.max), (1.0, 5.0, 9.0));
        let even = Spread::of([4.0, 1.0, 2.0, 9.0]).unwrap();
        assert_eq!((even.min, even.median, even.max), (1.0, 3.0, 9.0));
        assert_eq!(Spread::of([7.0]).unwrap().median, 7.0);
    }

    #[test]
    fn a_row_has_medians_and_the_keys_that_are_promised() {
        let rounds = vec![round(1000.0, 0), round(500.0, 2), round(2000.0, 1)];
        let row = Row::new(Kind::RedisAof, Scenario::MillionRows, 64, rounds);
        let expected = json!({
            "system": "redis-aof", "scenario": "million-rows", "clients": 64,
            "cycles_per_s": 1000.0, "p50_us": 1000.0, "p99_us": 2000.0,
            "rounds": 3, "cycles_per_s_min": 500.0, "cycles_per_s_max": 2000.0,
            "answers_per_s": 2000.0, "errors": 3,
            "cpu_percent": {"server": 50.0, "load": 20.0},
        });
        assert_eq!(row.json(), expected);
    }

    #[test]
    fn two_rows_are_compared_round_by_round() {
        let row = |kind, rounds: &[f64]| {
            let rounds = rounds.iter().map(|cycles| round(*cycles, 0)).collect();
            Row::new(kind, Scenario::Overhead, 64, rounds)
        };
        let plain = row(Kind::Fencepost, &[1000.0, 100.0, 2000.0, 0.0]);
        let traced = row(Kind::FencepostTraced, &[900.0, 80.0, 1000.0, 10.0]);
        let of = traced.over(&plain).unwrap();
        assert_eq!((of.min, of.median, of.max), (0.5, 0.8, 0.9));
        assert_eq!(row(Kind::FencepostTls, &[]).over(&plain), None);
    }

    #[test]
    fn what_was_not_measured_is_a_row_with_nulls_and_the_reason() {
        let row = Row::not_measured(Kind::Etcd, Scenario::SlowFsync, 64, "it is not installed");
        let expected = json!({
            "system": "etcd", "scenario": "slow-fsync", "clients": 64,
            "cycles_per_s": null, "p50_us": null, "p99_us": null,
            "rounds": 0, "notes": "not measured: it is not installed",
        });
        assert_eq!(row.json(), expected);
    }

    #[test]
    fn nothing_completed_is_no_latency() {
        let row = Row::new(Kind::Redis, Scenario::Hot, 64, vec![Round::default()]);
        assert_eq!(row.json()["cycles_per_s"], json!(0.0));
        assert_eq!(row.json()["p99_us"], json!(null));
    }
}
