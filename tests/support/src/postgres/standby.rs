//! Streaming standbys, and their promotion.

use super::{binaries::program, cluster::Postgres};
use crate::{
    system::{self, run},
    wait::eventually,
};

/// Whether the primary waits for its standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// A commit returns before the standby has it.
    Asynchronous,
    /// A commit waits until the standby has flushed it.
    Synchronous,
}

impl Postgres {
    /// Takes a base backup and starts it as a streaming standby of this
    /// cluster, named `name` there.
    pub async fn standby(&self, name: &str, replication: Replication) -> Self {
        let mut standby = self.base_backup().await;
        standby.follow(self, name);
        standby.start_again().await;
        let admin = self.admin().await;
        let streams = format!(
            "SELECT count(*) FROM pg_stat_replication
             WHERE application_name = '{name}' AND state = 'streaming'"
        );
        eventually("the standby streams", async || {
            (admin.value::<i64>(&streams).await == 1).then_some(())
        })
        .await;
        if replication == Replication::Synchronous {
            self.configure("synchronous_standby_names", name).await;
            let synchronous = format!(
                "SELECT count(*) FROM pg_stat_replication
                 WHERE application_name = '{name}' AND sync_state = 'sync'"
            );
            eventually("the standby is synchronous", async || {
                (admin.value::<i64>(&synchronous).await == 1).then_some(())
            })
            .await;
        }
        standby
    }

    /// A base backup of this running cluster, stopped.
    pub async fn base_backup(&self) -> Self {
        let backup = Self::stopped();
        let mut command = program("pg_basebackup");
        command
            .args(["--checkpoint=fast", "--wal-method=stream", "--no-sync"])
            .args(["--dbname", &self.url()])
            .arg("--pgdata")
            .arg(backup.data());
        run(command).await;
        backup
    }

    /// Makes a stopped copy of `primary` its standby at the next start.
    pub fn follow(&self, primary: &Self, name: &str) {
        let address = primary.address();
        // The file that `ALTER SYSTEM` writes is read last, and came along.
        let file = "postgresql.auto.conf";
        self.append(
            file,
            "primary_conninfo",
            &format!(
                "host={} port={} user=postgres application_name={name}",
                address.ip(),
                address.port()
            ),
        );
        // A copy of a synchronous primary must not wait for a standby it has not.
        self.append(file, "synchronous_standby_names", "");
        std::fs::write(self.data().join("standby.signal"), "").expect("room on the disk");
        system::give_away(&self.data().join("standby.signal"));
    }

    /// Cuts a standby off: what the primary writes from now on it never gets.
    pub async fn cut_off(&self) {
        self.configure("primary_conninfo", "host=127.0.0.1 port=1")
            .await;
        let admin = self.admin().await;
        eventually("the standby receives nothing any more", async || {
            let receivers = "SELECT count(*) FROM pg_stat_wal_receiver";
            (admin.value::<i64>(receivers).await == 0).then_some(())
        })
        .await;
    }

    /// Makes a standby a primary, and waits until it takes writes.
    pub async fn promote(&self) {
        let admin = self.admin().await;
        let promoted: bool = admin.value("SELECT pg_promote(wait_seconds => 30)").await;
        assert!(
            promoted,
            "the standby did not become a primary in time\n{}",
            self.log_tail()
        );
    }

    /// Holds a standby's replay where it is; it still receives and flushes.
    pub async fn pause_replay(&self) {
        let admin = self.admin().await;
        admin.run("SELECT pg_wal_replay_pause()").await;
        eventually("replay is paused", async || {
            let state: String = admin.value("SELECT pg_get_wal_replay_pause_state()").await;
            (state == "paused").then_some(())
        })
        .await;
    }

    /// Ends [`Postgres::pause_replay`].
    pub async fn resume_replay(&self) {
        self.admin()
            .await
            .run("SELECT pg_wal_replay_resume()")
            .await;
    }

    /// Waits until `standby` has replayed all that this cluster has written.
    pub async fn wait_replayed(&self, standby: &Self) {
        let written: String = self
            .admin()
            .await
            .value("SELECT pg_current_wal_lsn()::text")
            .await;
        let there = standby.admin().await;
        let query = format!("SELECT pg_last_wal_replay_lsn() >= '{written}'::pg_lsn");
        eventually("the standby has replayed all", async || {
            there.value::<bool>(&query).await.then_some(())
        })
        .await;
    }
}
