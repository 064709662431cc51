//! How much of a connection is read before others have their turn.
//!
//! HTTP/2 makes a task of each request that it finds, also of one that is reset at once,
//! which no limit to streams counts. Tasks are run in their order, so a connection that
//! has ten thousand requests in its buffers would put them all before everybody else's.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    runtime::{Handle, RuntimeMetrics},
    task::coop,
    time::{Instant, Sleep, sleep},
};

/// Bytes of a turn, about: the last read may go beyond. They are forgotten at a rate, so
/// that many short bursts are one long.
const BYTES: usize = 8 * 1024;
const BYTES_A_SECOND: usize = 4 * BYTES;

/// Tasks in the runtime's common queue that make it late: those that were too many for
/// the queues of its threads. Whose turn is over then waits for the next.
const LATE: usize = 256;

/// How long each waits for a runtime that stays late, for each one that does: as long as
/// the requests of a turn may take. Together they do not bring more than can be done.
const SHARE: Duration = Duration::from_millis(5);
const LEAST: Duration = Duration::from_millis(250);
/// Less than pings and calls wait.
const MOST: Duration = Duration::from_millis(2500);

/// Connections whose turn is over.
#[derive(Clone, Default)]
pub(super) struct Queue(Arc<AtomicUsize>);

impl Queue {
    fn patience(&self) -> Duration {
        let waiting = u32::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        SHARE.saturating_mul(waiting).clamp(LEAST, MOST)
    }
}

/// That a turn is over, until the next one begins.
struct Over {
    since: Instant,
    queue: Queue,
}

impl Over {
    fn now(queue: &Queue) -> Self {
        queue.0.fetch_add(1, Ordering::Relaxed);
        Self {
            since: Instant::now(),
            queue: queue.clone(),
        }
    }
}

impl Drop for Over {
    fn drop(&mut self) {
        self.queue.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) struct Turn {
    bytes: usize,
    counted: Instant,
    over: Option<Over>,
    queue: Queue,
    wait: Pin<Box<Sleep>>,
    runtime: RuntimeMetrics,
}

impl Turn {
    pub(super) fn new(queue: Queue) -> Self {
        Self {
            bytes: 0,
            counted: Instant::now(),
            over: None,
            queue,
            wait: Box::pin(sleep(Duration::ZERO)),
            runtime: Handle::current().metrics(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.is_some()
    }

    /// Begins the next one when this one is over, and the runtime is not late.
    pub(super) fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(over) = &self.over {
            let waited = over.since.elapsed();
            if self.runtime.global_queue_depth() <= LATE || waited >= self.queue.patience() {
                self.over = None;
                break;
            }
            ready!(self.wait.as_mut().poll(cx));
            // Thousands that looked again each millisecond would make it later still.
            let next = waited.clamp(Duration::from_millis(1), LEAST);
            self.wait.as_mut().reset(Instant::now() + next);
        }
        Poll::Ready(())
    }

    /// Counts what was read, and ends the turn when that is enough.
    pub(super) fn took(&mut self, bytes: usize, cx: &mut Context<'_>) {
        let now = Instant::now();
        let since = now.duration_since(self.counted).as_millis();
        let forgotten = usize::try_from(since)
            .unwrap_or(usize::MAX)
            .saturating_mul(BYTES_A_SECOND / 1000);
        // What is less than a millisecond counts with the next.
        if forgotten > 0 {
            self.counted = now;
        }
        self.bytes = self.bytes.saturating_sub(forgotten) + bytes;
        if self.bytes < BYTES {
            return;
        }
        self.bytes = 0;
        self.over = Some(Over::now(&self.queue));
        // To the end of the queue. But hyper reads on after each request that it takes,
        // whatever the read before has said: without budget it finds nothing until the
        // task comes again. A task has 128 units; what is none has no end of them.
        cx.waker().wake_by_ref();
        for _ in 0..u8::MAX {
            match coop::poll_proceed(cx) {
                Poll::Ready(budget) => budget.made_progress(),
                Poll::Pending => break,
            }
        }
    }
}
