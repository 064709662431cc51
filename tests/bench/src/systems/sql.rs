//! One SQL statement a call, straight to a Postgres with the settings of
//! Fencepost's: what a team writes that needs a lock and has a database.

use std::sync::Arc;

use tokio_postgres::Statement;

use super::{Shim, System, TTL_S, postgres::Postgres};
use crate::load::{Client, Result};

/// Clients beyond this share connections, where their statements are
/// pipelined: more sessions only made it slower, and the server takes 100.
pub(super) const CONNECTIONS: usize = 64;

const SCHEMA: &str = "
CREATE TABLE leases (
    resource   text COLLATE \"C\" PRIMARY KEY,
    owner      text NOT NULL,
    token      bigint NOT NULL,
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_cost_delay = 0);
CREATE SEQUENCE tokens CACHE 1";

const ACQUIRE: &str = "
INSERT INTO leases AS l (resource, owner, token, expires_at)
VALUES ($1, $2, nextval('tokens'), clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (resource) DO UPDATE
   SET owner = EXCLUDED.owner, token = nextval('tokens'),
       expires_at = clock_timestamp() + make_interval(secs => $3)
 WHERE l.expires_at <= clock_timestamp()
RETURNING token";

const RELEASE: &str = "
UPDATE leases SET expires_at = clock_timestamp()
 WHERE resource = $1 AND owner = $2 AND token = $3 AND expires_at > clock_timestamp()";

const RENEW: &str = "
UPDATE leases SET expires_at = clock_timestamp() + make_interval(secs => $4)
 WHERE resource = $1 AND owner = $2 AND token = $3 AND expires_at > clock_timestamp()";

pub(super) struct SqlPerCall {
    postgres: Postgres,
}

impl SqlPerCall {
    pub(super) async fn start(shim: Option<&Shim>) -> Result<Self> {
        let postgres = Postgres::start(shim).await?;
        postgres.connect().await?.batch_execute(SCHEMA).await?;
        Ok(Self { postgres })
    }
}

#[tonic::async_trait]
impl System for SqlPerCall {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let mut sessions = Vec::new();
        for _ in 0..names.len().min(CONNECTIONS) {
            let connection = self.postgres.connect().await?;
            // On a small table the planner likes to scan it.
            connection.batch_execute("SET enable_seqscan = off").await?;
            sessions.push(Arc::new(Session {
                acquire: connection.prepare(ACQUIRE).await?,
                release: connection.prepare(RELEASE).await?,
                renew: connection.prepare(RENEW).await?,
                connection,
            }));
        }
        let numbered = names.iter().zip(sessions.iter().cycle()).enumerate();
        Ok(numbered
            .map(|(n, (name, session))| {
                Box::new(Holder {
                    session: Arc::clone(session),
                    name: name.clone(),
                    owner: format!("client-{n}"),
                    token: 0,
                }) as Box<dyn Client>
            })
            .collect())
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("postgres", self.postgres.pid())]
    }

    async fn fill(&self, rows: u64) -> Result<()> {
        let copy = format!(
            "INSERT INTO leases
             SELECT 'filled-' || n, 'nobody', nextval('tokens'), clock_timestamp()
               FROM generate_series(1, {rows}) AS n"
        );
        let postgres = self.postgres.connect().await?;
        for statement in [&copy, "VACUUM (ANALYZE) leases", "CHECKPOINT"] {
            postgres.batch_execute(statement).await?;
        }
        Ok(())
    }

    async fn hot_updates(&self) -> Result<Option<f64>> {
        self.postgres.hot_updates("public", "leases").await
    }
}

struct Session {
    connection: tokio_postgres::Client,
    acquire: Statement,
    release: Statement,
    renew: Statement,
}

struct Holder {
    session: Arc<Session>,
    name: String,
    owner: String,
    token: i64,
}

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        let Session {
            connection,
            acquire,
            ..
        } = &*self.session;
        let ttl = f64::from(TTL_S);
        let granted = connection
            .query_opt(acquire, &[&self.name, &self.owner, &ttl])
            .await?;
        if let Some(row) = &granted {
            self.token = row.try_get(0)?;
        }
        Ok(granted.is_some())
    }

    async fn release(&mut self) -> Result<()> {
        let Session {
            connection,
            release,
            ..
        } = &*self.session;
        let rows = connection
            .execute(release, &[&self.name, &self.owner, &self.token])
            .await?;
        held(rows)
    }

    async fn renew(&mut self) -> Result<()> {
        let Session {
            connection, renew, ..
        } = &*self.session;
        let ttl = f64::from(TTL_S);
        let rows = connection
            .execute(renew, &[&self.name, &self.owner, &self.token, &ttl])
            .await?;
        held(rows)
    }
}

fn held(rows: u64) -> Result<()> {
    if rows == 1 {
        Ok(())
    } else {
        Err("not held".into())
    }
}
