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
//! - [`BOUND`] after the end of the round's faults at the latest each replica serves
//!   again: a new client has acquired, renewed and released. Nobody restarts a replica
//!   for that (`recovery`); one that was killed begins to start at the fault's end, and
//!   its start is part of that time.
//! - A lease that was granted during a fault is still there (`kept`), but for those
//!   that the promotion of an asynchronous standby may have lost.
//! - No lease blocks its name for longer than its TTL, or than until the replicas
//!   serve again: neither one whose holder went away before or during the fault, nor
//!   one that nobody was told of; the latter may be granted as late as the end of the
//!   fault and the server's time-out (`debts`).
//! - Each fault had an effect, which was seen while it lasted (`faults`): one that was
//!   alone, and of each kind one at least.
//!
//! The history of an episode in which something did not hold is saved, and can be
//! looked at again with `fencepost-model check FILE`.

mod debts;
mod disk;
mod episode;
mod faults;
mod http;
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
    /// The server of an older version, which one of the replicas is then.
    pub older: Option<PathBuf>,
}

/// Runs episodes until the time is over, at least one.
///
/// # Panics
///
/// When this machine does not do what an episode needs before its first fault.
pub async fn run(options: &Options) -> Report {
    let start = Instant::now();
    let mut report = Report::new(options);
    for seed in options.seed.. {
        let Some(plan) = Plan::of(seed, options.rounds, &options.only) else {
            break;
        };
        say(&format!("seed {seed}: {:?}", plan.setup));
        report.add(episode::run(plan, options).await);
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
