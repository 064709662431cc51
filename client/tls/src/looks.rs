//! Looks at files, where a file system that does not answer holds up nobody.
//!
//! A read from a network's disk may take for ever, and a thread that waits for it
//! cannot be called back. So there is one such thread at most, and whoever asks
//! waits for it no longer than a disk at work may take.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

/// How long a look may take: less than a connection may take to be made, which
/// waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Looks, one at a time.
#[derive(Debug, Default)]
pub struct Looks {
    /// Since when one is under way.
    since: watch::Sender<Option<Instant>>,
}

/// A look has not ended in time. Until it does there is no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hangs;

/// The one that is under way, until this is dropped.
struct Turn(watch::Sender<Option<Instant>>);

impl Looks {
    /// Has `look` done on a thread of its own, once the one before has ended.
    ///
    /// # Errors
    ///
    /// When either takes too long. `look` is then not begun, or goes on for nobody.
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Hangs> {
        let (turn, begun) = self.turn().await?;
        let looked = spawn_blocking(move || {
            let _turn = turn;
            look()
        });
        match timeout_at(begun + PATIENCE, looked).await {
            Ok(Ok(seen)) => Ok(seen),
            // It panicked, or the runtime is about to end.
            Ok(Err(_)) | Err(_) => Err(Hangs),
        }
    }

    /// What counts is since when the one before looks, not for how long this caller
    /// has waited: with a connection that is soon given up nobody would ever learn
    /// that it hangs.
    async fn turn(&self) -> Result<(Turn, Instant), Hangs> {
        loop {
            let now = Instant::now();
            let is_mine = self.since.send_if_modified(|since| {
                let is_free = since.is_none();
                since.get_or_insert(now);
                is_free
            });
            if is_mine {
                return Ok((Turn(self.since.clone()), now));
            }
            let mut since = self.since.subscribe();
            let begun = *since.borrow_and_update();
            if let Some(begun) = begun
                && timeout_at(begun + PATIENCE, since.changed()).await.is_err()
            {
                return Err(Hangs);
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.send_replace(None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn one_that_hangs_keeps_one_thread_and_holds_up_nobody() {
        let looks = Looks::default();
        assert_eq!(looks.look(|| 1).await, Ok(1));
        let (answer, disk) = mpsc::channel();
        // Its caller gives up at once.
        let hangs = looks.look(move || disk.recv().unwrap());
        let given_up = tokio::time::timeout(Duration::from_millis(10), hangs).await;
        assert!(given_up.is_err(), "{given_up:?}");
        let begun = Instant::now();
        assert_eq!(looks.look(|| 2).await, Err(Hangs));
        let took = begun.elapsed();
        assert!(took > PATIENCE / 2 && took < 2 * PATIENCE, "{took:?}");
        // Nobody waits for it again.
        for _ in 0..100 {
            assert_eq!(looks.look(|| 3).await, Err(Hangs));
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());

        answer.send(0).unwrap();
        let mut since = looks.since.subscribe();
        since.wait_for(Option::is_none).await.unwrap();
        assert_eq!(looks.look(|| 4).await, Ok(4));
    }

    #[tokio::test]
    async fn one_that_hangs_is_told_to_its_own_caller_too() {
        let looks = Looks::default();
        let (answer, disk) = mpsc::channel();
        let hangs = looks.look(move || disk.recv().unwrap()).await;
        assert_eq!(hangs, Err(Hangs));
        answer.send(()).unwrap();
    }

    #[tokio::test]
    async fn one_that_panics_is_over() {
        let looks = Looks::default();
        let panicked = looks.look(|| panic!("on purpose")).await;
        assert_eq!(panicked, Err::<(), _>(Hangs));
        assert_eq!(looks.look(|| 1).await, Ok(1));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn many_at_a_time_are_all_done() {
        let looks = Arc::new(Looks::default());
        let mut all = JoinSet::new();
        for n in 0..200 {
            let looks = Arc::clone(&looks);
            all.spawn(async move { looks.look(move || n).await });
        }
        for done in all.join_all().await {
            assert!(done.is_ok(), "{done:?}");
        }
    }
}
