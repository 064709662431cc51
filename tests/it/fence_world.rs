//! What the tests of the fencing kit start from.

use fencepost_support::{
    eventually,
    postgres::{Client, Database, fresh_database},
};
use tokio_postgres::Error;

/// The kit itself, as it is shipped.
pub(crate) const KIT: &str = include_str!("../../client/fence/postgres.sql");

/// All levels at which the kit must be right.
pub(crate) const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

/// A database with the kit in it, and nothing else.
pub(crate) async fn fenced() -> Database {
    let database = fresh_database().await;
    database.client().await.run(KIT).await;
    database
}

/// The SQLSTATE of an answer; `00000` for success.
pub(crate) fn state<T>(answer: Result<T, Error>) -> String {
    match answer {
        Ok(_) => "00000".to_owned(),
        Err(error) => match error.code() {
            Some(code) => code.code().to_owned(),
            None => panic!("no SQLSTATE: {error:?}"),
        },
    }
}

/// Shows a token.
pub(crate) async fn admit(client: &Client, resource: &str, token: i64) -> Result<(), Error> {
    let sql = "SELECT fence.admit($1, $2)";
    client.execute(sql, &[&resource, &token]).await.map(drop)
}

/// The highest token that a resource has seen; 0: none.
pub(crate) async fn highest(client: &Client, resource: &str) -> i64 {
    let sql = "SELECT token FROM fence.check($1)";
    let row = client.query_opt(sql, &[&resource]).await.unwrap();
    row.map_or(0, |row| row.get(0))
}

/// How many writes were rejected so far.
pub(crate) async fn rejected(client: &Client) -> i64 {
    client.value("SELECT fence.rejected_total()").await
}

/// The process that serves a session.
pub(crate) async fn pid(client: &Client) -> i32 {
    client.value("SELECT pg_backend_pid()").await
}

/// Waits until a session waits for a lock.
pub(crate) async fn blocked(observer: &Client, pid: i32) {
    eventually("the session waits for a lock", async || {
        let sql = "SELECT cardinality(pg_blocking_pids($1)) > 0";
        let row = observer.query_one(sql, &[&pid]).await.unwrap();
        row.get::<_, bool>(0).then_some(())
    })
    .await;
}

/// A role with USAGE on the schema and what else `grant` says. Roles belong to the
/// whole cluster, so each has the name of its database.
pub(crate) async fn role(database: &Database, grant: &str) -> String {
    let role = format!("role_{}", database.name());
    let client = database.client().await;
    client
        .run(&format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA fence TO {role}"
        ))
        .await;
    if !grant.is_empty() {
        client.run(&format!("{grant} {role}")).await;
    }
    role
}

/// How each of these ends for a role.
pub(crate) async fn may(client: &Client, calls: &[(&str, &str)]) {
    for (sql, expected) in calls {
        assert_eq!(state(client.batch_execute(sql).await), *expected, "{sql}");
    }
}
