//! One world, one load, some rounds of faults, one verdict.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    time::Duration,
};

use fencepost_model::{
    Load, Summary,
    history::{History, What},
    save, verdict,
};
use futures_util::{FutureExt as _, future::join_all};
use rand::Rng as _;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::{
    Options,
    debts::Debts,
    faults::{Seen, Stage},
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
    /// Where the history is, when there are any.
    pub(crate) history: Option<PathBuf>,
}

/// A fault that happened.
#[derive(Debug, Serialize)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// What was seen of it; none: it had no effect.
    pub(crate) effect: Seen,
}

/// What came of a round.
#[derive(Debug, Serialize)]
pub(crate) struct Round {
    pub(crate) faults: Vec<Fault>,
    /// From the begin of the first to the end of the last.
    pub(crate) lasted_ms: u128,
    /// Until every replica served again; none when one did not in time.
    pub(crate) recovery_ms: Option<u128>,
}

pub(crate) async fn run(mut plan: Plan, options: &Options) -> Episode {
    let mut episode = Episode {
        seed: plan.seed,
        setup: plan.setup,
        rounds: Vec::new(),
        operations: 0,
        outcomes: Vec::new(),
        summary: Summary::default(),
        violations: Vec::new(),
        history: None,
    };
    let world = World::start(plan.setup, &mut plan.rng, options.older.as_deref()).await;
    let mut wanted = fencepost_model::Options::new(plan.seed, world.endpoints());
    wanted.register = Some(world.register());
    let load = match Load::start(wanted).await {
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
        sleep(quiet).await;
        let round = AssertUnwindSafe(run_round(&world, &load, n, round));
        let Ok((round, violations)) = round.catch_unwind().await else {
            // Nobody knows what is still broken; the history is there.
            let stuck = format!("round {n}: the nemesis did not end");
            say(&stuck);
            episode.violations.push(stuck);
            break;
        };
        say(&format!("seed {} round {n}: {round}", plan.seed));
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
    if let Err(contradiction) = verdict(&history, &options.directory) {
        say(&contradiction.to_string());
        episode.violations.push(contradiction.to_string());
    }
    if !episode.violations.is_empty() {
        episode.history = saved(&history, &options.directory);
    }
    episode
}

/// Where the history is, also when only the nemesis itself found something.
fn saved(history: &History, directory: &Path) -> Option<PathBuf> {
    save(history, directory)
        .inspect_err(|error| say(&format!("the history is not saved: {error}")))
        .ok()
}

async fn run_round(
    world: &World,
    load: &Load,
    n: usize,
    faults: Vec<Planned>,
) -> (Round, Vec<String>) {
    let id = format!("{}-{n}", load.names()[0]);
    let debts = Debts::take(world, &id).await;
    let kept = Kept::default();
    let start = Instant::now();
    let breaking = join_all(faults.into_iter().map(|planned| async move {
        sleep(planned.after).await;
        let from = load.now();
        let stage = Stage {
            world,
            recorder: load.recorder().clone(),
            rng: planned.rng,
            time: planned.time,
        };
        let ended = (planned.kind.run)(stage).await;
        let name = planned.kind.name;
        load.event(from, What::Fault(name.to_owned()));
        let effect = ended.seen;
        (Fault { name, effect }, ended.at)
    }));
    let broken = tokio::select! {
        broken = breaking => broken,
        () = debts.lose(world, &id) => Vec::new(),
        () = kept.take(world, load.recorder(), &id) => Vec::new(),
    };
    let (faults, ends): (Vec<_>, Vec<_>) = broken.into_iter().unzip();
    let ended = ends.into_iter().max().unwrap_or(start);
    let lasted_ms = (ended - start).as_millis();
    let mut violations = Vec::new();
    if let [Fault { name, effect: None }] = faults.as_slice() {
        violations.push(format!("without effect, though alone: {name}"));
    }
    let recovery_ms = match recovery::wait(world, &id, ended).await {
        Ok(took) => Some(took.as_millis()),
        Err(late) => {
            violations.push(format!("recovery: {late}"));
            None
        }
    };
    let history = load.recorder().history();
    let (gone, stuck) = tokio::join!(kept.check(world, &history), debts.settle(world, ended));
    violations.extend(gone.into_iter().map(|gone| format!("forgotten: {gone}")));
    violations.extend(stuck.into_iter().map(|stuck| format!("stuck: {stuck}")));
    let round = Round {
        faults,
        lasted_ms,
        recovery_ms,
    };
    (round, violations)
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, Fault { name, effect }) in self.faults.iter().enumerate() {
            let and = if n == 0 { "" } else { " + " };
            let effect = effect.as_deref().unwrap_or("NOTHING SEEN");
            write!(f, "{and}{name} ({effect})")?;
        }
        write!(f, " for {} ms, ", self.lasted_ms)?;
        match self.recovery_ms {
            Some(ms) => write!(f, "back after {ms} ms"),
            None => write!(f, "not back"),
        }
    }
}
