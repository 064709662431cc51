//! How long a lease lasts.

use std::time::Duration;

use super::Invalid;

/// A time to live in whole milliseconds, within the server's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ttl(i64);

impl Ttl {
    pub(crate) fn millis(self) -> i64 {
        self.0
    }

    pub(crate) fn as_duration(self) -> Duration {
        Duration::from_millis(self.0.unsigned_abs())
    }
}

/// The shortest and the longest TTL this server grants, both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TtlLimits {
    pub(crate) min: Duration,
    pub(crate) max: Duration,
}

impl TtlLimits {
    /// A fraction of a millisecond is rounded down, after the limits were
    /// checked: a caller is never promised more than it asked for.
    pub(crate) fn check(&self, ttl: Duration) -> Result<Ttl, Invalid> {
        if ttl < self.min || ttl > self.max {
            return Err(self.out_of_range());
        }
        let millis = i64::try_from(ttl.as_millis()).map_err(|_| self.out_of_range())?;
        Ok(Ttl(millis))
    }

    pub(crate) fn out_of_range(&self) -> Invalid {
        Invalid::new(format!(
            "must be {} to {}",
            humantime::format_duration(self.min),
            humantime::format_duration(self.max)
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::TtlLimits;

    const LIMITS: TtlLimits = TtlLimits {
        min: Duration::from_millis(500),
        max: Duration::from_secs(86_400),
    };

    #[test]
    fn limits_are_inclusive_to_the_nanosecond() {
        let ns = Duration::from_nanos(1);
        assert_eq!(LIMITS.check(LIMITS.min).unwrap().millis(), 500);
        assert_eq!(LIMITS.check(LIMITS.max).unwrap().millis(), 86_400_000);
        assert!(LIMITS.check(LIMITS.min - ns).is_err());
        assert!(LIMITS.check(LIMITS.max + ns).is_err());
        assert!(LIMITS.check(Duration::ZERO).is_err());
        assert!(LIMITS.check(Duration::MAX).is_err());
    }

    #[test]
    fn a_fraction_of_a_millisecond_is_rounded_down() {
        let ttl = LIMITS.check(Duration::from_micros(1_000_999)).unwrap();
        assert_eq!(ttl.millis(), 1000);
    }
}
