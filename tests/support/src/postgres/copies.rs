//! Copies of a cluster: its files, or its contents as a dump.

use std::{
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{binaries::program, cluster::Postgres};
use crate::{
    system::{self, run},
    wait::eventually,
};

impl Postgres {
    /// Copies the data directory and starts the copy as a cluster of its own.
    ///
    /// A running cluster is frozen while it is copied: the copy is what a
    /// snapshot of the disk would hold, and recovers at its start.
    pub async fn copy(&self) -> Self {
        let mut copy = self.copy_stopped().await;
        copy.start_again().await;
        copy
    }

    /// The same, but leaves the copy stopped.
    pub async fn copy_stopped(&self) -> Self {
        let copy = Self::stopped();
        let running = self.is_running();
        if running {
            self.freeze();
        }
        let mut command = Command::new("cp");
        command.arg("-a").arg(self.data()).arg(copy.data());
        let copied = tokio::task::spawn_blocking(move || command.status()).await;
        if running {
            self.thaw();
        }
        let status = copied.expect("the thread ran").expect("cp runs");
        assert!(status.success(), "cp: {status}");
        let _ = std::fs::remove_file(copy.data().join("postmaster.pid"));
        copy
    }

    /// Puts the data directory of `backup`, which is stopped, in the place of
    /// this one's, which is stopped too: a restore on the same server.
    pub async fn restore_files_of(&mut self, backup: &Self) {
        assert!(
            !self.is_running() && !backup.is_running(),
            "both are stopped"
        );
        std::fs::remove_dir_all(self.data()).expect("the old data can be removed");
        let mut command = Command::new("cp");
        command.arg("-a").arg(backup.data()).arg(self.data());
        run(command).await;
    }

    /// Marks this moment, for [`Postgres::recover_to`].
    pub async fn restore_point(&self, name: &str) {
        let admin = self.admin().await;
        let mark = format!("SELECT pg_create_restore_point('{name}')");
        admin.batch_execute(&mark).await.expect("it is a primary");
    }

    /// Waits until all that was written so far is in the archive.
    pub async fn archived(&self) {
        let admin = self.admin().await;
        let segment: String = admin.value("SELECT pg_walfile_name(pg_switch_wal())").await;
        let there = format!(
            "SELECT coalesce(last_archived_wal >= '{segment}', false) FROM pg_stat_archiver"
        );
        eventually("the WAL is archived", async || {
            admin.value::<bool>(&there).await.then_some(())
        })
        .await;
    }

    /// Makes this, a stopped base backup of `original`, recover from its archive
    /// until a restore point, at the next start, and take writes then.
    pub fn recover_to(&self, original: &Self, restore_point: &str) {
        let archive = original.data().join("archive");
        let restore = format!("cp {}/%f %p", archive.display());
        for (name, value) in [
            ("archive_mode", "off"),
            ("restore_command", &restore),
            ("recovery_target_name", restore_point),
            ("recovery_target_action", "promote"),
        ] {
            self.append("postgresql.auto.conf", name, value);
        }
        let signal = self.data().join("recovery.signal");
        std::fs::write(&signal, "").expect("room on the disk");
        system::give_away(&signal);
    }

    /// Dumps a database as SQL. `options` are those of `pg_dump`, such as
    /// `--data-only` or `--clean`.
    pub async fn dump(&self, database: &str, options: &[&str]) -> String {
        let mut command = program("pg_dump");
        command
            .args(options)
            .args(["--dbname", &self.url_of(database)]);
        String::from_utf8(run(command).await).expect("a dump is UTF-8")
    }

    /// Runs a script with `psql` against a database; panics at the first
    /// statement that fails.
    pub async fn psql(&self, database: &str, script: &str) {
        // Several tests may have a script for the cluster that they share.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("script-{n}.sql"));
        std::fs::write(&path, script).expect("room on the disk");
        system::give_away(&path);
        let mut command = program("psql");
        command
            .args(["-X", "-q", "-v", "ON_ERROR_STOP=1"])
            .args(["--dbname", &self.url_of(database)])
            .arg("--file")
            .arg(&path)
            .stdin(Stdio::null());
        run(command).await;
        let _ = std::fs::remove_file(path);
    }

    /// Makes an empty database.
    pub async fn create_database(&self, name: &str) {
        let admin = self.admin().await;
        admin.run(&format!("CREATE DATABASE {name}")).await;
    }

    /// Loads a dump into a new database of this cluster.
    pub async fn restore(&self, database: &str, dump: &str) {
        self.create_database(database).await;
        self.psql(database, dump).await;
    }
}
