//! One world, one load, some rounds of faults, one verdict.

use std::{
    panic::AssertUnwindSafe,
    path::Path,
    time::{Duration, Instant},
};

use fencepost_model::{Load, Options, Summary, history::What, verdict};
use futures_util::{FutureExt as _, future::join_all};
use rand::Rng as _;
use serde::Serialize;

use crate::{
    debts::Debts,
    faults::Stage,
    kept::Kept,
    plan::{Plan, Planned},
    recovery, say,
    world::{Setup, World},
};

/// What came of an episode.
#[derive(Debug, Serialize)]
pub(crate) struct Episode {
    pub(crate) seed: u64,
    pub(crate) setup: Setup,
    pub(crate) rounds: Vec<Round>,
    pub(crate) operations: usize,
    /// Of each kind of call, how often it had each outcome.
    pub(crate) outcomes: Vec<String>,
    #[serde(skip)]
    pub(crate) summary: Summary,
    pub(crate) violations: Vec<String>,
}

/// What came of a round.
#[derive(Debug, Serialize)]
pub(crate) struct Round {
    pub(crate) faults: Vec<&'static str>,
    /// From the begin of the first to the end of the last.
    pub(crate) lasted_ms: u128,
    /// Until every replica served again; none when one did not in time.
    pub(crate) recovery_ms: Option<u128>,
}

pub(crate) async fn run(mut plan: Plan, directory: &Path) -> Episode {
    let mut episode = Episode {
        seed: plan.seed,
        setup: plan.setup,
        rounds: Vec::new(),
        operations: 0,
        outcomes: Vec::new(),
        summary: Summary::default(),
        violations: Vec::new(),
    };
    let world = World::start(plan.setup, &mut plan.rng).await;
    let mut options = Options::new(plan.seed, world.endpoints());
    options.register = Some(world.register());
    let load = match Load::start(options).await {
        Ok(load) => load,
        Err(error) => panic!("the load does not start: {error}"),
    };
    for (n, round) in std::mem::take(&mut plan.rounds).into_iter().enumerate() {
        // Now and then all that was under way has settled before the next fault: the
        // checker excuses less then.
        let quiet = match plan.rng.random_bool(0.3) {
            true => 7000..8000,
            false => 500..2500,
        };
        let quiet = Duration::from_millis(plan.rng.random_range(quiet));
        tokio::time::sleep(quiet).await;
        let round = AssertUnwindSafe(run_round(&world, &load, n, round));
        let Ok((round, violations)) = round.catch_unwind().await else {
            // Nobody knows what is still broken; the history is there.
            let stuck = format!("round {n}: the nemesis did not end");
            say(&stuck);
            episode.violations.push(stuck);
            break;
        };
        let back = match round.recovery_ms {
            Some(ms) => format!("back after {ms} ms"),
            None => "not back".to_owned(),
        };
        say(&format!(
            "seed {} round {n}: {} for {} ms, {back}",
            plan.seed,
            round.faults.join(" + "),
            round.lasted_ms
        ));
        for violation in &violations {
            say(violation);
        }
        episode.rounds.push(round);
        episode.violations.extend(violations);
    }
    let history = match load.stop().await {
        Ok(history) => history,
        Err(error) => panic!("the load does not stop: {error}"),
    };
    episode.operations = history.ops.len();
    episode.summary = Summary::of(&history);
    episode.outcomes = episode
        .summary
        .to_string()
        .lines()
        .map(str::to_owned)
        .collect();
    if let Err(contradiction) = verdict(&history, directory) {
        say(&contradiction.to_string());
        episode.violations.push(contradiction.to_string());
    }
    episode
}

async fn run_round(
    world: &World,
    load: &Load,
    n: usize,
    faults: Vec<Planned>,
) -> (Round, Vec<String>) {
    let id = format!("{}-{n}", load.names()[0]);
    let names = faults.iter().map(|planned| planned.kind.name).collect();
    let forgetful = faults.iter().any(|planned| planned.kind.forgets());
    let debts = Debts::take(world, &id).await;
    let kept = Kept::default();
    let start = Instant::now();
    let breaking = join_all(faults.into_iter().map(|planned| async move {
        tokio::time::sleep(planned.after).await;
        let from = load.now();
        let stage = Stage {
            world,
            recorder: load.recorder().clone(),
            rng: planned.rng,
            time: planned.time,
        };
        (planned.kind.run)(stage).await;
        load.event(from, What::Fault(planned.kind.name.to_owned()));
    }));
    tokio::select! {
        _ = breaking => {}
        () = debts.lose(world, &id) => {}
        () = kept.take(world, &id) => {}
    }
    let ended = Instant::now();
    let lasted_ms = (ended - start).as_millis();
    let mut violations = Vec::new();
    let recovery_ms = match recovery::wait(world, &id).await {
        Ok(took) => Some(took.as_millis()),
        Err(late) => {
            violations.push(format!("recovery: {late}"));
            None
        }
    };
    if !forgetful {
        let gone = kept.check(world).await;
        violations.extend(gone.into_iter().map(|gone| format!("forgotten: {gone}")));
    }
    let stuck = debts.settle(world, ended).await;
    violations.extend(stuck.into_iter().map(|stuck| format!("stuck: {stuck}")));
    let round = Round {
        faults: names,
        lasted_ms,
        recovery_ms,
    };
    (round, violations)
}
