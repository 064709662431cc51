//! The closed loop: each client does one thing after the other, and what is
//! done within the window counts.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::{task::JoinSet, time::sleep_until};

use crate::cpu::Times;

/// Whatever went wrong: a benchmark counts it, shows the first, and goes on.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// One holder of one name, in the words that all systems share.
#[tonic::async_trait]
pub(crate) trait Client: Send {
    /// Asks for the lock; waits for it where the system can. Whether it was
    /// granted.
    async fn acquire(&mut self) -> Result<bool>;
    /// Gives it back.
    async fn release(&mut self) -> Result<()>;
    /// Extends the lease that is held.
    async fn renew(&mut self) -> Result<()>;
}

/// What clients do over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Acquire and release a name of one's own.
    Cycle,
    /// The same on a name that others want too: ask until it is granted, and
    /// rest for up to `pause` after each refusal.
    Contend { pause: Duration },
    /// Most on names of their own, and every fourth client on a name that seven more want, where
    /// the refused rest for up to `pause`.
    Mixed { pause: Duration },
    /// Renew a lease that was acquired before.
    Renew,
}

/// How long a cell is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) warm_up: Duration,
    pub(crate) measured: Duration,
}

/// What one round of one cell gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    pub(crate) cycles_per_s: f64,
    /// Acquires that were answered, granted or refused.
    pub(crate) answers_per_s: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Percent of one core, by process; the load generator is among them.
    pub(crate) cpu: Vec<(&'static str, f64)>,
}

/// How long after the window the last cycles may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// A client whose call failed rests, so that errors are not the load.
const REST: Duration = Duration::from_millis(10);

/// Lets all clients work at once. `processes` are those of the system.
pub(crate) async fn run(
    clients: Vec<Box<dyn Client>>,
    work: Work,
    timing: Timing,
    processes: &[(&'static str, u32)],
) -> Round {
    let from = Instant::now() + timing.warm_up;
    let window = Window {
        from,
        to: from + timing.measured,
    };
    let mut tasks = JoinSet::new();
    for client in clients {
        tasks.spawn(drive(client, work, window));
    }
    sleep_until(window.from.into()).await;
    let before = Times::read(processes);
    sleep_until(window.to.into()).await;
    let after = Times::read(processes);

    let mut total = Tally::new();
    let joined = tokio::time::timeout(PATIENCE, async {
        while let Some(tally) = tasks.join_next().await {
            match tally {
                Ok((tally, _)) => total.add(tally),
                Err(error) => total.failed(&error.into()),
            }
        }
    });
    if joined.await.is_err() {
        total.failed(&format!("{} clients hang", tasks.len()).into());
    }
    let seconds = timing.measured.as_secs_f64();
    Round {
        cycles_per_s: total.latencies.len() as f64 / seconds,
        answers_per_s: total.answers as f64 / seconds,
        p50_us: total.latencies.value_at_quantile(0.5) as f64 / 1e3,
        p99_us: total.latencies.value_at_quantile(0.99) as f64 / 1e3,
        errors: total.errors,
        first_error: total.first_error,
        cpu: after.since(&before, timing.measured),
    }
}

#[derive(Clone, Copy)]
struct Window {
    from: Instant,
    to: Instant,
}

impl Window {
    fn is_over(self) -> bool {
        Instant::now() >= self.to
    }

    fn contains(self, moment: Instant) -> bool {
        (self.from..self.to).contains(&moment)
    }
}

/// What one client, or all of them, did within the window.
struct Tally {
    /// ns
    latencies: Histogram<u64>,
    answers: u64,
    errors: u64,
    first_error: Option<String>,
}

impl Tally {
    fn new() -> Self {
        Self {
            latencies: Histogram::new(3).expect("three digits are allowed"),
            answers: 0,
            errors: 0,
            first_error: None,
        }
    }

    fn failed(&mut self, error: &Failure) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }

    fn add(&mut self, other: Self) {
        self.latencies += other.latencies;
        self.answers += other.answers;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }
}

/// Returns the client too: were it closed at once, what the system spent on it
/// would be gone before it is read.
async fn drive(
    mut client: Box<dyn Client>,
    work: Work,
    window: Window,
) -> (Tally, Box<dyn Client>) {
    let mut tally = Tally::new();
    if work == Work::Renew
        && let Err(error) = client.acquire().await
    {
        tally.failed(&error);
        return (tally, client);
    }
    while !window.is_over() {
        let began = Instant::now();
        let done = match work {
            Work::Cycle | Work::Contend { .. } | Work::Mixed { .. } => {
                cycle(&mut *client, work, window, &mut tally).await
            }
            Work::Renew => client.renew().await.map(|()| true),
        };
        let ended = Instant::now();
        match done {
            Ok(true) if window.contains(ended) => {
                let taken = u64::try_from((ended - began).as_nanos()).unwrap_or(u64::MAX);
                tally.latencies.record(taken).expect("it grows by itself");
            }
            Ok(_) => {}
            Err(error) => {
                tally.failed(&error);
                tokio::time::sleep(REST).await;
            }
        }
    }
    if work == Work::Renew
        && let Err(error) = client.release().await
    {
        tally.failed(&error);
    }
    (tally, client)
}

/// Whether a cycle was completed: a contender may see the window end first.
async fn cycle(
    client: &mut dyn Client,
    work: Work,
    window: Window,
    tally: &mut Tally,
) -> Result<bool> {
    loop {
        let granted = client.acquire().await?;
        tally.answers += u64::from(window.contains(Instant::now()));
        if granted {
            client.release().await?;
            return Ok(true);
        }
        let (Work::Contend { pause } | Work::Mixed { pause }) = work else {
            return Err("refused although nobody else wants it".into());
        };
        if window.is_over() {
            return Ok(false);
        }
        if !pause.is_zero() {
            tokio::time::sleep(pause.mul_f64(rand::random())).await;
        }
    }
}
