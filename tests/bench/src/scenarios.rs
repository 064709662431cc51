//! Which systems are measured at what, and how often.

use std::time::Duration;

use serde_json::json;

use crate::{
    args::{Args, Kind, Scenario},
    keepalive,
    load::{Failure, Result, Work},
    report,
    stats::{Row, rounded},
    systems::{self, Shim, System},
    turns::Turns,
};

/// The systems of a scenario, in the order of the table.
fn line_up(scenario: Scenario) -> &'static [Kind] {
    match scenario {
        Scenario::Uncontended | Scenario::Hot => &[
            Kind::Fencepost,
            Kind::Etcd,
            Kind::Zookeeper,
            Kind::RedisAof,
            Kind::Redis,
            Kind::SqlPerCall,
            Kind::Advisory,
            Kind::GrpcNoop,
        ],
        // A session of ZooKeeper or Postgres lives by itself.
        Scenario::Renew => &[
            Kind::Fencepost,
            Kind::Etcd,
            Kind::RedisAof,
            Kind::Redis,
            Kind::SqlPerCall,
            Kind::GrpcNoop,
        ],
        Scenario::Keepalive => &[Kind::Fencepost],
        Scenario::MillionRows => &[Kind::Fencepost, Kind::SqlPerCall],
        Scenario::SlowFsync => &[
            Kind::Fencepost,
            Kind::Etcd,
            Kind::Zookeeper,
            Kind::RedisAof,
            Kind::SqlPerCall,
        ],
        Scenario::Overhead => &[
            Kind::Fencepost,
            Kind::FencepostScraped,
            Kind::FencepostAudited,
            Kind::FencepostTraced,
            Kind::FencepostTls,
        ],
    }
}

fn sizes(scenario: Scenario) -> &'static [usize] {
    match scenario {
        Scenario::Uncontended => &[1, 16, 64, 256],
        Scenario::Hot | Scenario::Renew => &[64, 256],
        Scenario::Keepalive => &[1_000, 10_000],
        Scenario::MillionRows | Scenario::SlowFsync | Scenario::Overhead => &[64],
    }
}

/// What whoever is refused a shared name waits for at most, in the mixed load.
const MIXED_PAUSE: Duration = Duration::from_millis(10);

/// A system that runs, or why it does not.
type Started = (Kind, Result<Box<dyn System>, String>);

/// The whole run.
pub(crate) struct Bench {
    args: Args,
    rows: Vec<Row>,
}

impl Bench {
    pub(crate) fn new(args: Args) -> Self {
        Self {
            args,
            rows: Vec::new(),
        }
    }

    /// Measures all that was asked for.
    pub(crate) async fn run(mut self) -> Vec<Row> {
        self.plain().await;
        if self.args.wants_scenario(Scenario::Keepalive) {
            self.keepalive().await;
        }
        if self.args.wants_scenario(Scenario::MillionRows) {
            self.million_rows().await;
        }
        if self.args.wants_scenario(Scenario::SlowFsync) {
            self.slow_fsync().await;
        }
        if self.args.wants_scenario(Scenario::Overhead) {
            self.overhead().await;
        }
        self.rows
    }

    /// The same server with one thing more each, beside the plain one round by round.
    async fn overhead(&mut self) {
        let scenario = Scenario::Overhead;
        let started = self.start(scenario, None).await;
        for clients in self.sizes(scenario) {
            let all: Vec<_> = started.iter().collect();
            let mut rows = self.measure(scenario, clients, &all).await;
            let plain = rows.iter().find(|row| row.kind == Kind::Fencepost).cloned();
            for row in rows.iter_mut().filter(|row| row.kind != Kind::Fencepost) {
                let Some(of) = plain.as_ref().and_then(|plain| row.over(plain)) else {
                    continue;
                };
                for (key, ratio) in [
                    ("of_plain", of.median),
                    ("of_plain_min", of.min),
                    ("of_plain_max", of.max),
                ] {
                    let ratio = json!((ratio * 1000.0).round() / 1000.0);
                    row.extra.insert(key.to_owned(), ratio);
                }
            }
            self.add(scenario, clients, rows);
        }
    }

    /// What needs nothing but the systems as they are: started once for all.
    async fn plain(&mut self) {
        let scenarios: Vec<Scenario> = [Scenario::Uncontended, Scenario::Hot, Scenario::Renew]
            .into_iter()
            .filter(|scenario| self.args.wants_scenario(*scenario))
            .collect();
        // The first of them has all systems in it.
        let Some(widest) = scenarios
            .iter()
            .max_by_key(|scenario| line_up(**scenario).len())
        else {
            return;
        };
        let started = self.start(*widest, None).await;
        let from = self.rows.len();
        for scenario in scenarios {
            for clients in self.sizes(scenario) {
                self.cell(scenario, clients, &started).await;
            }
        }
        for (kind, system) in &started {
            let Ok(system) = system else { continue };
            let Ok(Some(share)) = system.hot_updates().await else {
                continue;
            };
            for row in self.rows[from..].iter_mut().filter(|row| row.kind == *kind) {
                let percent = rounded(Some(100.0 * share));
                row.extra.insert("hot_update_percent".to_owned(), percent);
            }
        }
    }

    /// A server of its own for each size, so that memory tells of these streams.
    async fn keepalive(&mut self) {
        let measured = Duration::from_secs(if self.args.quick { 12 } else { 60 });
        for streams in self.sizes(Scenario::Keepalive) {
            if !self.args.wants_system(Kind::Fencepost) {
                continue;
            }
            let row = keepalive::measure(streams, measured)
                .await
                .unwrap_or_else(|error| {
                    let (kind, scenario) = (Kind::Fencepost, Scenario::Keepalive);
                    Row::not_measured(kind, scenario, streams, &said(&error))
                });
            self.add(Scenario::Keepalive, streams, vec![row]);
        }
    }

    /// Each system twice, with a full table and with an empty one, in turn.
    async fn million_rows(&mut self) {
        let scenario = Scenario::MillionRows;
        let table = if self.args.quick { 50_000 } else { 1_000_000 };
        let empty = self.start(scenario, None).await;
        let mut full = self.start(scenario, None).await;
        for (_, system) in &mut full {
            if let Ok(running) = system
                && let Err(error) = running.fill(table).await
            {
                *system = Err(said(&error));
            }
        }
        for clients in self.sizes(scenario) {
            let both: Vec<_> = full.iter().chain(&empty).collect();
            let mut on_full = self.measure(scenario, clients, &both).await;
            let on_empty = on_full.split_off(full.len());
            let rows = on_full
                .into_iter()
                .zip(on_empty)
                .map(|(mut row, on_empty)| {
                    let cycles = rounded(on_empty.cycles_per_s());
                    row.extra.insert("table_rows".to_owned(), json!(table));
                    row.extra.insert("empty_cycles_per_s".to_owned(), cycles);
                    row
                });
            self.add(scenario, clients, rows.collect());
        }
    }

    async fn slow_fsync(&mut self) {
        let scenario = Scenario::SlowFsync;
        let shim = match Shim::new().await {
            Ok(shim) => shim,
            Err(error) => {
                let why = said(&error);
                for clients in self.sizes(scenario) {
                    let rows = line_up(scenario).iter();
                    let rows = rows.map(|kind| Row::not_measured(*kind, scenario, clients, &why));
                    self.add(scenario, clients, rows.collect());
                }
                return;
            }
        };
        let started = self.start(scenario, Some(&shim)).await;
        for clients in self.sizes(scenario) {
            self.cell(scenario, clients, &started).await;
        }
    }

    async fn start(&self, scenario: Scenario, shim: Option<&Shim>) -> Vec<Started> {
        let mut started = Vec::new();
        for &kind in line_up(scenario) {
            if self.args.wants_system(kind) {
                let system = systems::start(kind, shim).await;
                started.push((kind, system.map_err(|error| said(&error))));
            }
        }
        started
    }

    fn sizes(&self, scenario: Scenario) -> Vec<usize> {
        let sizes = sizes(scenario).iter().copied();
        sizes
            .filter(|size| self.args.wants_clients(*size))
            .collect()
    }

    async fn cell(&mut self, scenario: Scenario, clients: usize, started: &[Started]) {
        let wanted: Vec<_> = started
            .iter()
            .filter(|(kind, _)| line_up(scenario).contains(kind))
            .collect();
        let rows = self.measure(scenario, clients, &wanted).await;
        self.add(scenario, clients, rows);
    }

    /// Measures what runs and can, in turn; a row for each of `all`.
    async fn measure(&self, scenario: Scenario, clients: usize, all: &[&Started]) -> Vec<Row> {
        let turns = Turns {
            rounds: self.args.rounds(),
            timing: self.args.timing(),
            work: match scenario {
                Scenario::Hot => Work::Contend {
                    pause: self.args.hot_pause,
                },
                Scenario::Renew => Work::Renew,
                Scenario::SlowFsync => Work::Mixed { pause: MIXED_PAUSE },
                _ => Work::Cycle,
            },
            clients,
        };
        let able: Vec<Result<&dyn System, String>> = all
            .iter()
            .map(
                |(kind, system)| match systems::why_not(*kind, scenario, clients) {
                    Some(why) => Err(why.to_owned()),
                    None => system.as_deref().map_err(String::clone),
                },
            )
            .collect();
        let contenders: Vec<&dyn System> = able.iter().flatten().copied().collect();
        let mut results = turns.measure(&contenders).await.into_iter();
        let rows = all.iter().zip(able).map(|((kind, _), able)| match able {
            Ok(_) => {
                let rounds = results.next().unwrap_or_default();
                Row::new(*kind, scenario, clients, rounds)
            }
            Err(why) => Row::not_measured(*kind, scenario, clients, &why),
        });
        rows.collect()
    }

    /// Keeps the rows, and shows them at once: a run takes its time.
    #[expect(clippy::print_stdout, reason = "the table is what a run is for")]
    fn add(&mut self, scenario: Scenario, clients: usize, rows: Vec<Row>) {
        println!("{}", report::table(scenario, clients, &rows));
        self.rows.extend(rows);
    }
}

fn said(error: &Failure) -> String {
    error.to_string()
}
