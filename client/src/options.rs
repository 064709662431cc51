//! What an acquisition may say.

use std::{collections::BTreeMap, time::Duration};

/// How a lock is taken and held. The default: a lease of 30 s, an owner of its
/// own, and waiting without limit where waiting is asked for.
///
/// ```
/// # use fencepost_client::AcquireOptions;
/// # use std::time::Duration;
/// let options = AcquireOptions::default()
///     .ttl(Duration::from_secs(10))
///     .wait(Duration::from_secs(60))
///     .label("build", "1f3c9a");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct AcquireOptions {
    pub(crate) ttl: Duration,
    pub(crate) owner: Option<String>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) request_id: Option<String>,
    pub(crate) wait: Option<Duration>,
    pub(crate) margin: Option<Duration>,
}

impl Default for AcquireOptions {
    fn default() -> Self {
        Self {
            ttl: Self::DEFAULT_TTL,
            owner: None,
            labels: BTreeMap::new(),
            request_id: None,
            wait: None,
            margin: None,
        }
    }
}

impl AcquireOptions {
    /// How long a lease lasts without a renewal, unless said otherwise.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// How long the lease lasts without a renewal: 500 ms to 24 h, unless the
    /// server is configured otherwise. A holder that dies blocks the lock for so
    /// long, one that is frozen or cut off for some 10 s more; one whose network is
    /// away for so long loses it.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Names ONE holder, never a host or a service: whoever has the lock and
    /// acquires it again loses the first lease. 1 to 256 bytes. Unset: a new name
    /// for each acquisition, of host, process id and a random part.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// Shown to whoever is refused: host, pid, build, trace id. Up to 16 of them,
    /// 4 KiB together.
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Names this acquisition, at most 128 bytes: a repeated call of the same
    /// owner with the same id gets the same lease. Unset: a new UUID.
    pub fn request_id(mut self, id: impl Into<String>) -> Self {
        self.request_id = Some(id.into());
        self
    }

    /// For how long [`acquire_with_retry`](crate::Client::acquire_with_retry) and
    /// [`with_lock`](crate::Client::with_lock) go on trying. Unset: without limit.
    /// [`acquire`](crate::Client::acquire) tries once, whatever this says.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// How long before the lease's deadline a guard stops to trust it. Time for
    /// the work to notice, too. Unset: a tenth of the TTL, at most 500 ms, or
    /// 1/2000 of the TTL where that is more.
    pub fn margin(mut self, margin: Duration) -> Self {
        self.margin = Some(margin);
        self
    }
}
