//! Sessions of a pooler that were born read-only, and are ended.
//!
//! What a database or a role says of `default_transaction_read_only` counts for
//! sessions that begin later. A direct connection that hears read-only is dropped,
//! and the next one sees the default of now. A pooler keeps the session behind
//! ours, and our own tries keep it from being idle for long: the lock table would
//! stay read-only long after the default was taken back. So a session of a primary
//! that says read-only when we connect is told to end itself, and the pooler makes
//! a new one. It is not overruled with READ WRITE: whoever set the default may mean it.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use fencepost_tls::postgres::PostgresTls;
use tokio::time::Instant;
use tokio_postgres::{Config, config::TargetSessionAttrs};

/// It may be another session than the one that was met before: it is asked again.
/// A standby's is left alone, since the next one would be no other.
const END: &str = "SELECT pg_terminate_backend(pg_backend_pid()) \
     WHERE current_setting('transaction_read_only') = 'on' AND NOT pg_is_in_recovery()";

/// How many are ended in each [`INTERVAL`]: a database that stays read-only must
/// not be busy with new sessions, and a pool of 20 be good again in seconds.
const MOST: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct PooledSessions(Mutex<Option<Lately>>);

#[derive(Clone, Copy)]
struct Lately {
    since: Instant,
    tries: u32,
}

impl PooledSessions {
    /// Ends a read-only session behind the pooler, unless too many were lately.
    /// Whether it did.
    pub(super) async fn end_read_only(&self, pooler: &Config, tls: &PostgresTls) -> bool {
        if !self.may_try(Instant::now()) {
            return false;
        }
        let mut pooler = pooler.clone();
        pooler.target_session_attrs(TargetSessionAttrs::Any);
        let Ok((client, connection)) = tls.connect(&pooler).await else {
            return false;
        };
        let ended = tokio::select! {
            _ = connection => true,
            answer = client.batch_execute(END) => answer.is_err(),
        };
        if ended {
            tracing::info!("ended a session of the pooler that was read-only");
        }
        ended
    }

    fn may_try(&self, now: Instant) -> bool {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counted = lately
            .filter(|lately| now.duration_since(lately.since) < INTERVAL)
            .unwrap_or(Lately {
                since: now,
                tries: 0,
            });
        counted.tries += 1;
        *lately = Some(counted);
        counted.tries <= MOST
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::{INTERVAL, MOST, PooledSessions};

    #[test]
    fn a_database_that_stays_read_only_makes_no_storm_of_sessions() {
        let (pooled, now) = (PooledSessions::default(), Instant::now());
        let tried = |at| (0..100).filter(|_| pooled.may_try(at)).count();
        assert_eq!(tried(now), MOST as usize);
        assert_eq!(tried(now + INTERVAL / 2), 0);
        assert_eq!(tried(now + INTERVAL), MOST as usize);
    }
}
