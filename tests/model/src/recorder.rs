//! Collects a history from many tasks, on one monotonic clock.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::history::{Call, Event, History, Limits, Op, Outcome, Status, Time, Via, What};

/// Cheap to clone; all clones write one history.
#[derive(Clone, Debug)]
pub struct Recorder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    start: Instant,
    next: AtomicU64,
    history: Mutex<History>,
}

/// Who calls, and on what.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) client: usize,
    pub(crate) via: Via,
    pub(crate) resource: String,
    pub(crate) owner: String,
}

/// What a call ended with.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What came of it.
    pub outcome: Outcome,
    /// The status that says so.
    pub status: Option<Status>,
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Self {
        Self {
            outcome,
            status: None,
        }
    }
}

impl Recorder {
    /// An empty history that begins now.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            start: Instant::now(),
            next: AtomicU64::new(1),
            history: Mutex::new(History {
                limits,
                ..History::default()
            }),
        }))
    }

    /// The moment on the clock of the history.
    #[must_use]
    pub fn now(&self) -> Time {
        Time::default().plus(self.0.start.elapsed())
    }

    /// Tells of something that was done to the system.
    pub fn event(&self, from: Time, to: Time, what: What) {
        self.write(|history| history.events.push(Event { from, to, what }));
    }

    /// What was recorded so far. A call that is under way is not in it.
    #[must_use]
    pub fn history(&self) -> History {
        self.write(|history| history.clone())
    }

    /// Makes a call and records it.
    pub(crate) async fn call(
        &self,
        caller: &Caller,
        call: Call,
        work: impl Future<Output = Answer>,
    ) -> Outcome {
        let id = self.next_id();
        let sent = self.now();
        let answer = work.await;
        self.record(id, caller, call, sent, answer.clone());
        answer.outcome
    }

    /// Records a call that has just been answered.
    pub(crate) fn record(
        &self,
        id: u64,
        caller: &Caller,
        call: Call,
        sent: Time,
        answer: impl Into<Answer>,
    ) {
        let Answer { outcome, status } = answer.into();
        let op = Op {
            id,
            client: caller.client,
            via: caller.via,
            resource: caller.resource.clone(),
            owner: caller.owner.clone(),
            call,
            sent,
            answered: self.now(),
            outcome,
            status,
        };
        self.write(|history| history.ops.push(op));
    }

    /// The number of the next call.
    pub(crate) fn next_id(&self) -> u64 {
        self.0.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn write<T>(&self, work: impl FnOnce(&mut History) -> T) -> T {
        work(
            &mut self
                .0
                .history
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}
