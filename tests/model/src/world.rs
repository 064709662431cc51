//! What a run of its own starts: databases, replicas behind a proxy to the one that
//! serves, and what can be done to them.

use std::{ops::Range, time::Duration};

use fencepost_support::{
    Postgres, Server,
    postgres::{Client, Replication},
    proxy::Proxy,
    row_lock::RowLock,
};
use futures_util::future::join_all;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    history::{History, What},
    load::{Error, Load, Options},
};

/// What happens while the clients work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Nothing.
    Plain,
    /// No Acquire is dropped under way, and few want the same: every acquisition is
    /// known of, and seldom followed by another at once.
    Known,
    /// Owners often ask several times at once for what they have.
    Crowds,
    /// Most Acquires are dropped under way and tried again elsewhere, while somebody
    /// else locks rows for a moment.
    Drops,
    /// Somebody else locks rows, beyond the end of their leases, and many are renewed
    /// just before it. That is no fault: every invariant holds, and at once.
    RowLocks,
    /// A failover to an asynchronous standby that lost the last seconds; the
    /// replicas are killed and come back.
    Failover,
    /// Two of them, to two standbys that lost the same and never met.
    TwoFailovers,
}

/// Three replicas on one database, and the register's database.
#[derive(Debug)]
pub struct World {
    servers: Vec<Server>,
    proxy: Proxy,
    primary: Postgres,
    register: Postgres,
}

impl World {
    /// Starts all of it.
    pub async fn start() -> Self {
        let (primary, register) = tokio::join!(quick_to_recover(), Postgres::start());
        let proxy = Proxy::start(primary.address()).await;
        let url = Postgres::url_via(proxy.address(), "postgres");
        let start = || Server::start(&url);
        let (a, b, c) = tokio::join!(start(), start(), start());
        Self {
            servers: vec![a, b, c],
            proxy,
            primary,
            register,
        }
    }

    /// A session in the database of the locks.
    pub async fn admin(&self) -> Client {
        self.primary.admin().await
    }

    /// Lets clients work for about this long while the scenario goes on.
    ///
    /// # Errors
    ///
    /// When the load does not start or its register cannot be read.
    pub async fn run(
        &mut self,
        mut options: Options,
        scenario: Scenario,
        time: Duration,
    ) -> Result<History, Error> {
        options.endpoints = self.servers.iter().map(Server::url).collect();
        options.register = Some(self.register.url());
        let load = match scenario {
            Scenario::Plain | Scenario::Known | Scenario::Crowds => {
                match scenario {
                    Scenario::Known => (options.drops, options.resources) = (0, 24),
                    Scenario::Crowds => options.crowds = 30,
                    _ => {}
                }
                let load = Load::start(options).await?;
                tokio::time::sleep(time).await;
                load
            }
            Scenario::Drops => {
                options.drops = 60;
                options.resources = 8;
                self.with_row_locks(options, 20..80, time).await?
            }
            Scenario::RowLocks => {
                options.brink = 20;
                self.with_row_locks(options, 300..1500, time).await?
            }
            Scenario::Failover => self.failovers(options, 1, time).await?,
            Scenario::TwoFailovers => self.failovers(options, 2, time).await?,
        };
        load.stop().await
    }

    /// Locks the row of each resource now and then, for so many milliseconds.
    async fn with_row_locks(
        &self,
        options: Options,
        hold: Range<u64>,
        time: Duration,
    ) -> Result<Load, Error> {
        let seeds = options.seed..;
        let load = Load::start(options).await?;
        let url = self.primary.url();
        let locking =
            load.names().iter().zip(seeds).map(|(name, seed)| {
                lock_row(&url, name, hold.clone(), StdRng::seed_from_u64(seed))
            });
        // It has no end of its own.
        let _ = tokio::time::timeout(time, join_all(locking)).await;
        Ok(load)
    }

    /// Cuts standbys off, and promotes them one after the other.
    async fn failovers(
        &mut self,
        options: Options,
        count: usize,
        time: Duration,
    ) -> Result<Load, Error> {
        let mut standbys = Vec::new();
        for n in 0..count {
            let name = format!("standby{n}");
            standbys.push(self.primary.standby(&name, Replication::Asynchronous).await);
        }
        let load = Load::start(options).await?;
        let share = time / u32::try_from(count + 2).unwrap_or(u32::MAX);
        tokio::time::sleep(share).await;
        let from = load.now();
        for standby in &standbys {
            standby.cut_off().await;
        }
        for standby in standbys {
            tokio::time::sleep(share).await;
            // They remember the highest token that they saw, which would help.
            for server in &self.servers {
                server.kill9().await;
            }
            self.primary.kill9().await;
            standby.promote().await;
            self.proxy.retarget(standby.address());
            self.proxy.cut().await;
            self.primary = standby;
            for server in &mut self.servers {
                server.restart().await;
            }
            load.event(from, What::LeasesForgotten);
        }
        tokio::time::sleep(share).await;
        Ok(load)
    }
}

/// Locks the row of a resource for a while, again and again.
async fn lock_row(url: &str, name: &str, hold: Range<u64>, mut rng: StdRng) {
    let observer = Client::connect(url).await.expect("the database answers");
    loop {
        let there = "SELECT FROM fencepost.locks WHERE resource = $1";
        if observer
            .query(there, &[&name])
            .await
            .is_ok_and(|rows| rows.len() == 1)
        {
            let lock = RowLock::hold(url, name).await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(hold.clone()))).await;
            lock.rollback().await;
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..hold.start))).await;
    }
}

async fn quick_to_recover() -> Postgres {
    let builder = Postgres::builder().setting("checkpoint_timeout", "30s");
    builder.start().await
}
