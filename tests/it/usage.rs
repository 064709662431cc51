//! What a server uses, as the machine and the database see it.

use std::{fs, time::Duration};

use fencepost_support::{Server, postgres::Database, wait::within};
use tokio::time::{sleep, timeout};

const MEGABYTE: u64 = 1024 * 1024;

/// What a server uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) memory: u64,
    pub(crate) threads: usize,
    pub(crate) files: usize,
    pub(crate) sessions: i64,
}

impl Usage {
    pub(crate) async fn of(server: &Server, database: &Database) -> Self {
        let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let number = |field: &str| {
            let line = status.lines().find(|line| line.starts_with(field)).unwrap();
            let number = line.split_whitespace().nth(1).unwrap();
            number.parse::<u64>().unwrap()
        };
        Self {
            memory: number("VmRSS:") * 1024,
            threads: usize::try_from(number("Threads:")).unwrap(),
            files: server.open_files(),
            sessions: database
                .client()
                .await
                .value(
                    "SELECT count(*) FROM pg_stat_activity
                     WHERE datname = current_database() AND application_name = 'fencepostd'",
                )
                .await,
        }
    }

    /// Waits until the connections of clients are gone, but for a few.
    pub(crate) async fn at_rest(server: &Server, database: &Database) -> Self {
        let patience = Duration::from_secs(20);
        within(patience, "connections are gone", async || {
            let now = Self::of(server, database).await;
            (now.files < 60).then_some(now)
        })
        .await
    }

    /// Waits until it is as it was, with what an allocator keeps for later and
    /// what a pool opens when it is needed.
    pub(crate) async fn back(self, server: &Server, database: &Database) -> Self {
        let mut last = self;
        let calm = timeout(Duration::from_secs(40), async {
            loop {
                last = Self::of(server, database).await;
                let as_before = last.memory < self.memory + 24 * MEGABYTE
                    && last.threads <= self.threads + 2
                    && last.files <= self.files + 4
                    && last.sessions <= self.sessions.max(4) + 2;
                if as_before {
                    return last;
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
        let calm = calm.await.ok();
        calm.unwrap_or_else(|| panic!("{self:?} before, and {last:?} at rest"))
    }
}
