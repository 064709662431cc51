//! Fencing at the resource: refuse the write of a holder that is no longer one.
//!
//! A lease ends while its holder is frozen, and the holder wakes up and writes.
//! Only the written resource can refuse that, by comparing
//! [`fencing_token`](crate::Lock::fencing_token), in one step with the write,
//! with the highest it has seen.
//!
//! - [`Gate`] does it for what lives in this process, and for a store of your own.
//! - [`POSTGRES_KIT`] does it for a PostgreSQL database, in the writer's own
//!   transaction: [`ADMIT`] first, as a statement of its own; an error with
//!   [`STALE_SQLSTATE`] means that a newer holder has been there.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The SQL of the kit, to be run in one transaction on the database that is to
/// be guarded: what `fencepost fence install` runs. Safe to run again.
pub const POSTGRES_KIT: &str = include_str!("../fence/postgres.sql");

/// The statement that every transaction of a holder starts with. `$1` is the
/// resource as text, `$2` the token as `bigint`.
pub const ADMIT: &str = "SELECT fence.admit($1, $2)";

/// The SQLSTATE of a write with an older token. Its transaction is over, and so
/// is the lease: stop working.
pub const STALE_SQLSTATE: &str = "FP409";

/// The highest fencing token seen, per resource, for stores within this process.
///
/// ```
/// use fencepost_client::fence::Gate;
///
/// let gate = Gate::new();
/// let mut price = 10;
///
/// // A holder with token 33 writes, as often as it likes.
/// gate.run("price", 33, || price = 11)?;
/// gate.run("price", 33, || price = 12)?;
/// // Another one takes over, and shows its token before it reads.
/// gate.admit("price", 34)?;
/// // The first one wakes up. Its write is not run.
/// let late = gate.run("price", 33, || price = 13).unwrap_err();
/// assert_eq!(late.highest, 34);
/// assert_eq!(price, 12);
/// # Ok::<(), fencepost_client::fence::Stale>(())
/// ```
///
/// Two things to know:
///
/// - It remembers one number for each name it has seen, and forgets nothing
///   unless told to by [`forget`](Self::forget): a token that is forgotten is
///   one that an old holder gets in with. With an unbounded number of names it
///   grows without bound.
/// - It is as durable as this process. A gate that starts anew has seen nothing,
///   so it guards what starts anew as well, or is filled from the store first:
///   [`admit`](Self::admit) the token that is stored with the data.
#[derive(Debug, Default)]
pub struct Gate {
    /// A lock of its own per resource, so that one slow write delays no other.
    resources: Mutex<HashMap<String, Arc<Mutex<i64>>>>,
    rejected: AtomicU64,
}

/// A token that is older than the highest one seen: a newer holder has been here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the fencing token is older than the highest one seen, {highest}: stop working")]
pub struct Stale {
    /// The highest token seen for the resource; 0 when there is none, and what
    /// was shown is not a token.
    pub highest: i64,
}

impl Gate {
    /// A gate that has seen no token.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows a token: records it unless a newer one was seen. An equal one is
    /// admitted.
    ///
    /// This is for a new holder before it reads. A write that follows it is not
    /// one step with it: use [`run`](Self::run) for writes.
    ///
    /// # Errors
    ///
    /// When a newer token was seen, or the token is not above 0.
    pub fn admit(&self, resource: &str, token: i64) -> Result<(), Stale> {
        self.run(resource, token, || ())
    }

    /// Shows a token and, when it is admitted, runs `write` while nobody else
    /// can show one for this resource. Returns what `write` returns.
    ///
    /// `write` must have taken effect when it returns: a write that it only
    /// hands on, to another thread or an async task, comes after the comparison.
    /// Within `write`, calls for the same resource would wait for ever.
    ///
    /// # Errors
    ///
    /// When a newer token was seen, or the token is not above 0: `write` is then
    /// not run.
    pub fn run<T>(
        &self,
        resource: &str,
        token: i64,
        write: impl FnOnce() -> T,
    ) -> Result<T, Stale> {
        loop {
            let entry = self.entry(resource);
            let mut highest = entered(&entry);
            if *highest == FORGOTTEN {
                // While this call waited; the name has another entry by now, or
                // none.
                continue;
            }
            if token <= 0 || token < *highest {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                return Err(Stale { highest: *highest });
            }
            *highest = token;
            return Ok(write());
        }
    }

    /// How many tokens were refused: each is a corruption that was tried, and did not
    /// happen. To be exported as `fence_rejected_total`.
    #[must_use]
    pub fn rejected_total(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// The highest token seen, to look at.
    #[must_use]
    pub fn highest(&self, resource: &str) -> Option<i64> {
        let entry = self.resources().get(resource).cloned()?;
        let highest = *entered(&entry);
        (highest > 0).then_some(highest)
    }

    /// Forgets a resource: from then on any token is admitted, that of a holder
    /// frozen for hours too. For names that are gone for good.
    pub fn forget(&self, resource: &str) {
        let removed = self.resources().remove(resource);
        if let Some(entry) = removed {
            *entered(&entry) = FORGOTTEN;
        }
    }

    fn entry(&self, resource: &str) -> Arc<Mutex<i64>> {
        let mut resources = self.resources();
        if let Some(entry) = resources.get(resource) {
            return Arc::clone(entry);
        }
        let entry = Arc::default();
        resources.insert(resource.to_owned(), Arc::clone(&entry));
        entry
    }

    fn resources(&self) -> MutexGuard<'_, HashMap<String, Arc<Mutex<i64>>>> {
        entered(&self.resources)
    }
}

/// Marks an entry that is no longer in the map.
const FORGOTTEN: i64 = -1;

/// A write that panicked leaves its token recorded, which is all that is kept.
fn entered<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::mpsc,
        thread,
        time::Duration,
    };

    use super::*;

    #[test]
    fn older_is_refused_and_equal_admitted() {
        let gate = Gate::new();
        assert_eq!(gate.highest("r"), None);
        assert_eq!(gate.admit("r", 5), Ok(()));
        assert_eq!(gate.admit("r", 5), Ok(()));
        assert_eq!(gate.admit("r", 4), Err(Stale { highest: 5 }));
        assert_eq!(gate.rejected_total(), 1);
        assert_eq!(gate.admit("r", 1 << 40), Ok(()));
        assert_eq!(gate.highest("r"), Some(1 << 40));
        assert_eq!(gate.admit("another", 1), Ok(()));
    }

    #[test]
    fn what_is_not_a_token_is_refused() {
        let gate = Gate::new();
        for token in [0, -1, i64::MIN] {
            assert_eq!(gate.admit("r", token), Err(Stale { highest: 0 }));
        }
        assert_eq!(gate.highest("r"), None);
    }

    #[test]
    fn what_is_forgotten_is_admitted_again() {
        let gate = Gate::new();
        gate.admit("r", 7).unwrap();
        gate.forget("r");
        gate.forget("never seen");
        assert_eq!(gate.highest("r"), None);
        assert_eq!(gate.admit("r", 3), Ok(()));
    }

    #[test]
    fn a_write_that_panics_closes_nothing() {
        let gate = Gate::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| gate.run("r", 5, || panic!("torn"))));
        assert!(panicked.is_err());
        assert_eq!(gate.admit("r", 4), Err(Stale { highest: 5 }));
        assert_eq!(gate.admit("r", 5), Ok(()));
    }

    #[test]
    fn nobody_shows_a_token_during_a_write() {
        let gate = Gate::new();
        let (shown, seen) = mpsc::channel();
        thread::scope(|scope| {
            let during = gate.run("r", 5, || {
                scope.spawn(|| {
                    gate.admit("another", 1).unwrap();
                    gate.admit("r", 6).unwrap();
                    shown.send(()).unwrap();
                });
                seen.recv_timeout(Duration::from_millis(100))
            });
            assert_eq!(during, Ok(Err(mpsc::RecvTimeoutError::Timeout)));
            assert_eq!(seen.recv(), Ok(()));
        });
        assert_eq!(gate.highest("r"), Some(6));
    }

    /// The write that stands last is that of the highest token, whoever comes in
    /// which order, and no write with an older token follows a newer one.
    #[test]
    fn a_register_behind_it_never_goes_back() {
        const THREADS: i64 = 8;
        const WRITES: i64 = 2_000;
        let gate = Gate::new();
        let written = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (gate, written) = (&gate, &written);
                scope.spawn(move || {
                    for n in 0..WRITES {
                        // Neighbours now and then ahead of, now and then behind.
                        let token = 1 + (n * THREADS + thread) / 3;
                        let written = || written.lock().unwrap().push(token);
                        let _ = gate.run("register", token, written);
                    }
                });
            }
        });
        let written = written.into_inner().unwrap();
        assert!(written.is_sorted(), "an older write followed a newer one");
        assert_eq!(written.last().copied(), gate.highest("register"));
    }
}
