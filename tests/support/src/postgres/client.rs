//! A connection to Postgres whose driver task ends with it.

use std::ops::Deref;

use tokio::task::JoinHandle;
use tokio_postgres::{Error, NoTls};

/// A `tokio_postgres` client together with the task that drives it.
#[derive(Debug)]
pub struct Client {
    client: tokio_postgres::Client,
    driver: JoinHandle<()>,
}

impl Client {
    /// Connects to `url`.
    ///
    /// # Errors
    ///
    /// When Postgres is away or refuses.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        let driver = tokio::spawn(async move {
            // A broken connection shows at the next statement.
            let _ = connection.await;
        });
        Ok(Self { client, driver })
    }

    /// Runs statements one after the other; panics when one fails.
    pub async fn run(&self, statements: &str) {
        if let Err(error) = self.client.batch_execute(statements).await {
            panic!("{statements}: {error:?}");
        }
    }

    /// The one value of a query's one row; panics when there is none.
    pub async fn value<T>(&self, query: &str) -> T
    where
        T: for<'a> tokio_postgres::types::FromSql<'a>,
    {
        match self.client.query_one(query, &[]).await {
            Ok(row) => row.get(0),
            Err(error) => panic!("{query}: {error:?}"),
        }
    }

    /// The one value of a query's one row; none when there is none.
    pub async fn try_value<T>(&self, query: &str) -> Option<T>
    where
        T: for<'a> tokio_postgres::types::FromSql<'a>,
    {
        self.client
            .query_one(query, &[])
            .await
            .ok()?
            .try_get(0)
            .ok()
    }

    /// The major version of the server, for what is not the same in all.
    pub async fn major_version(&self) -> i32 {
        self.value("SELECT current_setting('server_version_num')::int / 10000")
            .await
    }
}

impl Deref for Client {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &Self::Target {
        &self.client
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
