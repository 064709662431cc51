//! One cell: a mode, a route, and its rounds.

use std::{collections::BTreeMap, fs, time::Duration};

use fencepost_model::{
    Contradiction, Load, Options, default_directory,
    history::{Event, History, Op, Time},
    verdict,
};
use fencepost_support::{Postgres, Server, wait::within};
use serde_json::Value;
use tokio::time::sleep;

use crate::{
    Mode, Route,
    cluster::Cluster,
    holders::Holders,
    measure,
    moments::{Fault, Moments, STEADY},
    node::WayBack,
    programs,
};

/// For how long standbys are cut off before a kill.
const CUT_OFF: Duration = Duration::from_secs(1);

/// Patroni's ttl, and the promotion.
const PATIENCE: Duration = Duration::from_secs(90);

const REPLICAS: usize = 3;
const HOLDERS: usize = 12;

/// What a round looked like.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) fault: Fault,
    /// The longest time without a success, by kind of call.
    pub(crate) outage: BTreeMap<&'static str, Duration>,
    /// From the first commit of another node to the first success of each kind.
    pub(crate) after_commit: Duration,
    /// Leases that holders renewed in time, and were told are lost.
    pub(crate) lost: usize,
    /// Leases that were renewed before and after.
    pub(crate) kept: usize,
    /// How the node that was killed or frozen came back.
    pub(crate) way_back: WayBack,
}

/// What came out of a mode and a route.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) mode: Mode,
    pub(crate) route: Route,
    pub(crate) seed: u64,
    pub(crate) calls: usize,
    pub(crate) unknown: usize,
    pub(crate) rounds: Vec<Round>,
    /// Grants with a token that is not above one that had been shown before.
    pub(crate) tokens_back: usize,
    /// Of all invariants.
    pub(crate) violations: usize,
    /// What the replicas logged as errors, and how often.
    pub(crate) errors: BTreeMap<String, usize>,
}

impl Cell {
    /// Whether nothing happened that must not. What may be lost is known to the
    /// checker: nothing by a switchover, and nothing at all in synchronous mode.
    pub(crate) fn is_good(&self) -> bool {
        self.violations == 0
    }
}

/// Runs a cell.
pub(crate) async fn run(
    mode: Mode,
    route: Route,
    rounds: u16,
    fault: Option<Fault>,
    seed: u64,
) -> Result<Cell, fencepost_model::Error> {
    say(&format!("{mode:?}, {route:?}: starting, seed {seed}"));
    let (mut cluster, register) = tokio::join!(Cluster::start(mode), Postgres::start());
    let mut servers = Vec::new();
    for _ in 0..REPLICAS {
        servers.push(Server::start(&cluster.url(route)).await);
    }
    let mut options = Options::new(seed, servers.iter().map(Server::url).collect());
    options.register = Some(register.url());
    let load = Load::start(options).await?;
    let holders = Holders::start(&servers, HOLDERS, load.recorder());
    let overwrites = programs::overwrites_leader();
    let mut moments = Vec::new();
    for number in 0..rounds {
        sleep(STEADY).await;
        let fault = fault.unwrap_or_else(|| Fault::of_round(number));
        let round = strike(&mut cluster, &load, &holders, fault).await;
        say(&format!(
            "{mode:?}, {route:?}: round {}: {} at {:.1}s, committed after {:.1?}, served again after {:.1?}, {}",
            number + 1,
            round.fault.name(),
            round.struck.since(Time(0)).as_secs_f64(),
            round.committed.since(round.struck),
            round.served.since(round.struck),
            round.way_back.name()
        ));
        let Event { from, to, what } = round.excuse(mode, overwrites);
        load.recorder().event(from, to, what);
        moments.push(round);
    }
    sleep(STEADY).await;
    let held = holders.stop().await;
    let mut history = load.stop().await?;
    history.ops.extend(held);
    history.ops.sort_by_key(|op| op.answered);
    let cell = judge(mode, route, &history, &moments, errors(&servers));
    if !cell.is_good() {
        keep_logs(seed, &cluster, &servers);
    }
    Ok(cell)
}

/// Keeps what nodes and replicas logged, beside the history that contradicts itself.
fn keep_logs(seed: u64, cluster: &Cluster, servers: &[Server]) {
    let directory = default_directory().join(format!("{seed}.logs"));
    let nodes = cluster
        .logs()
        .map(|(name, lines)| (format!("node-{name}.log"), lines));
    let replicas = servers
        .iter()
        .enumerate()
        .map(|(n, server)| (format!("replica-{n}.log"), server.logs()));
    let saved = fs::create_dir_all(&directory).and_then(|()| {
        nodes
            .chain(replicas)
            .try_for_each(|(name, lines)| fs::write(directory.join(name), lines.join("\n") + "\n"))
    });
    match saved {
        Ok(()) => say(&format!("logs saved in {}", directory.display())),
        Err(error) => say(&format!("cannot write {}: {error}", directory.display())),
    }
}

/// Does it, waits until all is served again, and mends it. A leader that was frozen thaws
/// when it is brought back, as a second primary for a moment: what is not judged then is
/// said at [`Moments::excuse`].
async fn strike(cluster: &mut Cluster, load: &Load, holders: &Holders, fault: Fault) -> Moments {
    cluster.wait_whole().await;
    let leader = cluster
        .leader()
        .await
        .expect("a whole cluster has a leader");
    let from = load.now();
    if fault == Fault::CutOffAndKill {
        cluster.cut_standbys_off(leader).await;
        sleep(CUT_OFF).await;
    }
    let struck = load.now();
    match fault {
        Fault::Kill | Fault::CutOffAndKill => cluster.kill(leader).await,
        Fault::Freeze => cluster.freeze(leader),
        Fault::Switchover => {}
    }
    let switching = async {
        if fault == Fault::Switchover {
            cluster.switch_over(leader).await;
        }
    };
    let committing = async {
        cluster.first_commit_elsewhere(leader).await;
        load.now()
    };
    let ((), committed) = tokio::join!(switching, committing);
    within(PATIENCE, "calls are served again", async || {
        sleep(Duration::from_millis(50)).await;
        let again = |kind: &str| {
            let good = |op: &Op| op.call.kind() == kind && op.succeeded() && op.sent >= committed;
            holders.look(|ops| ops.iter().rev().any(good))
        };
        ["Acquire", "Renew", "Release"]
            .into_iter()
            .all(again)
            .then_some(())
    })
    .await;
    let served = load.now();
    sleep(STEADY).await;
    let way_back = match fault {
        Fault::Switchover => WayBack::Stayed,
        _ => cluster.bring_back(leader).await,
    };
    Moments {
        fault,
        from,
        struck,
        committed,
        served,
        whole: load.now(),
        way_back,
    }
}

fn judge(
    mode: Mode,
    route: Route,
    history: &History,
    moments: &[Moments],
    errors: BTreeMap<String, usize>,
) -> Cell {
    let lost = measure::lost(history);
    let round = |(n, round): (usize, &Moments)| {
        let next = moments.get(n + 1).map_or(Time::NEVER, |next| next.from);
        let kinds = ["Acquire", "Renew", "Release"];
        let outage = kinds.map(|kind| {
            let longest = measure::outage(history, kind, round.struck, round.served);
            (kind, longest)
        });
        let lost = lost
            .iter()
            .filter(|(at, _)| (round.from..next).contains(at));
        Round {
            fault: round.fault,
            outage: outage.into(),
            after_commit: kinds
                .iter()
                .map(|kind| measure::first_success(history, kind, round.committed))
                .max()
                .unwrap_or_default(),
            lost: lost.count(),
            kept: measure::kept_through(history, round.from, round.served),
            way_back: round.way_back,
        }
    };
    let rounds = moments.iter().enumerate().map(round).collect();
    let violations = match verdict(history, &default_directory()) {
        Ok(_) => Vec::new(),
        Err(contradiction) => {
            say(&contradiction.to_string());
            let Contradiction { violations, .. } = contradiction;
            violations
        }
    };
    Cell {
        mode,
        route,
        seed: history.limits.seed,
        calls: history.ops.len(),
        unknown: history.ops.iter().filter(|op| op.is_unknown()).count(),
        rounds,
        tokens_back: violations
            .iter()
            .filter(|v| v.invariant == "tokens")
            .count(),
        violations: violations.len(),
        errors,
    }
}

fn errors(servers: &[Server]) -> BTreeMap<String, usize> {
    let mut errors = BTreeMap::new();
    for line in servers.iter().flat_map(Server::logs) {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        if line["level"] == "ERROR" {
            let message = line["message"].as_str().unwrap_or_default();
            *errors.entry(message.to_owned()).or_default() += 1;
        }
    }
    errors
}

#[expect(
    clippy::print_stderr,
    reason = "a run takes minutes, and somebody waits"
)]
fn say(text: &str) {
    eprintln!("patroni: {text}");
}
