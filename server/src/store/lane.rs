//! Where calls wait for their round.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::time::Instant;

use super::{
    acquire::Acquire,
    call::{Call, Waiting},
    get::Get,
    release::Release,
    renew::Renew,
};
use crate::{
    lock::{Outage, Resource},
    metrics::{LaneMetric, count},
    trace::Trace,
};

/// More rows make a statement last longer than the flush that they share.
const MOST: usize = 500;

/// Calls that wait, in their order. The store's rooms bound them.
pub(super) struct Lane {
    queue: Mutex<Queue>,
    metrics: LaneMetric,
}

#[derive(Default)]
struct Queue {
    /// These end something, and give their names to others: a flood of Acquires must
    /// not keep them.
    releases: VecDeque<Call>,
    calls: VecDeque<Call>,
    /// Whether a task carries out rounds.
    is_running: bool,
}

impl Queue {
    fn len(&self) -> usize {
        self.releases.len() + self.calls.len()
    }

    fn push(&mut self, call: Call) {
        match call {
            Call::Release(_) => self.releases.push_back(call),
            Call::Acquire(_) | Call::Renew(_) | Call::Get(_) => self.calls.push_back(call),
        }
    }

    /// All of them, in the order in which a round takes them: releases first, as long
    /// as they leave half of it to the others.
    fn take_all(&mut self) -> impl Iterator<Item = Call> + use<> {
        let mut releases = mem::take(&mut self.releases);
        let more = releases.split_off(releases.len().min(MOST / 2));
        releases
            .into_iter()
            .chain(mem::take(&mut self.calls))
            .chain(more)
    }

    fn fail_all(&mut self, why: impl Fn() -> Outage) {
        self.take_all().for_each(|call| call.fail(why()));
    }
}

impl Lane {
    pub(super) fn new(metrics: LaneMetric) -> Self {
        Self {
            queue: Mutex::default(),
            metrics,
        }
    }

    /// Brings the gauge up to date.
    pub(super) fn measure(&self) {
        self.metrics.waiting.set(count(self.queue().len()));
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, call: Call) {
        self.queue().push(call);
    }

    /// Whether there is something to be done, and a task to be started for it.
    pub(super) fn starts(&self) -> bool {
        let mut queue = self.queue();
        queue.len() > 0 && !mem::replace(&mut queue.is_running, true)
    }

    /// Whether there is another round; the task ends where there is none.
    pub(super) fn goes_on(&self) -> bool {
        let mut queue = self.queue();
        queue.is_running = queue.len() > 0;
        queue.is_running
    }

    /// First of all, and in this order, once more.
    pub(super) fn put_back(&self, calls: Vec<Call>) {
        let mut queue = self.queue();
        for call in calls.into_iter().rev() {
            queue.calls.push_front(call);
        }
    }

    /// The next round. What came too late for it keeps its order.
    pub(super) fn take_round(&self) -> Round {
        let now = Instant::now();
        let mut round = Round::default();
        let mut queue = self.queue();
        for call in queue.take_all() {
            if call.is_over(now) {
                call.shed(&self.metrics.shed);
            } else if let Some(call) = round.take(call) {
                queue.push(call);
            }
        }
        drop(queue);
        if !round.is_empty() {
            self.metrics.together.observe(round.calls() as f64);
        }
        round
    }

    pub(super) fn fail_all(&self, why: impl Fn() -> Outage) {
        self.queue().fail_all(why);
    }

    /// Answers what waits for a task that ends by a panic, and lets the next call
    /// start another.
    pub(super) fn abandon(&self, why: impl Fn() -> Outage) {
        let mut queue = self.queue();
        // Both at once: a call that came in between would wait for a task that is gone.
        queue.is_running = false;
        queue.fail_all(why);
    }
}

/// The Acquires of one resource.
pub(super) struct Crowd {
    /// The one that goes to the database.
    pub(super) first: Waiting<Acquire>,
    /// Those of other owners, which came before it was sent.
    pub(super) others: Vec<Waiting<Acquire>>,
}

impl Crowd {
    fn into_calls(self) -> impl Iterator<Item = Call> {
        std::iter::once(self.first)
            .chain(self.others)
            .map(Call::Acquire)
    }
}

/// What goes to the database together: one call a resource, or any number of Gets.
#[derive(Default)]
pub(super) struct Round {
    /// Its resources; for an Acquire, with the place of its crowd.
    names: HashMap<Resource, Option<usize>>,
    pub(super) acquires: Vec<Crowd>,
    pub(super) releases: Vec<Waiting<Release>>,
    pub(super) renewals: Vec<Waiting<Renew>>,
    pub(super) gets: Vec<Waiting<Get>>,
}

impl Round {
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// How many calls it answers.
    fn calls(&self) -> usize {
        let crowds = self.acquires.iter().map(|crowd| 1 + crowd.others.len());
        crowds.sum::<usize>() + self.releases.len() + self.renewals.len() + self.gets.len()
    }

    /// The traces of the calls that it may answer.
    pub(super) fn traces(&self) -> impl Iterator<Item = &Trace> {
        let crowds = self.acquires.iter();
        crowds
            .flat_map(|crowd| std::iter::once(&crowd.first).chain(&crowd.others))
            .map(|call| &call.trace)
            .chain(self.releases.iter().map(|call| &call.trace))
            .chain(self.renewals.iter().map(|call| &call.trace))
            .chain(self.gets.iter().map(|call| &call.trace))
    }

    pub(super) fn into_calls(self) -> impl Iterator<Item = Call> {
        let acquires = self.acquires.into_iter().flat_map(Crowd::into_calls);
        acquires
            .chain(self.releases.into_iter().map(Call::Release))
            .chain(self.renewals.into_iter().map(Call::Renew))
            .chain(self.gets.into_iter().map(Call::Get))
    }

    /// Takes a call in, or gives it back.
    fn take(&mut self, call: Call) -> Option<Call> {
        match self.names.get(call.resource()) {
            None if self.names.len() >= MOST => return Some(call),
            None => {
                let place = matches!(call, Call::Acquire(_)).then_some(self.acquires.len());
                self.names.insert(call.resource().clone(), place);
            }
            Some(&place) => {
                return match (call, place) {
                    (Call::Acquire(other), Some(place))
                        if other.ask.owner != self.acquires[place].first.ask.owner =>
                    {
                        self.acquires[place].others.push(other);
                        None
                    }
                    // It changes nothing, and its row is looked up for another.
                    (Call::Get(other), _) => {
                        self.gets.push(other);
                        None
                    }
                    // Of the same owner it is a new acquisition, or a retry: the row decides.
                    (call, _) => Some(call),
                };
            }
        }
        match call {
            Call::Acquire(first) => self.acquires.push(Crowd {
                first,
                others: Vec::new(),
            }),
            Call::Release(waiting) => self.releases.push(waiting),
            Call::Renew(waiting) => self.renewals.push(waiting),
            Call::Get(waiting) => self.gets.push(waiting),
        }
        None
    }
}

#[cfg(test)]
mod tests;
