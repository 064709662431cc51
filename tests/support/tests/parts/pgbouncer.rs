//! The pooler pools by transaction, and moves with its clients kept.

use fencepost_support::{
    pgbouncer::PgBouncer,
    postgres::{Client, Postgres, fresh_database},
    wait::eventually,
};

#[tokio::test]
async fn many_clients_share_few_sessions() {
    let database = fresh_database().await;
    let pooler = PgBouncer::start(database.postgres().address(), 1).await;
    let url = pooler.url_of(database.name());
    let one = Client::connect(&url).await.unwrap();
    let other = Client::connect(&url).await.unwrap();
    let pid = "SELECT pg_backend_pid()::text";
    assert_eq!(simple(&one, pid).await, simple(&other, pid).await);
    // What one sets, the other finds: this is what the server must not do.
    one.simple_query("SET statement_timeout = 1234")
        .await
        .unwrap();
    assert_eq!(simple(&other, "SHOW statement_timeout").await, "1234ms");
}

#[tokio::test]
async fn it_restarts_and_serves() {
    let database = fresh_database().await;
    let mut pooler = PgBouncer::start(database.postgres().address(), 2).await;
    let url = pooler.url_of(database.name());
    let client = Client::connect(&url).await.unwrap();
    assert_eq!(simple(&client, "SELECT 1").await, "1");
    pooler.restart().await;
    assert!(client.simple_query("SELECT 1").await.is_err());
    let client = Client::connect(&url).await.unwrap();
    assert_eq!(simple(&client, "SELECT 1").await, "1");
}

#[tokio::test]
async fn it_moves_to_another_server_with_its_clients() {
    let (old, new) = tokio::join!(Postgres::start(), Postgres::start());
    let mut pooler = PgBouncer::start(old.address(), 1).await;
    let client = Client::connect(&pooler.url_of("postgres")).await.unwrap();
    let port = "SELECT current_setting('port')";
    assert_eq!(
        simple(&client, port).await,
        old.address().port().to_string()
    );
    pooler.retarget(new.address()).await;
    eventually("the client is served by the new server", async || {
        let now = simple(&client, port).await;
        (now == new.address().port().to_string()).then_some(())
    })
    .await;
}

async fn simple(client: &Client, query: &str) -> String {
    let messages = client.simple_query(query).await.unwrap();
    messages
        .iter()
        .find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0)?.to_owned()),
            _ => None,
        })
        .expect("a row")
}
