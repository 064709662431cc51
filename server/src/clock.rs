//! This machine's own clock: monotonic, and running while the machine sleeps.
//!
//! It measures how long ago something was sent; no lease is ever judged by
//! it. The standard library's monotonic clock stands still during suspend on
//! Linux, which would make an old answer look fresh, so this one asks for
//! boot time (`clock_gettime(2)`, `CLOCK_BOOTTIME`).

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
// Elsewhere the monotonic clock is the best there is; on macOS it counts sleep.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// A point on this machine's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        let now = clock_gettime(CLOCK);
        // Neither part is ever negative: the clock counts from boot.
        Self(Duration::new(
            now.tv_sec.unsigned_abs(),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        ))
    }

    /// The time from `earlier` to this moment; zero when it lies ahead.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time from now to this moment; zero when it has passed.
    pub(crate) fn remaining(self) -> Duration {
        self.since(Self::now())
    }

    pub(crate) fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }
}
