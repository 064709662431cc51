//! One cluster for all tests of a process, with a database for each.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

use super::{client::Client, cluster::Postgres};

static SHARED: OnceCell<Postgres> = OnceCell::const_new();
static NEXT: AtomicU32 = AtomicU32::new(0);

/// An empty database in the cluster that the tests of a process share.
#[derive(Debug)]
pub struct Database {
    name: String,
    postgres: &'static Postgres,
}

/// Makes an empty database in the shared cluster, which starts with the first
/// and goes with the test process.
///
/// A test that changes settings, stops or breaks the cluster starts its own.
pub async fn fresh_database() -> Database {
    let postgres = SHARED.get_or_init(Postgres::start).await;
    let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
    postgres.create_database(&name).await;
    Database { name, postgres }
}

impl Database {
    /// Its URL.
    pub fn url(&self) -> String {
        self.postgres.url_of(&self.name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The cluster that it is in, to look at, not to break.
    pub fn postgres(&self) -> &'static Postgres {
        self.postgres
    }

    /// A connection of the superuser to it.
    pub async fn client(&self) -> Client {
        Client::connect(&self.url())
            .await
            .expect("the shared cluster answers")
    }
}
