//! The client's own thread.
//!
//! Its network work is done there: connections, calls, renewals. So work
//! that keeps the caller's runtime busy starves no renewal, a guard may be
//! dropped where there is no runtime, and a caller that goes away in the middle
//! of a call leaves somebody who can give back what it had asked for.

use std::{future::Future, io, sync::mpsc, thread, time::Duration};

use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::{AbortOnDropHandle, TaskTracker},
};
use tracing::{Instrument as _, instrument::WithSubscriber as _};

use crate::{Error, clock::Moment};

/// How long the thread goes on for what is under way, releases above all, once
/// the last handle is gone.
const WIND_DOWN: Duration = Duration::from_secs(5);

/// How soon after the machine has slept the guards notice by themselves.
const CLOCK_CHECK: Duration = Duration::from_millis(500);

/// Ends, in time, when it is dropped.
#[derive(Debug)]
pub(crate) struct Thread {
    handle: Handle,
    tasks: TaskTracker,
    slept: watch::Receiver<()>,
    _closing: DropGuard,
}

impl Thread {
    /// # Errors
    ///
    /// When the machine has no room for a thread, or for what its runtime needs.
    pub(crate) fn start() -> io::Result<Self> {
        let closing = CancellationToken::new();
        let tasks = TaskTracker::new();
        let (says_slept, slept) = watch::channel(());
        let (started, starting) = mpsc::channel();
        let work = {
            let (closing, tasks) = (closing.clone(), tasks.clone());
            move || match Builder::new_current_thread().enable_all().build() {
                Err(error) => {
                    let _: Result<(), _> = started.send(Err(error));
                }
                Ok(runtime) => {
                    let _: Result<(), _> = started.send(Ok(runtime.handle().clone()));
                    runtime.block_on(async {
                        tokio::select! {
                            () = closing.cancelled() => {}
                            () = watch_clocks(&says_slept) => {}
                        }
                        tasks.close();
                        let _: Result<(), _> = timeout(WIND_DOWN, tasks.wait()).await;
                    });
                    // Not waiting for a name that is still being resolved.
                    runtime.shutdown_background();
                }
            }
        };
        thread::Builder::new()
            .name("fencepost-client".to_owned())
            .spawn(work)?;
        // Made over there, since a runtime that is not to be may not be dropped
        // within another. It takes some microseconds.
        let handle = starting
            .recv()
            .unwrap_or_else(|_gone| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self {
            handle,
            tasks,
            slept,
            _closing: closing.drop_guard(),
        })
    }

    /// The runtime, to make connections in.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Changes when the machine has slept: timers are late by that time.
    pub(crate) fn slept(&self) -> watch::Receiver<()> {
        self.slept.clone()
    }

    /// Runs `work` on the thread, for as long as it is waited for.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let work = work.in_current_span().with_current_subscriber();
        let task = AbortOnDropHandle::new(self.handle.spawn(work));
        task.await.unwrap_or_else(|_panic| {
            Err(Error::Internal {
                detail: "the call did not end well".to_owned(),
            })
        })
    }

    /// Starts `work` on the thread, and has it finished before the thread ends.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let work = work.in_current_span().with_current_subscriber();
        self.tasks.spawn_on(work, &self.handle);
    }
}

/// The clock that timers use may stand still while the machine sleeps.
async fn watch_clocks(slept: &watch::Sender<()>) {
    let mut ticks = interval(CLOCK_CHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = (Instant::now(), Moment::now());
    loop {
        ticks.tick().await;
        let now = (Instant::now(), Moment::now());
        let asleep = now.1.since(before.1).saturating_sub(now.0 - before.0);
        if asleep > CLOCK_CHECK / 5 {
            slept.send_replace(());
        }
        before = now;
    }
}
