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
#[non_exhaustive]
pub struct AcquireOptions {
    /// How long the lease lasts without a renewal: 500 ms to 24 h, unless the
    /// server is configured otherwise. A holder that dies blocks the lock for so
    /// long; one whose network is away for so long loses it.
    pub ttl: Duration,
    /// Names ONE holder, never a host or a service: whoever has the lock and
    /// acquires it again loses the first lease. 1 to 256 bytes. `None`: a new
    /// name for each acquisition, of host, process id and a random part.
    pub owner: Option<String>,
    /// Shown to whoever is refused: host, pid, build, trace id. Up to 16, 4 KiB
    /// together.
    pub labels: BTreeMap<String, String>,
    /// Names this acquisition, at most 128 bytes: a repeated call of the same
    /// owner with the same id gets the same lease. `None`: a new UUID.
    pub request_id: Option<String>,
    /// For how long [`acquire_with_retry`](crate::Client::acquire_with_retry) and
    /// [`with_lock`](crate::Client::with_lock) go on trying. `None`: without
    /// limit; zero: one try.
    pub wait: Option<Duration>,
    /// How long before the lease's deadline a guard stops to trust it, in place
    /// of a tenth of the TTL (at most 500 ms, or 1/2000 of the TTL where that is
    /// more). Time for the work to notice, too.
    pub margin: Option<Duration>,
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
    /// What [`ttl`](Self::ttl) is unless it is set.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// Sets [`ttl`](field@Self::ttl).
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets [`owner`](field@Self::owner).
    #[must_use]
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// Adds one of the [`labels`](field@Self::labels).
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Sets [`request_id`](field@Self::request_id).
    #[must_use]
    pub fn request_id(mut self, id: impl Into<String>) -> Self {
        self.request_id = Some(id.into());
        self
    }

    /// Sets [`wait`](field@Self::wait).
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets [`margin`](field@Self::margin).
    #[must_use]
    pub fn margin(mut self, margin: Duration) -> Self {
        self.margin = Some(margin);
        self
    }
}
