//! Batches of renewals under way.
//!
//! One at a time, as long as it is answered in time. One that is not may be
//! stuck on a connection that is dead and does not say so: it is overdue then,
//! and the next one goes elsewhere meanwhile. Renewing twice does no harm.

use std::collections::HashMap;

use tokio::{task::JoinSet, time::Instant};

use super::Id;
use crate::{
    lock::Outage,
    store::{Renew, Renewal, Store},
};

/// How many may be under way, all but one of them overdue.
const MOST: usize = 3;

/// One renewal of one stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt {
    pub(super) id: Id,
    pub(super) number: u64,
}

/// What came of a batch.
pub(super) struct Answer {
    pub(super) attempts: Vec<Attempt>,
    pub(super) sent: Instant,
    /// Whether another batch was overdue when this one was sent.
    pub(super) elsewhere: bool,
    pub(super) result: Result<Vec<Renewal>, Outage>,
}

/// A statement that has come to an end: its number, and what it is in [`Answer`].
type Done = (u64, Instant, bool, Result<Vec<Renewal>, Outage>);

#[derive(Default)]
pub(super) struct Batches {
    tasks: JoinSet<Done>,
    under_way: HashMap<u64, Vec<Attempt>>,
    /// The newest one, and when it is overdue; none when it is already.
    newest: Option<(u64, Instant)>,
    next: u64,
}

impl Batches {
    pub(super) fn has_room(&self) -> bool {
        self.newest.is_none() && self.tasks.len() < MOST
    }

    /// Sends one, to be answered before `overdue_at`.
    pub(super) fn send(
        &mut self,
        store: &Store,
        attempts: Vec<Attempt>,
        asks: Vec<Renew>,
        overdue_at: Instant,
    ) {
        let (store, number, elsewhere) = (store.clone(), self.next, !self.tasks.is_empty());
        self.next += 1;
        self.under_way.insert(number, attempts);
        self.newest = Some((number, overdue_at));
        self.tasks.spawn(async move {
            let sent = Instant::now();
            let result = store.renew_all(&asks, elsewhere).await;
            (number, sent, elsewhere, result)
        });
    }

    /// The next answer. None at once when nothing is under way, or a batch has
    /// ended without one: it is overdue then.
    pub(super) async fn next(&mut self) -> Option<Answer> {
        let Ok((number, sent, elsewhere, result)) = self.tasks.join_next().await? else {
            self.hurry(Instant::now());
            return None;
        };
        if self.newest.is_some_and(|(newest, _)| newest == number) {
            self.newest = None;
        }
        Some(Answer {
            attempts: self.under_way.remove(&number)?,
            sent,
            elsewhere,
            result,
        })
    }

    /// Lets the newest one be overdue no later than this.
    pub(super) fn hurry(&mut self, overdue_at: Instant) {
        if let Some((_, at)) = &mut self.newest {
            *at = overdue_at.min(*at);
        }
    }

    /// When [`overdue`](Self::overdue) has something to say.
    pub(super) fn overdue_at(&self) -> Option<Instant> {
        self.newest.map(|(_, overdue_at)| overdue_at)
    }

    /// What is not waited for any longer.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Attempt> {
        let Some((number, _)) = self.newest.take_if(|(_, overdue_at)| *overdue_at <= now) else {
            return Vec::new();
        };
        self.under_way.get(&number).cloned().unwrap_or_default()
    }
}
