//! A private Postgres with exactly the settings that `fencepostd` gives to its
//! own, for Fencepost and for the systems that are plain SQL.

use std::{path::Path, process::Command, time::Duration};

use fencepost_support::{
    leash::End,
    postgres::program,
    process::Process,
    server,
    system::{self, PrivateDirectory},
    wait::eventually,
};
use tokio_postgres::{Config, NoTls};

use super::Shim;
use crate::load::Result;

pub(super) struct Postgres {
    // Dropped first: nobody writes to the directory that is dropped next.
    process: Process,
    directory: PrivateDirectory,
}

impl Postgres {
    /// `fencepostd migrate` makes the cluster, settings and schema, and stops it;
    /// then it runs as a child of ours, so that it ends with us and can be
    /// given a shim.
    pub(super) async fn start(shim: Option<&Shim>) -> Result<Self> {
        let directory = system::private_directory();
        let data = directory.join("data");
        let mut migrate = Command::new(server::binary());
        migrate.arg("migrate").arg("--data-dir").arg(&data);
        system::run(migrate).await;

        let mut command = program("postgres");
        command.arg("-D").arg(data.join("postgres"));
        command.arg("-k").arg(&*directory);
        if let Some(shim) = shim {
            shim.slow_down(&mut command, &directory)?;
        }
        let process = Process::start("postgres", &mut command, End::QuitProcess);
        let postgres = Self { process, directory };
        eventually("postgres answers", async || postgres.connect().await.ok()).await;
        Ok(postgres)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn url(&self) -> String {
        let socket = self.directory.display();
        format!("host='{socket}' port=5432 user=fencepost dbname=fencepost")
    }

    /// A connection, served by a task of its own.
    pub(super) async fn connect(&self) -> Result<tokio_postgres::Client> {
        let socket: &Path = &self.directory;
        let mut config = Config::new();
        config
            .host_path(socket)
            .user("fencepost")
            .dbname("fencepost");
        let (client, connection) = config.connect(NoTls).await?;
        // It ends with the client.
        tokio::spawn(connection);
        Ok(client)
    }

    /// The share of updates of a table that were heap-only so far.
    pub(super) async fn hot_updates(&self, schema: &str, table: &str) -> Result<Option<f64>> {
        // Sessions report what they did once a second at most.
        tokio::time::sleep(Duration::from_millis(1200)).await;
        let row = self
            .connect()
            .await?
            .query_one(
                "SELECT n_tup_hot_upd::float8 / nullif(n_tup_upd, 0) \
                   FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = $2",
                &[&schema, &table],
            )
            .await?;
        Ok(row.try_get(0)?)
    }
}
