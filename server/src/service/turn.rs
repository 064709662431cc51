//! How much of a connection is read before others have their turn.
//!
//! HTTP/2 makes a task of each request that it finds, also of one that is reset at once,
//! which no limit to streams counts. Tasks are run in their order, so a connection that
//! has ten thousand requests in its buffers would put them all before everybody else's.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    runtime::{Handle, RuntimeMetrics},
    task::coop,
    time::{Instant, Sleep, sleep},
};

/// Bytes of a turn, about: the last read may go beyond.
const BYTES: usize = 8 * 1024;

/// Tasks in the runtime's common queue that make it late: those that were too many for
/// the queues of its threads. Whose turn is over then waits for the next.
const LATE: usize = 256;

/// How long it waits for a runtime that stays late: far less than pings and calls do.
const PATIENCE: Duration = Duration::from_millis(250);

pub(super) struct Turn {
    bytes: usize,
    /// Since when this turn is over, until the next one begins.
    over: Option<Instant>,
    wait: Pin<Box<Sleep>>,
    runtime: RuntimeMetrics,
}

impl Turn {
    pub(super) fn new() -> Self {
        Self {
            bytes: 0,
            over: None,
            wait: Box::pin(sleep(Duration::ZERO)),
            runtime: Handle::current().metrics(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.is_some()
    }

    /// Begins the next one when this one is over, and the runtime is not late.
    pub(super) fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(over) = self.over {
            let waited = over.elapsed();
            if waited >= PATIENCE || !self.is_late() {
                self.over = None;
                break;
            }
            ready!(self.wait.as_mut().poll(cx));
            // Thousands that looked again each millisecond would make it later still.
            let next = waited.max(Duration::from_millis(1));
            self.wait.as_mut().reset(Instant::now() + next);
        }
        Poll::Ready(())
    }

    /// Counts what was read, and ends the turn when that is enough.
    pub(super) fn took(&mut self, bytes: usize, cx: &mut Context<'_>) {
        self.bytes += bytes;
        if self.bytes < BYTES {
            return;
        }
        self.bytes = 0;
        self.over = Some(Instant::now());
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

    /// All was read that there is. A burst counts on while the runtime is late.
    pub(super) fn nothing_left(&mut self) {
        if !self.is_late() {
            self.bytes = 0;
        }
    }

    fn is_late(&self) -> bool {
        self.runtime.global_queue_depth() > LATE
    }
}
