//! Batches of renewals under way.
//!
//! One at a time, as long as it is answered in time. One that is not may be
//! stuck on a connection that is dead and does not say so: it is overdue then,
//! and the next one goes elsewhere meanwhile. Renewing twice does no harm.

use std::collections::HashMap;

use tokio::{
    task::{self, JoinSet},
    time::Instant,
};

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

/// One statement.
pub(super) struct Batch {
    pub(super) attempts: Vec<Attempt>,
    pub(super) sent: Instant,
    /// Whether another batch was overdue when this one was sent.
    pub(super) elsewhere: bool,
}

/// What came of it: an entry for each attempt, in order.
pub(super) type Answer = Result<Vec<Renewal>, Outage>;

#[derive(Default)]
pub(super) struct Batches {
    tasks: JoinSet<Answer>,
    under_way: HashMap<task::Id, Batch>,
    /// The newest one, and when it is overdue; none when it is already.
    newest: Option<(task::Id, Instant)>,
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
        let (store, elsewhere) = (store.clone(), !self.tasks.is_empty());
        let batch = Batch {
            attempts,
            sent: Instant::now(),
            elsewhere,
        };
        let renewing = async move { store.renew_all(&asks, elsewhere).await };
        let id = self.tasks.spawn(renewing).id();
        self.under_way.insert(id, batch);
        self.newest = Some((id, overdue_at));
    }

    /// The next answer. None at once when nothing is under way.
    pub(super) async fn next(&mut self) -> Option<(Batch, Answer)> {
        let (id, answer) = match self.tasks.join_next_with_id().await? {
            Ok(answered) => answered,
            // It panicked, and what became of its leases is unknown.
            Err(error) => (error.id(), Err(Outage::Internal(Box::new(error)))),
        };
        self.newest.take_if(|(newest, _)| *newest == id);
        Some((self.under_way.remove(&id)?, answer))
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
        let newest = self.newest.take_if(|(_, overdue_at)| *overdue_at <= now);
        newest
            .and_then(|(id, _)| self.under_way.get(&id))
            .map(|batch| batch.attempts.clone())
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{runtime::Builder, time::Instant};

    use super::{Attempt, Batches};
    use crate::{
        keep_alive::stage::{keep, store},
        lock::Outage,
    };

    #[test]
    fn a_batch_that_panicked_is_answered_and_leaves_nothing() {
        // Without timers, which every statement needs.
        let runtime = Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut batches = Batches::default();
            let attempt = Attempt { id: 7, number: 1 };
            let overdue_at = Instant::now() + Duration::from_secs(1);
            batches.send(&store(), vec![attempt], vec![keep().renew], overdue_at);
            let (batch, answer) = batches.next().await.unwrap();
            assert_eq!(batch.attempts[0].id, 7);
            assert!(matches!(answer, Err(Outage::Internal(_))), "{answer:?}");
            assert!(batches.under_way.is_empty());
            assert!(batches.has_room());
            assert!(batches.next().await.is_none());
        });
    }
}
