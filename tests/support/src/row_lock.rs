//! A second actor in the database that holds the row of a lock.

use crate::postgres::Client;
use crate::wait::eventually;

/// A transaction that holds `SELECT … FOR UPDATE` on a resource's row until
/// it is told what to do. Dropping it ends the session, which rolls back.
#[derive(Debug)]
pub struct RowLock {
    client: Client,
    observer: Client,
    pid: i32,
}

impl RowLock {
    /// Takes the row lock; panics when there is no such row.
    pub async fn hold(url: &str, resource: &str) -> Self {
        let client = Client::connect(url).await.expect("the database answers");
        let observer = Client::connect(url).await.expect("the database answers");
        client.run("BEGIN").await;
        let rows = client
            .query(
                "SELECT 1 FROM fencepost.locks WHERE resource = $1 FOR UPDATE",
                &[&resource],
            )
            .await
            .expect("the table of locks is there");
        assert_eq!(rows.len(), 1, "no row for {resource:?}");
        let pid = client.value("SELECT pg_backend_pid()").await;
        Self {
            client,
            observer,
            pid,
        }
    }

    /// The session that holds it, to change the row before the end.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// How many sessions wait for it, directly or behind one another.
    pub async fn waiters(&self) -> i64 {
        self.observer
            .query_one(
                // The second waits for the first, which waits for the holder.
                "WITH RECURSIVE blocked (pid, by) AS MATERIALIZED (
                     SELECT pid, unnest(pg_blocking_pids(pid)) FROM pg_stat_activity
                     WHERE wait_event_type = 'Lock'
                 ), waiting (pid) AS (
                     SELECT pid FROM blocked WHERE by = $1
                     UNION
                     SELECT blocked.pid FROM blocked JOIN waiting ON by = waiting.pid
                 )
                 SELECT count(*) FROM waiting",
                &[&self.pid],
            )
            .await
            .expect("the database answers")
            .get(0)
    }

    /// Waits until at least `count` sessions wait for it.
    pub async fn wait_for_waiters(&self, count: i64) {
        eventually("sessions wait for the row", async || {
            (self.waiters().await >= count).then_some(())
        })
        .await;
    }

    /// Lets go with a commit.
    pub async fn commit(self) {
        self.client.run("COMMIT").await;
    }

    /// Lets go with a rollback.
    pub async fn rollback(self) {
        self.client.run("ROLLBACK").await;
    }
}
