//! `fencepost sidecar`: the lock of a process next door.
//!
//! It stands for election again and again, and keeps the lock while it has it.
//! Its neighbour, of any language, asks for the lease and its token over HTTP on
//! the loopback interface, or reads a file. What happens to a lease:
//!
//! - Gained: the file says so, then the hook runs.
//! - Lost: the file says so, then the hook runs, then it stands again. A new lease
//!   has a new token.
//! - `POST /release`: the neighbour has stopped. The hook runs, the lock is given
//!   back, and for the time of a lease others go first.
//! - Told to end (TERM, INT, HUP or QUIT): it keeps the lock until the neighbour
//!   releases it, or `--release-after`; at once when it is told again.
//! - `--require-heartbeat`: a neighbour that hangs says nothing, so without a
//!   `POST /heartbeat` in time nothing is renewed any longer, and the lease runs
//!   out. It stands again after the next one.
//!
//! The neighbour must do what every holder must: stop when the lease is lost, and
//! fence its writes with the token.

use std::{
    convert::Infallible, future::pending, io, net::SocketAddr, path::PathBuf, sync::Arc,
    time::Duration,
};

use fencepost_client::{Client, ClientBuilder, Error, Guard, LostReason};
use humantime::parse_duration;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use self::{
    hooks::Hooks,
    metrics::Metrics,
    seat::{Order, Seat},
};
use crate::{
    acquire::{self, label},
    clock::at,
    exit::{Exit, Failure},
    output,
    signals::Signals,
};

mod hooks;
mod http;
mod metrics;
mod seat;

/// How often it is asked anew who has the lock, at least.
const LOOK: Duration = Duration::from_secs(2);

/// How often the state file says for how long the lease may be trusted.
const TELL: Duration = Duration::from_secs(1);

/// Why the hook is run, besides the reasons of the contract and `UNCONFIRMED`.
const RELEASED: &str = "RELEASED";
const NO_HEARTBEAT: &str = "NO_HEARTBEAT";

/// How long what was granted to nobody is waited for to be given back.
const GIVING_BACK: Duration = Duration::from_millis(800);

/// What `sidecar` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The name to lock.
    resource: String,

    /// Names ONE holder, such as a pod and never a deployment. [default: a new
    /// name for each lease, of host, process id and a random part]
    #[arg(long)]
    owner: Option<String>,

    /// How long the lease lasts without a renewal.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = parse_duration)]
    ttl: Duration,

    /// Shown to whoever is refused, such as a build or a zone. Repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Where the neighbour asks: GET /lease, POST /release, /heartbeat, /rejected. An
    /// IP address and a port. Whoever reaches it can give the lock back.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50053")]
    listen: SocketAddr,

    /// Where Kubernetes asks: GET /livez, GET /readyz. [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    probe_listen: Option<SocketAddr>,

    /// Where Prometheus asks: GET /metrics. [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<SocketAddr>,

    /// When /readyz says yes.
    #[arg(long, value_enum, default_value_t = http::Ready::Held)]
    ready: http::Ready,

    /// A file that says what GET /lease does, replaced as a whole at each change.
    #[arg(long, value_name = "PATH")]
    state_file: Option<PathBuf>,

    /// A command for `sh -c` when the lock was gained, which finds
    /// FENCEPOST_RESOURCE, FENCEPOST_OWNER and FENCEPOST_TOKEN in its
    /// environment. It has 10s.
    #[arg(long, value_name = "COMMAND")]
    on_gain: Option<String>,

    /// The same when the lock was lost, or is about to be given back, with
    /// FENCEPOST_REASON: RELEASED, NO_HEARTBEAT, UNCONFIRMED, or what the server
    /// said, such as NOT_OWNER.
    #[arg(long, value_name = "COMMAND")]
    on_loss: Option<String>,

    /// Stand, and renew, only while the neighbour sends a POST /heartbeat this
    /// often. It always should: while the lock is not held, too, when it gets 409.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    require_heartbeat: Option<Duration>,

    /// How long the lock is kept for the neighbour after we are told to end. 0s as
    /// a native sidecar, which is told only when its neighbours have ended.
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_duration)]
    release_after: Duration,
}

pub(crate) async fn run(args: Args, client: ClientBuilder) -> Result<Exit, Failure> {
    let metrics = Arc::new(Metrics::new());
    let client = &client
        .observer(metrics.clone())
        .build()
        .map_err(Failure::Client)?;
    let mut signals = Signals::listen().map_err(Failure::Machine)?;
    let (seat, mut orders) = Seat::new(&args.resource, args.state_file.clone());
    seat.publish()
        .map_err(|error| Failure::Setting("--state-file", error))?;
    let closing = CancellationToken::new();
    let mut servers = JoinSet::new();
    let listener = bind("--listen", args.listen).await?;
    servers.spawn(http::serve_neighbour(
        listener,
        seat.clone(),
        Arc::clone(&metrics),
        closing.clone(),
    ));
    if let Some(address) = args.probe_listen {
        let listener = bind("--probe-listen", address).await?;
        let (seat, closing) = (seat.clone(), closing.clone());
        servers.spawn(http::serve_probes(listener, seat, args.ready, closing));
    }
    if let Some(address) = args.metrics_listen {
        let listener = bind("--metrics-listen", address).await?;
        let (seat, closing) = (seat.clone(), closing.clone());
        servers.spawn(http::serve_metrics(listener, seat, metrics, closing));
    }
    let sidecar = Sidecar {
        hooks: Hooks::new(&args),
        args,
        client,
        seat,
    };
    let ended = tokio::select! {
        ended = sidecar.stand_and_hold(&mut signals, &mut orders) => ended,
        () = sidecar.hooks.bury_orphans() => Ok(()),
        Some(_ended) = servers.join_next() => {
            // Without a listener we are of no use. The neighbour may be at work and
            // cannot say when it has stopped: its lease runs out, and is not released.
            std::mem::forget(sidecar.seat.leave());
            Err(Failure::Machine(io::ErrorKind::NotConnected.into()))
        }
    };
    sidecar.seat.leave();
    // Answers that are on their way, and grants that nobody waits for.
    drop(orders);
    closing.cancel();
    let _: Result<(), _> = timeout(GIVING_BACK, async {
        servers.join_all().await;
        client.released().await;
    })
    .await;
    ended.map(|()| Exit::Done)
}

async fn bind(flag: &'static str, address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address)
        .await
        .map_err(|error| Failure::Setting(flag, error))
}

/// Why a lease is over.
enum Left {
    Lost(&'static str),
    /// The neighbour has stopped, and wants to hear when others can go on.
    Released(Option<Order>),
}

struct Sidecar<'a> {
    args: Args,
    client: &'a Client,
    seat: Seat,
    hooks: Hooks,
}

impl Sidecar<'_> {
    /// Until we are told to end.
    async fn stand_and_hold(
        &self,
        signals: &mut Signals,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<(), Failure> {
        loop {
            let guard = tokio::select! {
                guard = self.stand() => guard?,
                _ = signals.deadly() => return Ok(()),
                never = refuse(orders) => match never {},
            };
            let token = guard.fencing_token();
            let owner = guard.owner().to_owned();
            let lost = guard.lost_token();
            self.seat.sit(guard);
            output::error(&format!("gained the lock, token {token}"));
            let left = self.hold(signals, orders, &lost, &owner, token).await;
            match left {
                Left::Lost(reason) => {
                    // Not given back before the neighbour was told.
                    let _guard = self.seat.leave();
                    output::error(&format!("lost the lock: {reason}"));
                    let hook = self.hooks.lost(&owner, token, reason);
                    self.or_told(hook, signals, orders).await;
                }
                Left::Released(order) => {
                    let hook = self.hooks.lost(&owner, token, RELEASED);
                    self.or_told(hook, signals, orders).await;
                    let given_back = match self.seat.leave() {
                        Some(guard) => guard.release().await,
                        None => Ok(()),
                    };
                    match &given_back {
                        Ok(()) => output::error("released the lock"),
                        Err(error) => {
                            output::error(&format!("the lock was not given back: {error}"));
                        }
                    }
                    if let Some(order) = order {
                        order.carried_out(given_back);
                    }
                    if !self.seat.is_stopping() {
                        self.or_told(sleep(self.args.ttl), signals, orders).await;
                    }
                }
            }
            if self.seat.is_stopping() {
                return Ok(());
            }
        }
    }

    /// Until this is done, or we are told to end: then it is not waited for.
    async fn or_told(
        &self,
        work: impl Future<Output = ()>,
        signals: &mut Signals,
        orders: &mut mpsc::Receiver<Order>,
    ) {
        tokio::select! {
            () = work => {}
            _ = signals.deadly() => {
                self.seat.stop();
            }
            never = refuse(orders) => match never {},
        }
    }

    /// Until the lock is ours.
    async fn stand(&self) -> Result<Guard, Failure> {
        loop {
            if let Some(within) = self.args.require_heartbeat {
                self.seat.heartbeat_within(within).await;
            }
            let Args {
                ttl, owner, labels, ..
            } = &self.args;
            let options = acquire::options(*ttl, owner.clone(), labels.clone()).wait(LOOK);
            match self
                .client
                .acquire_with_retry(&self.args.resource, options)
                .await
            {
                Ok(guard) => return Ok(guard),
                Err(Error::Refused { holder }) => self.seat.refused(holder),
                // Only what is our own fault does not pass by itself.
                Err(error @ Error::Invalid { .. }) => return Err(error.into()),
                Err(error) => {
                    self.seat.unknown();
                    output::error(&format!("{error}; trying again"));
                    if !error.is_transient() {
                        sleep(LOOK).await;
                    }
                }
            }
        }
    }

    async fn hold(
        &self,
        signals: &mut Signals,
        orders: &mut mpsc::Receiver<Order>,
        lost: &CancellationToken,
        owner: &str,
        token: i64,
    ) -> Left {
        let mut gained = std::pin::pin!(self.hooks.gained(owner, token));
        let mut told = false;
        let mut silent = false;
        let mut release_at: Option<Instant> = None;
        loop {
            tokio::select! {
                biased;
                () = lost.cancelled() => {
                    let reason = self.seat.lost_reason();
                    let by_silence = silent && reason == LostReason::Unconfirmed;
                    return Left::Lost(if by_silence { NO_HEARTBEAT } else { reason.as_str() });
                }
                Some(order) = orders.recv() => return Left::Released(Some(order)),
                () = at(release_at) => return Left::Released(None),
                _ = signals.deadly() => {
                    let again = self.seat.stop();
                    let grace = if again { Duration::ZERO } else { self.args.release_after };
                    release_at = Instant::now().checked_add(grace);
                }
                () = self.silence(), if !silent => {
                    silent = true;
                    output::error("no heartbeat in time: the lease is not renewed any longer");
                    self.seat.stop_renewing();
                }
                () = &mut gained, if !told => told = true,
                () = sleep(TELL) => self.seat.tell(),
            }
        }
    }

    /// Until a heartbeat is overdue; for ever when none is required.
    async fn silence(&self) {
        match self.args.require_heartbeat {
            Some(within) => self.seat.silent_for(within).await,
            None => pending().await,
        }
    }
}

/// There is nothing to release.
async fn refuse(orders: &mut mpsc::Receiver<Order>) -> Infallible {
    loop {
        match orders.recv().await {
            Some(order) => order.not_held(),
            None => pending().await,
        }
    }
}
