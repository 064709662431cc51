//! A nemesis: breaks real replicas and a real Postgres while the random clients of
//! [`fencepost_model`] work, and has the history checked.
//!
//! # What happens
//!
//! A run is a row of *episodes*, and an episode is a world of its own: a [`Setup`],
//! three replicas, a load, and some *rounds*. In a round one fault happens, or two
//! that overlap; each begins, lasts and ends (`faults`). All of it is drawn from
//! the episode's seed, and the next episode has the next seed; timing is the
//! machine's.
//!
//! # What must hold
//!
//! - All invariants of the model. A fault is an event in the history; what that
//!   excuses is said at [`What`](fencepost_model::history::What). Only the promotion of an asynchronous
//!   standby and a clock that steps excuse more than late effects.
//! - After the end of the round's faults each replica serves again within
//!   [`BOUND`]: a new client has acquired, renewed and released. Nobody restarts a replica for
//!   that (`recovery`).
//! - A lease that was granted during a fault is still there (`kept`), but after the
//!   promotion of an asynchronous standby.
//! - No lease blocks its name for longer than its TTL: neither one whose holder went
//!   away just before, nor one that nobody was told of, from during the fault (`debts`).
//!
//! A history that contradicts an invariant is saved, and can be looked at again with
//! `fencepost-model check FILE`.

mod debts;
mod disk;
mod episode;
mod faults;
mod kept;
mod plan;
mod recovery;
mod report;
mod world;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

pub use faults::names;
pub use recovery::BOUND;
pub use report::Report;
pub use world::Setup;

use crate::plan::Plan;

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of the first episode.
    pub seed: u64,
    /// No episode begins after this time.
    pub time: Duration,
    /// The kinds of faults; empty: all.
    pub only: Vec<String>,
    /// How many rounds an episode has.
    pub rounds: usize,
    /// Where histories are saved.
    pub directory: PathBuf,
}

/// Runs episodes until the time is over, at least one.
///
/// # Panics
///
/// When this machine does not do what an episode needs before its first fault.
pub async fn run(options: &Options) -> Report {
    let start = Instant::now();
    let mut report = Report::new(options.seed);
    for seed in options.seed.. {
        let plan = Plan::of(seed, options.rounds, &options.only);
        say(&format!("seed {seed}: {:?}", plan.setup));
        report.add(episode::run(plan, &options.directory).await);
        if start.elapsed() >= options.time {
            break;
        }
    }
    report.finish(start.elapsed());
    report
}

#[expect(
    clippy::print_stderr,
    reason = "who waits for a run wants to see it go on"
)]
fn say(line: &str) {
    eprintln!("chaos: {line}");
}
