//! A clock that other processes of this machine can read as well, and that counts
//! sleep where one does.

use std::{future::pending, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use tokio::time::{Instant, sleep_until};

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// A point on it: `CLOCK_BOOTTIME` in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(pub(crate) u64);

impl Moment {
    /// After every other.
    pub(crate) const NEVER: Self = Self(u64::MAX);

    pub(crate) fn now() -> Self {
        let now = clock_gettime(CLOCK);
        Self::since_boot(Duration::new(
            now.tv_sec.unsigned_abs(),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        ))
    }

    pub(crate) fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(Self::since_boot(time).0))
    }

    /// Zero when it has passed.
    pub(crate) fn remaining(self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(Self::now().0))
    }

    fn since_boot(time: Duration) -> Self {
        Self(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }
}

/// Waits until then; for ever when there is no such time.
pub(crate) async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}
