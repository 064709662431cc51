//! The composition of the server: what runs, who joins it, how it stops.
//!
//! Every long task is in one `JoinSet`; one that ends before the drain is a
//! bug and stops the process. The drain runs in phases under one budget:
//! health says NOT_SERVING while calls are still taken (`--drain-delay`); the
//! ports close and clients are sent elsewhere (GOAWAY); calls and database work
//! under way are finished and orphans given back; idle connections are left to
//! end with the process. Locks stay.

mod database;
mod error;

use std::{pin::pin, time::Duration};

use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::database::Database;
pub(crate) use self::error::{AppError, BUG, CONFIGURATION, USAGE};
use crate::{
    census,
    config::{Config, DrainConfig},
    http,
    keep_alive::KeepAlive,
    metrics::Metrics,
    purge,
    service::{self, EdgeLayer, Locks, health},
    shutdown::{Signal, Signals},
    store::{Advanced, Schema, Store},
    telemetry::{Chain, LostLines},
    trace::Tracer,
};

/// How long clients get to close idle connections once all calls are over, and
/// those of streams to hear of their next end.
const FAREWELL: Duration = Duration::from_millis(300);

/// `fencepostd migrate`.
pub(crate) async fn migrate(config: Config) -> Result<(), AppError> {
    Database::open(config.database, &config.store, Schema::Migrate)
        .await?
        .close()
        .await;
    Ok(())
}

/// `fencepostd advance-tokens`.
pub(crate) async fn advance_tokens(
    config: Config,
    at_least: Option<i64>,
    force: bool,
) -> Result<Advanced, AppError> {
    let database = Database::open(config.database, &config.store, Schema::Expect).await?;
    let store = Store::new(&database.url, config.store, Metrics::new(0).store)?;
    let advanced = store.advance_tokens(at_least, force).await;
    store.drain().await;
    database.close().await;
    Ok(advanced?)
}

/// Serves until a signal, then drains.
pub(crate) async fn serve(config: Config, lost_lines: LostLines) -> Result<(), AppError> {
    // Signals first: a start that hangs can be ended like a server.
    let mut signals = Signals::new().map_err(AppError::Signals)?;
    let mut start = pin!(Server::start(config, lost_lines));
    let mut server = tokio::select! {
        started = &mut start => started?,
        signal = signals.next() => {
            // What was started must be stopped: let the start end first.
            tracing::info!(?signal, "told to stop while starting");
            let server = tokio::select! {
                started = &mut start => started?,
                _ = signals.next() => return Ok(()),
            };
            server.database.close().await;
            return Ok(());
        }
    };
    let ended = tokio::select! {
        signal = signals.next() => {
            tracing::info!(?signal, "draining");
            let delay = match signal {
                Signal::Terminate => server.drain_config.delay,
                // Somebody waits at a terminal.
                Signal::Interrupt => Duration::ZERO,
            };
            tokio::select! {
                () = server.drain(delay) => {}
                _ = signals.next() => tracing::warn!("told to stop again: not waiting for the drain"),
            }
            Ok(())
        }
        name = server.first_end() => {
            tracing::error!(name, "a task ended by itself: draining");
            server.drain(Duration::ZERO).await;
            Err(match name {
                PRIVATE_POSTGRES => AppError::PrivatePostgresEnded,
                _ => AppError::TaskEnded(name),
            })
        }
    };
    server.tracer.stop().await;
    server.database.close().await;
    ended
}

/// The task that watches it.
const PRIVATE_POSTGRES: &str = "private postgres";

struct Server {
    drain_config: DrainConfig,
    database: Database,
    tracer: Tracer,
    store: Store,
    /// Each ends with its name, so that a log can say which one it was.
    tasks: JoinSet<&'static str>,
    calls: TaskTracker,
    keep_alive: KeepAlive,
    draining: CancellationToken,
    closing: CancellationToken,
    /// Ends the HTTP port: a drain can be watched to its end.
    drained: CancellationToken,
}

impl Server {
    async fn start(config: Config, lost_lines: LostLines) -> Result<Self, AppError> {
        let listener = bind("--listen", config.listen).await?;
        let http_listener = bind("--http-listen", config.http_listen).await?;
        let health_listener = match config.health_listen {
            Some(address) => Some(bind("--health-listen", address).await?),
            None => None,
        };
        let grpc = listener
            .local_addr()
            .map_err(|error| AppError::Listen("--listen", config.listen, error))?;
        let http = http_listener
            .local_addr()
            .map_err(|error| AppError::Listen("--http-listen", config.http_listen, error))?;
        let metrics = Metrics::new(config.metrics_prefixes);
        let tracer = Tracer::start(config.traces.as_ref(), &metrics.traces)?;
        // Last of what can fail for reasons of others: a private Postgres is to be stopped again.
        let database = Database::open(config.database, &config.store, Schema::Migrate).await?;
        let retention = config.store.purge_retention;
        let store = Store::new(&database.url, config.store, metrics.store.clone())?;

        let calls = TaskTracker::new();
        let draining = CancellationToken::new();
        let closing = CancellationToken::new();
        let drained = CancellationToken::new();
        let (reporter, health) = health::channel();

        let mut tasks = JoinSet::new();
        tasks.spawn(named("health watch", watch(store.clone(), closing.clone())));
        tasks.spawn(named(
            "give back",
            give_back(store.clone(), closing.clone()),
        ));
        let purging = purge::run(store.clone(), retention, closing.clone());
        tasks.spawn(named("purge", purging));
        let counting = census::run(store.clone(), retention, closing.clone());
        tasks.spawn(named("census", counting));
        tasks.spawn(named(
            "health report",
            reporter.run(store.health(), draining.clone(), closing.clone()),
        ));
        if let Some(postgres) = &database.private {
            // Nobody but us would start it again.
            let (ended, closing) = (postgres.ended(), closing.clone());
            let watch = async move { _ = closing.run_until_cancelled(ended).await };
            tasks.spawn(named(PRIVATE_POSTGRES, watch));
        }
        if let Some(listener) = health_listener {
            let served = service::serve_health(listener, health.clone(), closing.clone());
            tasks.spawn(named("health port", logged(served)));
        }
        let (keep_alive, schedule) = KeepAlive::new(
            store.clone(),
            config.keep_alive,
            metrics.streams.clone(),
            closing.clone(),
        );
        tasks.spawn(named("keep alive", schedule));
        let scrape = {
            let (metrics, health) = (metrics.clone(), health.clone());
            let (store, keep_alive) = (store.clone(), keep_alive.clone());
            move || {
                store.measure();
                keep_alive.measure();
                metrics.logs.lost(&lost_lines);
                metrics.ready.set(health.is_ready().into());
                metrics.text()
            }
        };
        let served = http::serve(http_listener, health.clone(), scrape, drained.clone());
        tasks.spawn(named("http", logged(served)));
        let limits = config.service.ttl;
        let locks = Locks::new(store.clone(), keep_alive.clone(), limits, &metrics);
        let edge = EdgeLayer::new(
            config.service.request_timeout,
            calls.clone(),
            metrics.rpcs.clone(),
            tracer.clone(),
        );
        let served = service::serve(
            listener,
            config.service,
            locks,
            health,
            edge,
            metrics,
            closing.clone(),
        );
        tasks.spawn(named("grpc", logged(served)));
        tracing::info!(%grpc, %http, "serving");
        Ok(Self {
            drain_config: config.drain,
            database,
            tracer,
            store,
            tasks,
            calls,
            keep_alive,
            draining,
            closing,
            drained,
        })
    }

    /// Waits for a task that ends although nobody told it to.
    async fn first_end(&mut self) -> &'static str {
        match self.tasks.join_next().await {
            Some(Ok(name)) => name,
            Some(Err(error)) => {
                tracing::error!(error = %Chain(&error), "a task panicked");
                "panicked"
            }
            None => "all",
        }
    }

    async fn drain(&mut self, delay: Duration) {
        let deadline = Instant::now() + self.drain_config.timeout;
        self.draining.cancel();
        tokio::time::sleep(delay).await;
        self.closing.cancel();
        let work = async {
            self.calls.close();
            self.calls.wait().await;
            self.store.drain().await;
        };
        if timeout_at(deadline, work).await.is_err() {
            tracing::warn!("drain: out of time, work is left behind");
            return;
        }
        self.drained.cancel();
        let mut ends = pin!(async { while self.tasks.join_next().await.is_some() {} });
        let all_closed = loop {
            let left = self.keep_alive.listeners();
            let patience = FAREWELL.min(deadline.saturating_duration_since(Instant::now()));
            if timeout(patience, &mut ends).await.is_ok() {
                break true;
            }
            // What is open now is idle, or belongs to a client that does not answer.
            if self.keep_alive.listeners() >= left {
                break false;
            }
        };
        tracing::info!(all_closed, "drained");
    }
}

async fn bind(flag: &'static str, address: std::net::SocketAddr) -> Result<TcpListener, AppError> {
    TcpListener::bind(address)
        .await
        .map_err(|error| AppError::Listen(flag, address, error))
}

async fn named(name: &'static str, task: impl Future<Output = ()>) -> &'static str {
    task.await;
    name
}

async fn logged<E: std::error::Error + 'static>(task: impl Future<Output = Result<(), E>>) {
    if let Err(error) = task.await {
        tracing::error!(error = %Chain(&error), "a port is not served any more");
    }
}

async fn watch(store: Store, stop: CancellationToken) {
    store.watch_health(stop).await;
}

async fn give_back(store: Store, stop: CancellationToken) {
    store.give_back(stop).await;
}
