//! A monotonic clock that runs while the machine sleeps.
//!
//! On Linux the standard library's stands still during suspend, and an answer
//! that came back after an hour of sleep would look fresh; this one asks for
//! boot time (`clock_gettime(2)`, `CLOCK_BOOTTIME`).

use std::{ops::Add, time::Duration};

use rustix::time::{ClockId, clock_gettime};

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
// Elsewhere the monotonic clock is the best there is; on macOS it counts sleep.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// A point on that clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

    pub(crate) fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    /// Zero when `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub(crate) fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}
