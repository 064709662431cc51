//! Who used how much processor time.

use std::{collections::BTreeMap, time::Duration};

use fencepost_support::system;

/// The processor time that named processes have used so far, each with its
/// children; and ours, as `load`.
pub(crate) struct Times(Vec<(&'static str, BTreeMap<u32, Duration>)>);

impl Times {
    pub(crate) fn read(processes: &[(&'static str, u32)]) -> Self {
        let families = processes.iter().map(|&(name, pid)| {
            let mut family = system::children_of(pid);
            family.push(pid);
            (name, family)
        });
        // Our children are the systems themselves.
        let load = ("load", vec![std::process::id()]);
        let times = families.chain([load]).map(|(name, pids)| {
            let times = pids
                .into_iter()
                .map(|pid| (pid, system::cpu_time(pid).unwrap_or_default()));
            (name, times.collect())
        });
        Self(times.collect())
    }

    /// In percent of one core. What has ended since is left out: the sessions
    /// of the turn before may still be closing.
    pub(crate) fn since(&self, before: &Self, span: Duration) -> Vec<(&'static str, f64)> {
        let both = before.0.iter().zip(&self.0);
        both.map(|((_, before), (name, now))| {
            let used: Duration = now
                .iter()
                .map(|(pid, time)| {
                    time.saturating_sub(before.get(pid).copied().unwrap_or_default())
                })
                .sum();
            (*name, 100.0 * used.as_secs_f64() / span.as_secs_f64())
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_ended_takes_nothing_from_who_came() {
        let ms = Duration::from_millis;
        let before = Times(vec![(
            "postgres",
            BTreeMap::from([(1, ms(50)), (2, ms(900))]),
        )]);
        let now = Times(vec![(
            "postgres",
            BTreeMap::from([(1, ms(60)), (3, ms(40))]),
        )]);
        assert_eq!(now.since(&before, ms(100)), [("postgres", 50.0)]);
    }
}
