//! Somebody else: another holder, and the data that the lock protects.

use std::time::{Duration, Instant};

use fencepost_support::{
    Server, calls,
    postgres::{self, Database},
    server::Client,
};
use serde_json::{Value, json};
use tokio::time::sleep;

/// The fencing kit, as it is installed.
const KIT: &str = include_str!("../../client/fence/postgres.sql");

pub(crate) struct Others {
    client: Client,
    data: postgres::Client,
}

impl Others {
    pub(crate) async fn new(database: &Database, server: &Server) -> Self {
        let data = database.client().await;
        data.run(KIT).await;
        Self {
            client: server.client().await,
            data,
        }
    }

    pub(crate) async fn acquire(&mut self, asked: &Value) -> Value {
        let millis = |field: &str| Duration::from_millis(asked[field].as_u64().unwrap_or(0));
        let deadline = Instant::now() + millis("wait_ms");
        loop {
            let answer = calls::acquire(
                &mut self.client,
                text(asked, "resource"),
                text(asked, "owner"),
                millis("ttl_ms"),
            )
            .await;
            match answer {
                Ok(answer) if answer.acquired => {
                    let token = answer.lock.map_or(0, |lock| lock.fencing_token);
                    return json!({"acquired": true, "token": token});
                }
                // The servers come and go.
                Ok(_) | Err(_) if Instant::now() < deadline => {
                    sleep(Duration::from_millis(20)).await
                }
                Ok(_) => return json!({"acquired": false}),
                Err(status) => return json!({"failed": status.to_string()}),
            }
        }
    }

    pub(crate) async fn release(&mut self, asked: &Value) -> Value {
        let (resource, owner) = (text(asked, "resource"), text(asked, "owner"));
        let token = asked["token"].as_i64().unwrap_or(0);
        match calls::release(&mut self.client, resource, owner, token).await {
            Ok(_) => json!({"released": true}),
            Err(status) => json!({"failed": status.to_string()}),
        }
    }

    /// What a write with this token meets.
    pub(crate) async fn write(&self, asked: &Value) -> Value {
        let token = asked["token"].as_i64().unwrap_or(0);
        let admitted = self
            .data
            .execute(
                "SELECT fence.admit($1, $2)",
                &[&text(asked, "resource"), &token],
            )
            .await;
        match admitted {
            Ok(_) => json!({"outcome": "written"}),
            Err(error) if error.code().is_some_and(|code| code.code() == "FP409") => {
                json!({"outcome": "refused"})
            }
            Err(error) => json!({"failed": error.to_string()}),
        }
    }
}

fn text<'a>(asked: &'a Value, field: &str) -> &'a str {
    asked[field].as_str().unwrap_or_default()
}
