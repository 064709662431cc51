//! `fencepostd` with its default settings, or watched in one way more, on a Postgres of
//! its own.

use std::net::SocketAddr;

use fencepost_support::{Server, eventually, server::Builder};

use super::{
    Shim, System,
    beside::{self, Beside},
    channels, connections, locks,
    postgres::Postgres,
    secure::Secure,
};
use crate::load::{Client, Result};

pub(crate) struct Fencepost {
    server: Server,
    postgres: Postgres,
    /// Held for as long as the server runs.
    beside: Option<Beside>,
    secure: Option<Secure>,
}

impl Fencepost {
    pub(crate) async fn start(shim: Option<&Shim>) -> Result<Self> {
        Self::with(shim, |server| server, None).await
    }

    pub(crate) async fn scraped() -> Result<Self> {
        let telling_apart = |server: Builder| server.flag("--metrics-prefixes", "100");
        let mut started = Self::with(None, telling_apart, None).await?;
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

    pub(crate) async fn secured() -> Result<Self> {
        let secure = Secure::new()?;
        let mut started = Self::with(None, |server| secure.flags(server), None).await?;
        started.secure = Some(secure);
        Ok(started)
    }

    async fn with(
        shim: Option<&Shim>,
        flags: impl FnOnce(Builder) -> Builder,
        beside: Option<Beside>,
    ) -> Result<Self> {
        let postgres = Postgres::start(shim).await?;
        let server = flags(Server::builder(&postgres.url())).start().await;
        // Asked where there is no TLS.
        eventually("the server is ready", async || {
            let answer = beside::get(server.http(), "/readyz").await.ok()?;
            answer.starts_with("HTTP/1.1 200").then_some(())
        })
        .await;
        Ok(Self {
            server,
            postgres,
            beside,
            secure: None,
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
        let channels = match &self.secure {
            None => channels(self.address(), names.len()).await?,
            Some(secure) => {
                let mut channels = Vec::new();
                for _ in 0..connections(names.len()) {
                    channels.push(secure.channel(self.address()).await?);
                }
                channels
            }
        };
        Ok(locks::clients(&channels, names))
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
