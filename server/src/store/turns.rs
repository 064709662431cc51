//! Whose turn it is to wait for a row.
//!
//! Calls that go alone may keep their connection for as long as a row is locked by
//! somebody else. They wait here rather than at the pool: they can leave this
//! queue, and it leaves a connection to the rounds, which wait for no row. No
//! resource has more than half of the turns, so that one row leaves the other half
//! to the others.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::lock::Resource;

/// Resources have a share in common by chance, one in so many.
const SHARES: usize = 256;

pub(super) struct Turns {
    all: Arc<Semaphore>,
    shares: Vec<Arc<Semaphore>>,
    hasher: RandomState,
}

/// A turn, given back on drop.
pub(super) struct Turn {
    _share: OwnedSemaphorePermit,
    _turn: OwnedSemaphorePermit,
}

impl Turns {
    /// Of so many connections.
    pub(super) fn new(connections: usize) -> Self {
        let turns = connections.saturating_sub(1).max(1);
        let share = || Arc::new(Semaphore::new(connections.div_ceil(2)));
        Self {
            all: Arc::new(Semaphore::new(turns)),
            shares: std::iter::repeat_with(share).take(SHARES).collect(),
            hasher: RandomState::new(),
        }
    }

    /// Waits for a turn, first among the calls of the same resource.
    pub(super) fn take(
        &self,
        resource: &Resource,
    ) -> impl Future<Output = Result<Turn, AcquireError>> + Send + 'static {
        let hash = usize::try_from(self.hasher.hash_one(resource) % SHARES as u64).unwrap_or(0);
        let (share, all) = (Arc::clone(&self.shares[hash]), Arc::clone(&self.all));
        async move {
            Ok(Turn {
                _share: share.acquire_owned().await?,
                _turn: all.acquire_owned().await?,
            })
        }
    }
}
