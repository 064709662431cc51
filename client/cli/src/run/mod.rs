//! `fencepost run`: a command that runs while a lock is held.
//!
//! The command gets a process group of its own, and is told and ended as a
//! whole. In the order of what happens:
//!
//! 1. The lock is acquired, for as long as `--wait` says. A signal ends the wait,
//!    and what may have been granted by then is given back.
//! 2. The command starts. Signals that come here go to its group, and it has the
//!    terminal if we had.
//! 3. When it ends, the lock is given back, and its exit code is ours. What it
//!    left in the background is left alone, and does not hold up anything. Not so
//!    when a signal has ended it, or one that ends programs was handed on: that is
//!    a stop, and what is left of the group is stopped as well.
//!
//! Stopping, by TERM or because the lease is not renewed: the group gets TERM,
//! after `--grace` KILL, and the lock is renewed meanwhile and given back once
//! nothing of the group is left. A lease that is not confirmed leaves a quarter of
//! its time for this: TERM comes when so much is left, and KILL a margin before
//! it is over, so that nothing of the group is left when the next holder starts.
//! A lease that the server calls over has ended early: the command has that margin
//! from TERM to KILL.
//!
//! Nothing of the group outlives us, or the lease, when we are killed or stopped:
//! see [`exec`] for the command and [`guardian`] for the rest.

use std::{ffi::OsString, time::Duration};

use fencepost_client::{AcquireOptions, Client, Error, Guard, LostReason};
use humantime::parse_duration;
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

use self::job::{Change, Job};
use crate::{
    acquire::{self, label},
    clock::at,
    exit::{Exit, Failure},
    output,
    signals::{self, Signals},
};

pub(crate) mod exec;
pub(crate) mod guardian;
mod job;
mod terminal;

/// How long what was granted to nobody is waited for to be given back, when a
/// signal ends us.
const GIVING_BACK: Duration = Duration::from_millis(600);

/// How long what was killed and is still there is waited for: another user's.
const UNKILLABLE: Duration = Duration::from_secs(5);

/// What a longer grace counts as.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How long nothing is said of what is waited for.
const SILENT_WAIT: Duration = Duration::from_secs(1);

/// Between looks at a group of which only orphans are left.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What `run` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The name to lock.
    resource: String,

    // No FENCEPOST_OWNER: the command finds it in its environment, and another
    // `run` in there would take the lock from its parent.
    /// Names ONE holder, never a host or a service. [default: a new name of host,
    /// process id and a random part]
    #[arg(long)]
    owner: Option<String>,

    /// How long the lease lasts without a renewal. A quarter of it must be enough
    /// for the command to end when the server is away.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    ttl: Duration,

    /// How long to wait for a lock that somebody else has; 0s tries once.
    /// [default: without limit]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    wait: Option<Duration>,

    /// What to do when the lease is lost.
    #[arg(long, value_enum, default_value_t = OnLost::Kill)]
    on_lost: OnLost,

    /// How long the command has between TERM and KILL; less when the lease ends
    /// before.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    grace: Duration,

    /// Stop the command, as TERM does, when it has had the lock for so long.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    max_hold: Option<Duration>,

    /// Move our own exit codes away from the command's: 64 becomes N, 69
    /// N+5, 70 N+6, 75 N+11, 76 N+12, 78 N+14. A command line that makes no sense
    /// ends with 64 all the same.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=241))]
    pub(crate) own_exit_codes: Option<u8>,

    /// Shown to whoever is refused, such as a build or a trace id. Repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// The command, and its arguments. It finds FENCEPOST_RESOURCE,
    /// FENCEPOST_OWNER and FENCEPOST_TOKEN in its environment.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnLost {
    /// Stop the command before the lease ends.
    Kill,
    /// Say so, and let it go on: for work whose every write is fenced.
    Warn,
}

pub(crate) async fn run(args: Args, client: &Client) -> Result<Exit, Failure> {
    let mut signals = Signals::listen().map_err(Failure::Machine)?;
    let guard = tokio::select! {
        guard = acquire(&args, client) => guard?,
        signal = signals.deadly() => {
            give_back(client).await;
            return Ok(Exit::by_signal(signal));
        }
    };
    let job = match Job::start(&args.command, &guard) {
        Ok(job) => job,
        Err(error) => {
            // Nobody needs it, and we will not be there to do it later.
            let _: Result<(), Error> = guard.release().await;
            return Err(Failure::Machine(error));
        }
    };
    let mut watch = Watch {
        guard: &guard,
        job,
        on_lost: args.on_lost,
        grace: args.grace,
        notice: args.grace.min(args.ttl / 4),
        margin: margin(args.ttl),
        kill_at: None,
        give_up_at: None,
        lease: Lease::Confirmed,
    };
    let max_hold = args.max_hold.and_then(after);
    let exit = watch.until_ended(&mut signals, max_hold).await;
    let known_lost = watch.lease == Lease::Lost;
    watch.job.done();
    if known_lost {
        // Most likely nobody answers; nobody should have to wait for that.
        drop(guard);
        give_back(client).await;
        return Ok(exit);
    }
    let released = tokio::select! {
        released = guard.release() => released,
        // Somebody is in a hurry. It goes on without being waited for.
        _ = signals.deadly() => {
            give_back(client).await;
            return Ok(exit);
        }
    };
    match released {
        Ok(()) => Ok(exit),
        // Learned only now: the command may have overlapped with the next one.
        Err(error @ Error::Lost { .. }) if args.on_lost == OnLost::Kill => Err(error.into()),
        Err(error) => {
            output::error(&format!("the lock was not given back: {error}"));
            Ok(exit)
        }
    }
}

/// Late is better than never, but not for long.
async fn give_back(client: &Client) {
    let _: Result<(), _> = timeout(GIVING_BACK, client.released()).await;
}

/// Whoever waits for long is told for what, once.
async fn acquire(args: &Args, client: &Client) -> Result<Guard, Error> {
    let begun = Instant::now();
    let wait = args.wait.unwrap_or(Duration::MAX);
    let at_first = options(args).wait(wait.min(SILENT_WAIT));
    match client.acquire_with_retry(&args.resource, at_first).await {
        Err(error) if wait > SILENT_WAIT && (error.is_transient() || is_refusal(&error)) => {
            output::error(&format!("waiting: {error}"));
        }
        outcome => return outcome,
    }
    let mut options = options(args);
    if let Some(wait) = args.wait {
        options = options.wait(wait.saturating_sub(begun.elapsed()));
    }
    client.acquire_with_retry(&args.resource, options).await
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Refused { .. })
}

fn options(args: &Args) -> AcquireOptions {
    acquire::options(args.ttl, args.owner.clone(), args.labels.clone()).margin(margin(args.ttl))
}

/// From KILL to the end of the lease: for a machine that is slow just then.
fn margin(ttl: Duration) -> Duration {
    (ttl / 5).min(Duration::from_secs(1)).max(ttl / 2000)
}

/// What was said of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lease {
    Confirmed,
    /// Its end is near, and the command was told to end before.
    Late,
    Lost,
}

/// Looks after the command until nothing of it needs looking after.
struct Watch<'a> {
    guard: &'a Guard,
    job: Job,
    on_lost: OnLost,
    grace: Duration,
    /// With so little left of the lease, the command is told to end.
    notice: Duration,
    margin: Duration,
    /// The command was told to end, and will be killed then.
    kill_at: Option<Instant>,
    /// It was killed, and what is still there then cannot be.
    give_up_at: Option<Instant>,
    lease: Lease,
}

impl Watch<'_> {
    async fn until_ended(&mut self, signals: &mut Signals, max_hold: Option<Instant>) -> Exit {
        let mut max_hold = max_hold;
        let mut ended = None;
        let mut told = false;
        loop {
            if let Some(exit) = ended
                && (self.kill_at.is_none() || self.job.is_gone() || passed(self.give_up_at))
            {
                // The guardian may have been faster, when we got no time to run.
                let overdue = self.lease != Lease::Confirmed || !self.guard.is_held();
                let stopped_for_it = overdue && self.on_lost == OnLost::Kill;
                return if stopped_for_it { Exit::Lost } else { exit };
            }
            let guard = self.guard;
            if self.on_lost == OnLost::Kill && self.lease != Lease::Lost {
                self.job.not_beyond(guard);
            }
            tokio::select! {
                biased;
                reason = guard.lost(), if self.lease != Lease::Lost => self.lost(reason),
                () = nearly_over(guard, self.notice),
                    if self.lease == Lease::Confirmed && self.on_lost == OnLost::Kill => self.late(),
                () = at(self.kill_at) => {
                    self.job.kill();
                    // Until then it is gone, or cannot be killed yet.
                    self.kill_at = after(LOOK_AGAIN);
                    self.give_up_at = self.give_up_at.or_else(|| after(UNKILLABLE));
                }
                () = at(max_hold) => {
                    max_hold = None;
                    self.stop(self.grace);
                    output::error("the command has had the lock for as long as it may: stopping it");
                }
                signal = signals.next() => {
                    if signal == Signal::TERM {
                        self.stop(self.grace);
                    } else {
                        told |= signals::ends_programs(signal);
                        self.job.signal(signal);
                    }
                }
                change = self.job.changed() => match change {
                    Change::Ended { exit, by_signal } => {
                        ended = Some(exit);
                        if told || by_signal {
                            self.stop(self.grace);
                        }
                    }
                    Change::Paused => self.job.pause_with_it(),
                },
                // The rest of the group: nobody tells us when it ends.
                () = sleep(LOOK_AGAIN), if ended.is_some() => {}
                // For the guardian.
                () = sleep(self.margin / 2) => {}
            }
        }
    }

    fn lost(&mut self, reason: LostReason) {
        self.lease = Lease::Lost;
        match self.on_lost {
            OnLost::Warn => {
                output::error(&format!("the lease is lost, the command goes on: {reason}"));
            }
            OnLost::Kill => {
                self.stop(if reason == LostReason::Unconfirmed {
                    // It had its notice; what is left of the lease is the margin.
                    Duration::ZERO
                } else {
                    self.grace.min(self.margin)
                });
                output::error(&format!(
                    "the lease is lost, stopping the command: {reason}"
                ));
            }
        }
    }

    fn late(&mut self) {
        self.lease = Lease::Late;
        self.stop(self.grace);
        output::error("the lease is not renewed and ends soon: stopping the command");
    }

    // First, and then it is said: a log that nobody reads may hold us up.
    /// Tells the command to end, within this time.
    fn stop(&mut self, grace: Duration) {
        self.job.signal(Signal::TERM);
        // What was paused would not hear it.
        self.job.signal(Signal::CONT);
        // No time that a clock can tell is later than any.
        let kill_at = after(grace).or_else(|| after(LONGEST));
        self.kill_at = [self.kill_at, kill_at].into_iter().flatten().min();
    }
}

/// Waits until so little of the lease is left. Each renewal puts it off.
async fn nearly_over(guard: &Guard, notice: Duration) {
    loop {
        match guard.remaining().checked_sub(notice) {
            None | Some(Duration::ZERO) => return,
            Some(time) => sleep(time).await,
        }
    }
}

/// None when no clock can tell it.
fn after(time: Duration) -> Option<Instant> {
    Instant::now().checked_add(time)
}

fn passed(time: Option<Instant>) -> bool {
    time.is_some_and(|time| time <= Instant::now())
}
