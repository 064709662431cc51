//! Leases that nobody was told of, and how they are given back.
//!
//! A lease is an orphan when its caller has gone before the answer was handed
//! over, or when the answer to its Acquire was lost on the way from the
//! database. It is named by the attempt that created it, never by its token
//! alone: a retry on another replica may have been handed the same lease.
//!
//! An orphan whose grant is known has a row, so it stays in the queue until the
//! row was seen under its lock. One whose Acquire has an unknown outcome may
//! still be on its way, for as long as a frozen database or a commit that waits
//! for its standby likes: it is looked for, less and less often. Either is
//! dropped when its TTL has passed: the lease is over.

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
    time::Duration,
};

use tokio::{
    sync::{Mutex as AsyncMutex, Notify},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Inner, Store, acquire::Acquire, audit, config::Limits, failure::Failure, row, statement,
};
use crate::{
    clock::Moment,
    lock::{FencingToken, Owner, Resource},
    telemetry::Chain,
};

/// More than this are forgotten: each then blocks its name for one TTL.
const MAX_ORPHANS: usize = 20_000;

/// How many are given back in one statement.
const BATCH: usize = 500;

/// How long the queue rests when nothing is due.
const REST: Duration = Duration::from_millis(250);

/// The longest time between two looks for one orphan.
const LONGEST_REST: Duration = Duration::from_secs(30);

/// A lease that nobody was told of.
#[derive(Debug, Clone)]
pub(super) struct Orphan {
    resource: Resource,
    owner: Owner,
    /// Once it is known.
    token: Option<FencingToken>,
    attempt: Uuid,
    /// Whether the database said that the lease exists.
    known: bool,
    /// When it is over by itself.
    over: Moment,
    /// When to look for it next, and how long to rest after that.
    look: Moment,
    rest: Duration,
}

impl Orphan {
    /// What would be orphaned if the caller left: asked for from now on.
    pub(super) fn of(ask: &Acquire, limits: &Limits) -> Self {
        let now = Moment::now();
        Self {
            resource: ask.resource.clone(),
            owner: ask.owner.clone(),
            token: None,
            attempt: Uuid::new_v4(),
            known: true,
            over: now.after(limits.longest_call() + ask.ttl.as_duration()),
            look: now,
            rest: REST,
        }
    }

    /// The same, when the database did not say whether it exists.
    pub(super) fn perhaps(mut self) -> Self {
        self.known = false;
        self
    }

    /// The same, now that the database has told its token.
    pub(super) fn granted(&mut self, token: FencingToken) {
        self.token = Some(token);
    }

    pub(super) fn names(&self) -> (&Resource, &Owner) {
        (&self.resource, &self.owner)
    }

    pub(super) fn token(&self) -> Option<FencingToken> {
        self.token
    }

    pub(super) fn attempt(&self) -> Uuid {
        self.attempt
    }

    /// Whether there is nothing left to do, given that its row was seen under
    /// its lock and given back, or seen and not, or not seen.
    fn is_done(&self, seen: Option<bool>) -> bool {
        match seen {
            Some(true) => true,
            // Somebody else's lease, unless ours is still to come.
            Some(false) => self.known,
            // Locked by somebody, or not there.
            None => false,
        }
    }

    fn later(mut self) -> Self {
        self.look = Moment::now().after(self.rest);
        self.rest = (self.rest * 2).min(LONGEST_REST);
        self
    }
}

/// The queue of orphans.
#[derive(Default)]
pub(super) struct Returns {
    queue: Mutex<VecDeque<Orphan>>,
    waiting: Notify,
    /// Held while a batch is out of the queue.
    batch: AsyncMutex<()>,
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

    /// What is due, without what is over.
    fn take_batch(&self) -> Vec<Orphan> {
        let now = Moment::now();
        let mut batch = Vec::new();
        self.lock().retain(|orphan| {
            if orphan.over <= now {
                return false;
            }
            let taken = orphan.look <= now && batch.len() < BATCH;
            if taken {
                batch.push(orphan.clone());
            }
            !taken
        });
        batch
    }

    fn put_back(&self, rest: impl Iterator<Item = Orphan>) {
        self.lock().extend(rest.map(Orphan::later));
    }

    /// Rests no longer: the database is back.
    pub(super) fn look_now(&self) {
        let now = Moment::now();
        for orphan in self.lock().iter_mut() {
            (orphan.look, orphan.rest) = (now, REST);
        }
        self.waiting.notify_one();
    }

    fn len(&self) -> usize {
        self.lock().len()
    }

    /// How many are known to be leases, and how many may be.
    pub(super) fn count(&self) -> (usize, usize) {
        let queue = self.lock();
        let known = queue.iter().filter(|orphan| orphan.known).count();
        (known, queue.len() - known)
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
            if returns.len() == 0 {
                stop.run_until_cancelled(returns.waiting.notified()).await;
            } else if !self.0.give_back_batch().await {
                stop.run_until_cancelled(tokio::time::sleep(REST)).await;
            }
        }
    }

    /// Gives back what can be; called once no more can come. Waits for what is
    /// known to be orphaned, and for what may be while statements are overdue.
    pub(super) async fn give_back_rest(&self) {
        self.0.returns.look_now();
        loop {
            let progress = self.0.give_back_batch().await;
            let _none_is_out = self.0.returns.batch.lock().await;
            let overdue = self.0.pool.lingering() > 0;
            let (known, perhaps) = self.0.returns.count();
            if known == 0 && !progress && (perhaps == 0 || !overdue) {
                if perhaps > 0 {
                    tracing::warn!(
                        perhaps,
                        "calls without an answer may still become leases that nobody knows of"
                    );
                }
                return;
            }
            if !progress {
                tokio::time::sleep(REST).await;
            }
        }
    }
}

impl Inner {
    /// One statement's worth of what is due. Whether there was anything, and
    /// the database answered.
    async fn give_back_batch(&self) -> bool {
        let _out = self.returns.batch.lock().await;
        let batch = self.returns.take_batch();
        if batch.is_empty() {
            return false;
        }
        let deadline = Instant::now() + self.config.limits.statement;
        match self.send_give_back(&batch, deadline).await {
            Ok(seen) => {
                let left = batch
                    .into_iter()
                    .enumerate()
                    .filter(|(place, orphan)| !orphan.is_done(seen.get(place).copied()));
                self.returns.put_back(left.map(|(_, orphan)| orphan));
                true
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "leases could not be given back yet");
                self.returns.put_back(batch.into_iter());
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
            let given_back = row::column(row, "given_back")?;
            if given_back && let Some(orphan) = batch.get(place) {
                audit::given_back(orphan);
            }
            seen.insert(place, given_back);
        }
        Ok(seen)
    }
}
