//! Leases that nobody was told of, and how they are given back.
//!
//! A lease is an orphan when its caller has gone before the answer was handed
//! over, or when the answer to its Acquire was lost on the way from the
//! database. It is named by the attempt that created it, never by its token
//! alone: a retry on another replica may have been handed the same lease.
//!
//! An orphan whose grant is known has a row, so it stays in the queue until the
//! row was seen under its lock. One whose Acquire has an unknown outcome may
//! still be on its way, so it is looked for until no statement of that age can
//! be alive. Either is dropped when its TTL has passed: the lease is over.

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Inner, Store, failure::Failure, row, statement};
use crate::{
    clock::Moment,
    lock::{Resource, Ttl},
    telemetry::Chain,
};

/// More than this are forgotten: each then blocks its name for one TTL.
const MAX_ORPHANS: usize = 20_000;

/// How many are given back in one statement.
const BATCH: usize = 500;

/// How long after it was sent a statement may still reach the database.
const IN_FLIGHT: Duration = Duration::from_secs(15);

/// How long the queue rests when rows are locked, or the database is away.
const REST: Duration = Duration::from_millis(250);

/// A lease that nobody was told of.
#[derive(Debug, Clone)]
pub(super) struct Orphan {
    resource: Resource,
    attempt: Uuid,
    /// Whether the database said that the lease exists.
    known: bool,
    asked: Moment,
    ttl: Duration,
}

impl Orphan {
    pub(super) fn new(resource: Resource, attempt: Uuid, ttl: Ttl) -> Self {
        Self {
            resource,
            attempt,
            known: true,
            asked: Moment::now(),
            ttl: ttl.as_duration(),
        }
    }

    /// The same, when the database did not say whether it exists.
    pub(super) fn perhaps(mut self) -> Self {
        self.known = false;
        self
    }

    pub(super) fn attempt(&self) -> Uuid {
        self.attempt
    }

    fn settled(&self) -> bool {
        self.known || Moment::now().since(self.asked) > IN_FLIGHT
    }

    fn over(&self) -> bool {
        Moment::now().since(self.asked) > self.ttl + IN_FLIGHT
    }
}

/// The queue of orphans.
#[derive(Default)]
pub(super) struct Returns {
    queue: Mutex<VecDeque<Orphan>>,
    waiting: Notify,
}

impl Returns {
    /// Never blocks, so that a destructor may call it.
    pub(super) fn push(&self, orphan: Orphan) {
        let mut queue = self.lock();
        if queue.len() >= MAX_ORPHANS {
            drop(queue);
            tracing::error!(
                "too many leases to give back: one blocks its name until its TTL is over"
            );
            return;
        }
        queue.push_back(orphan);
        drop(queue);
        self.waiting.notify_one();
    }

    fn take_batch(&self) -> Vec<Orphan> {
        let mut queue = self.lock();
        let count = queue.len().min(BATCH);
        queue
            .drain(..count)
            .filter(|orphan| !orphan.over())
            .collect()
    }

    fn put_back(&self, rest: Vec<Orphan>) {
        self.lock().extend(rest);
    }

    fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Orphan>> {
        self.queue
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Store {
    /// Gives orphans back until told to stop; a batch under way is finished.
    pub(crate) async fn give_back(&self, stop: CancellationToken) {
        let returns = &self.0.returns;
        while !stop.is_cancelled() {
            let before = returns.len();
            if before == 0 {
                stop.run_until_cancelled(returns.waiting.notified()).await;
                continue;
            }
            let answered = self.0.give_back_batch().await;
            if !answered || returns.len() >= before {
                stop.run_until_cancelled(tokio::time::sleep(REST)).await;
            }
        }
    }

    /// Gives back what is known to be orphaned; called once no more can come.
    pub(super) async fn give_back_rest(&self) {
        while self.0.returns.lock().iter().any(|orphan| orphan.known) {
            if !self.0.give_back_batch().await {
                tokio::time::sleep(REST).await;
            }
        }
    }
}

impl Inner {
    /// One statement's worth. False when the database did not answer.
    async fn give_back_batch(&self) -> bool {
        let batch = self.returns.take_batch();
        if batch.is_empty() {
            return true;
        }
        let deadline = Instant::now() + self.config.limits.statement;
        match self.send_give_back(&batch, deadline).await {
            Ok(seen) => {
                let rest = batch
                    .into_iter()
                    .enumerate()
                    .filter(|(place, orphan)| match seen.get(place) {
                        Some(true) => false,
                        Some(false) => !orphan.settled(),
                        // Locked by somebody, or not there.
                        None => orphan.known || !orphan.settled(),
                    })
                    .map(|(_, orphan)| orphan)
                    .collect();
                self.returns.put_back(rest);
                true
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "leases could not be given back yet");
                self.returns.put_back(batch);
                false
            }
        }
    }

    /// Gives one lease back before its call goes on.
    pub(super) async fn give_back_now(
        &self,
        orphan: Orphan,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let batch = [orphan];
        let sent = self.send_give_back(&batch, deadline).await;
        let [orphan] = batch;
        match sent {
            Ok(seen) if seen.contains_key(&0) => Ok(()),
            Ok(_) => {
                self.returns.push(orphan);
                Err(Failure::unknown(
                    "somebody has locked a row that must be given back",
                ))
            }
            Err(failure) => {
                self.returns.push(orphan);
                Err(failure)
            }
        }
    }

    /// For each row that was seen under its lock, whether it was given back.
    async fn send_give_back(
        &self,
        batch: &[Orphan],
        deadline: Instant,
    ) -> Result<HashMap<usize, bool>, Failure> {
        let resources: Vec<&str> = batch
            .iter()
            .map(|orphan| orphan.resource.as_str())
            .collect();
        let attempts: Vec<Uuid> = batch.iter().map(|orphan| orphan.attempt).collect();
        let answer = self
            .pool
            .run(&statement::GIVE_BACK, &[&resources, &attempts], deadline)
            .await?;
        let mut seen = HashMap::with_capacity(answer.rows.len());
        for row in &answer.rows {
            let place: i32 = row::column(row, "place")?;
            let place =
                usize::try_from(place - 1).map_err(|_| Failure::unknown("a place below one"))?;
            seen.insert(place, row::column(row, "given_back")?);
        }
        Ok(seen)
    }
}
