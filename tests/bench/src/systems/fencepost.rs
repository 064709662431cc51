//! `fencepostd` with its default settings, or watched in one way more, on a Postgres of
//! its own.

use std::net::SocketAddr;

use fencepost_support::{Server, server::Builder};

use super::{
    Shim, System,
    beside::{self, Beside},
    locks,
    postgres::Postgres,
};
use crate::load::{Client, Result};

pub(crate) struct Fencepost {
    server: Server,
    postgres: Postgres,
    /// Held for as long as the server runs.
    beside: Option<Beside>,
}

impl Fencepost {
    pub(crate) async fn start(shim: Option<&Shim>) -> Result<Self> {
        Self::with(shim, |server| server, None).await
    }

    pub(crate) async fn scraped() -> Result<Self> {
        let mut started = Self::start(None).await?;
        started.beside = Some(beside::scraper(started.server.http()));
        Ok(started)
    }

    pub(crate) async fn audited() -> Result<Self> {
        Self::with(None, |server| server.switch("--audit-log"), None).await
    }

    pub(crate) async fn traced() -> Result<Self> {
        let (collector, url) = beside::collector();
        let to_it = |server: Builder| server.flag("--otlp-endpoint", &url);
        Self::with(None, to_it, Some(collector)).await
    }

    async fn with(
        shim: Option<&Shim>,
        flags: impl FnOnce(Builder) -> Builder,
        beside: Option<Beside>,
    ) -> Result<Self> {
        let postgres = Postgres::start(shim).await?;
        let server = flags(Server::builder(&postgres.url())).ready().await;
        Ok(Self {
            server,
            postgres,
            beside,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.server.grpc()
    }

    pub(crate) fn server_pid(&self) -> u32 {
        self.server.pid()
    }
}

#[tonic::async_trait]
impl System for Fencepost {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        locks::clients(self.address(), names).await
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("server", self.server.pid()),
            ("postgres", self.postgres.pid()),
        ]
    }

    /// Copies a row that the server itself wrote, whatever its columns are.
    async fn fill(&self, rows: u64) -> Result<()> {
        let name = "template".to_owned();
        for mut client in self.clients(&[name]).await? {
            client.acquire().await?;
            client.release().await?;
        }
        let copy = format!(
            "INSERT INTO fencepost.locks
             SELECT copy.* FROM fencepost.locks AS l, generate_series(1, {rows}) AS n,
                    jsonb_populate_record(l, jsonb_build_object('resource', 'filled-' || n)) AS copy
              WHERE l.resource = 'template'"
        );
        let postgres = self.postgres.connect().await?;
        for statement in [&copy, "VACUUM (ANALYZE) fencepost.locks", "CHECKPOINT"] {
            postgres.batch_execute(statement).await?;
        }
        Ok(())
    }

    async fn hot_updates(&self) -> Result<Option<f64>> {
        self.postgres.hot_updates("fencepost", "locks").await
    }
}
