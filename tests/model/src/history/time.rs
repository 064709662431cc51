//! Moments and spans, as a history has them.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// A moment on the one monotonic clock of the run, in microseconds since it began.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Later than every call.
    pub const NEVER: Self = Self(u64::MAX);

    /// This much later.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        let span = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(span))
    }

    /// This much earlier.
    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        let span = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(span))
    }

    /// The time from `earlier` to this moment; zero when it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}", Duration::from_micros(self.0).as_secs_f64())
    }
}

/// Durations as whole microseconds.
pub(super) mod micros {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(in crate::history) fn serialize<S: Serializer>(
        span: &Duration,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
    }

    pub(in crate::history) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Duration, D::Error> {
        Ok(Duration::from_micros(u64::deserialize(from)?))
    }
}
