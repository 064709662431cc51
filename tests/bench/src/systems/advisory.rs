//! Advisory locks of Postgres: no row, no flush, no token and no TTL; held for
//! as long as a session is open, so each holder needs one.

use tokio_postgres::Statement;

use super::{System, postgres::Postgres};
use crate::load::{Client, Result};

pub(super) struct Advisory {
    postgres: Postgres,
}

impl Advisory {
    pub(super) async fn start() -> Result<Self> {
        Ok(Self {
            postgres: Postgres::start(None).await?,
        })
    }
}

#[tonic::async_trait]
impl System for Advisory {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let mut clients: Vec<Box<dyn Client>> = Vec::new();
        for name in names {
            let connection = self.postgres.connect().await?;
            clients.push(Box::new(Holder {
                acquire: connection
                    .prepare("SELECT pg_try_advisory_lock(hashtextextended($1, 0))")
                    .await?,
                release: connection
                    .prepare("SELECT pg_advisory_unlock(hashtextextended($1, 0))")
                    .await?,
                connection,
                name: name.clone(),
            }));
        }
        Ok(clients)
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("postgres", self.postgres.pid())]
    }
}

struct Holder {
    connection: tokio_postgres::Client,
    acquire: Statement,
    release: Statement,
    name: String,
}

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        let row = self
            .connection
            .query_one(&self.acquire, &[&self.name])
            .await?;
        Ok(row.try_get(0)?)
    }

    async fn release(&mut self) -> Result<()> {
        let row = self
            .connection
            .query_one(&self.release, &[&self.name])
            .await?;
        if row.try_get(0)? {
            Ok(())
        } else {
            Err("not held".into())
        }
    }

    async fn renew(&mut self) -> Result<()> {
        Err("an advisory lock has no lease".into())
    }
}
