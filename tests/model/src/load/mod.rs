//! The load: random clients, each a task, all joined at the end.

mod library;
mod line;
mod register;
mod stub;

use std::{ops::Range, time::Duration};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::line::failed;
use crate::{
    history::{History, Limits, Time, What},
    recorder::Recorder,
};

/// Why a load did not start, or its end could not be read.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// A call is given up after this time.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the clients do, and to whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of all random choices. Timing is the machine's.
    pub seed: u64,
    /// The replicas, as URLs.
    pub endpoints: Vec<String>,
    /// The database of the fenced register, as a URL; none: no writes.
    pub register: Option<String>,
    /// How many clients: one looks, and of the others every third uses the client
    /// library.
    pub clients: usize,
    /// How many resources they contend for.
    pub resources: usize,
    /// The TTLs, from and to.
    pub ttl: Range<Duration>,
    /// How many of a hundred Acquires are given up under way.
    pub drops: u32,
    /// In how many of a hundred steps a holder asks several times at once for what it
    /// has.
    pub crowds: u32,
    /// In how many of a hundred steps a holder renews just before its end.
    pub brink: u32,
    /// The longest pause between two steps of a client.
    pub pause: Duration,
    /// What the checker takes for granted.
    pub limits: Limits,
}

impl Options {
    /// Twelve clients that contend for four resources.
    #[must_use]
    pub fn new(seed: u64, endpoints: Vec<String>) -> Self {
        Self {
            seed,
            endpoints,
            register: None,
            clients: 12,
            resources: 4,
            ttl: Duration::from_millis(500)..Duration::from_millis(2000),
            drops: 14,
            crowds: 2,
            brink: 2,
            pause: Duration::from_millis(20),
            limits: Limits {
                seed,
                ..Limits::default()
            },
        }
    }
}

/// Clients at work. Dropping it drops them; [`Load::stop`] lets them finish.
#[derive(Debug)]
pub struct Load {
    recorder: Recorder,
    stop: CancellationToken,
    clients: JoinSet<()>,
    names: Vec<String>,
    register: Option<String>,
}

impl Load {
    /// Starts the clients.
    ///
    /// # Errors
    ///
    /// When an endpoint is not a URL, or the register's database is away.
    pub async fn start(options: Options) -> Result<Self, Error> {
        announce(options.seed);
        // Leases of an earlier run on the same servers are none of this history.
        let run: u32 = rand::random();
        let names: Vec<String> = (0..options.resources)
            .map(|n| format!("model-{run:08x}-{n}"))
            .collect();
        if let Some(url) = &options.register {
            register::install(url).await?;
        }
        let recorder = Recorder::new(options.limits.clone());
        let stop = CancellationToken::new();
        let mut clients = JoinSet::new();
        for number in 0..options.clients {
            let context = Context {
                number,
                rng: StdRng::seed_from_u64(options.seed.wrapping_add(number as u64 * 0x9e37_79b9)),
                recorder: recorder.clone(),
                stop: stop.clone(),
                names: names.clone(),
                ttl: options.ttl.clone(),
                drops: options.drops,
                crowds: options.crowds,
                brink: options.brink,
                pause: options.pause,
                writer: options.register.clone().map(register::Writer::new),
                made: 0,
            };
            if number == 0 {
                // One does nothing but look.
                let client = stub::Client::new(context, &options.endpoints)?;
                clients.spawn(client.watch());
            } else if number % 3 == 2 {
                let client = library::Client::new(context, &options.endpoints)?;
                clients.spawn(client.run());
            } else {
                let client = stub::Client::new(context, &options.endpoints)?;
                clients.spawn(client.run());
            }
        }
        Ok(Self {
            recorder,
            stop,
            clients,
            names,
            register: options.register,
        })
    }

    /// The clock, and the history so far.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// The resources that are contended for.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The moment on the clock of the history.
    #[must_use]
    pub fn now(&self) -> Time {
        self.recorder.now()
    }

    /// Tells of something that was done to the system from `from` until now.
    pub fn event(&self, from: Time, what: What) {
        self.recorder.event(from, self.now(), what);
    }

    /// Lets all clients finish the calls that are under way, joins them, and reads
    /// the register's log.
    ///
    /// # Errors
    ///
    /// When the register's database is away.
    ///
    /// # Panics
    ///
    /// When a client has panicked.
    pub async fn stop(mut self) -> Result<History, Error> {
        self.stop.cancel();
        while let Some(ended) = self.clients.join_next().await {
            if let Err(error) = ended {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        let mut history = self.recorder.history();
        if let Some(url) = &self.register {
            history.register = register::log(url, &self.names).await?;
        }
        Ok(history)
    }
}

#[expect(clippy::print_stderr, reason = "who sees a run fail wants its seed")]
fn announce(seed: u64) {
    eprintln!("model: seed {seed}");
}

/// What each client has.
#[derive(Debug)]
struct Context {
    number: usize,
    rng: StdRng,
    recorder: Recorder,
    stop: CancellationToken,
    names: Vec<String>,
    ttl: Range<Duration>,
    drops: u32,
    crowds: u32,
    brink: u32,
    pause: Duration,
    writer: Option<register::Writer>,
    made: u32,
}

impl Context {
    /// A name of this client's that was never used.
    fn fresh(&mut self) -> String {
        self.made += 1;
        format!("c{}-{}", self.number, self.made)
    }

    fn resource(&mut self) -> String {
        let n = self.rng.random_range(0..self.names.len());
        self.names[n].clone()
    }

    fn ttl(&mut self) -> Duration {
        let ttl = self.rng.random_range(self.ttl.clone());
        Duration::from_millis(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    /// Rests for a random time up to `longest`; less when the load is stopped.
    async fn rest(&mut self, longest: Duration) {
        let pause = longest.mul_f64(self.rng.random());
        self.wait(pause).await;
    }

    /// Rests for so long.
    async fn wait(&self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Writes to the register, with a lease that is held or was.
    async fn write(&mut self, resource: &str, owner: &str, token: i64) {
        if let Some(writer) = &mut self.writer {
            writer
                .write(&self.recorder, self.number, resource, owner, token)
                .await;
        }
    }
}
