//! What is broken: three replicas, each behind a proxy of its own and before one,
//! and a Postgres with what belongs to it.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Mutex as Cell, PoisonError},
    time::Duration,
};

use fencepost_support::{
    Postgres, Server,
    clock::{self, Clock},
    pgbouncer::PgBouncer,
    postgres::{Client, Replication},
    proxy::Proxy,
    system::find_program,
};
use rand::{Rng as _, rngs::StdRng};
use serde::Serialize;
use tokio::sync::{Mutex, MutexGuard};

use crate::disk::Disk;

/// The name that a synchronous standby has at its primary.
pub(crate) const STANDBY: &str = "standby";

/// What stands behind the replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Setup {
    /// A Postgres, whose disk can be full.
    Plain,
    /// A Postgres behind PgBouncer in transaction mode.
    Pooler,
    /// A Postgres with asynchronous standbys.
    Asynchronous,
    /// A Postgres that waits for its standby.
    Synchronous,
    /// A Postgres and replicas whose wall clocks can be set.
    Clocks,
}

impl Setup {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Plain,
        Self::Pooler,
        Self::Asynchronous,
        Self::Synchronous,
        Self::Clocks,
    ];

    /// What this machine lacks for its own faults. Without it those are not run, and
    /// the rest is run in the other setups.
    pub(crate) fn missing(self) -> Option<&'static str> {
        let (there, what) = match self {
            Self::Plain => (find_program("cc").is_some(), "no C compiler"),
            Self::Pooler => (find_program("pgbouncer").is_some(), "no pgbouncer"),
            Self::Clocks => (clock::library().is_some(), "no faketime"),
            Self::Asynchronous | Self::Synchronous => return None,
        };
        (!there).then_some(what)
    }
}

/// A server, what clients reach it through, and what it reaches the database through.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) server: Mutex<Server>,
    pub(crate) front: Proxy,
    pub(crate) back: Proxy,
    pub(crate) clock: Option<Clock>,
    pub(crate) pool_size: usize,
}

impl Replica {
    async fn start(
        target: SocketAddr,
        pooler: bool,
        pool_size: usize,
        clock: Option<Clock>,
        older: Option<&Path>,
    ) -> Self {
        let back = Proxy::start(target).await;
        let mut builder = Server::builder(&Postgres::url_via(back.address(), "postgres"))
            .flag("--drain-delay", "0s")
            .flag("--drain-timeout", "5s")
            .flag("--database-pool-size", &pool_size.to_string());
        if let Some(older) = older {
            // Its arguments begin with the binary of this version, as `$0`.
            let instead = format!("exec '{}' \"$@\"", older.display());
            builder = builder.wrapper(&["/bin/sh", "-c", &instead]);
        }
        if pooler {
            builder = builder.switch("--pgbouncer");
        }
        for (name, value) in clock.iter().flat_map(Clock::environment) {
            builder = builder.env(name, &value);
        }
        let server = builder.ready().await;
        Self {
            front: Proxy::start(server.grpc()).await,
            server: Mutex::new(server),
            back,
            clock,
            pool_size,
        }
    }
}

/// All of it. What a fault breaks it locks meanwhile.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) pooler: Option<Mutex<PgBouncer>>,
    pub(crate) standby: Option<Mutex<Postgres>>,
    pub(crate) clock: Option<Clock>,
    pub(crate) disk: Option<Disk>,
    primary: Mutex<Postgres>,
    /// Where the primary is, also while it is locked.
    address: Cell<SocketAddr>,
    register: Postgres,
}

impl World {
    /// `older` is a binary of an older version, for one of the replicas.
    pub(crate) async fn start(setup: Setup, rng: &mut StdRng, older: Option<&Path>) -> Self {
        let disk = match setup {
            Setup::Plain => Disk::roomy(),
            _ => None,
        };
        let clock = || match setup {
            Setup::Clocks => Clock::try_right(),
            _ => None,
        };
        let its_clock = clock();
        let mut builder = Postgres::builder()
            // It is soon back, and soon needs a new file for its log.
            .setting("checkpoint_timeout", "30s")
            .setting("min_wal_size", "32MB");
        let environment = (its_clock.iter().flat_map(Clock::environment))
            .chain(disk.iter().flat_map(Disk::environment));
        for (name, value) in environment {
            builder = builder.env(name, &value);
        }
        let (primary, register) = tokio::join!(builder.start(), Postgres::start());
        let standby = match setup {
            Setup::Synchronous => {
                let standby = primary.standby(STANDBY, Replication::Synchronous).await;
                Some(Mutex::new(standby))
            }
            _ => None,
        };
        let pooler = match setup {
            Setup::Pooler => {
                let pooler = PgBouncer::start(primary.address(), 20).await;
                Some(Mutex::new(pooler))
            }
            _ => None,
        };
        let target = match &pooler {
            Some(pooler) => pooler.lock().await.address(),
            None => primary.address(),
        };
        let mut start = |size: &[usize], older| {
            let size = size[rng.random_range(0..size.len())];
            let (clock, pooler) = (clock(), pooler.is_some());
            Replica::start(target, pooler, size, clock, older)
        };
        // One pool at least is small. The older version makes its own schema first.
        let (a, b, c) = (start(&[2], None), start(&[3, 8], older), start(&[16], None));
        let b = b.await;
        let (a, c) = tokio::join!(a, c);
        Self {
            setup,
            replicas: vec![a, b, c],
            pooler,
            standby,
            clock: its_clock,
            disk,
            address: Cell::new(primary.address()),
            primary: Mutex::new(primary),
            register,
        }
    }

    /// The URLs that clients know.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        let url = |replica: &Replica| format!("http://{}", replica.front.address());
        self.replicas.iter().map(url).collect()
    }

    /// The database of the register, which nobody breaks.
    pub(crate) fn register(&self) -> String {
        self.register.url()
    }

    /// The database of the locks, past all that stands before it.
    pub(crate) fn url_of(&self, database: &str) -> String {
        Postgres::url_via(self.address(), database)
    }

    /// A session there, when it can be had now.
    pub(crate) async fn session(&self, database: &str) -> Option<Client> {
        let url = self.url_of(database);
        let connected = tokio::time::timeout(Duration::from_secs(1), Client::connect(&url)).await;
        connected.ok()?.ok()
    }

    pub(crate) async fn primary(&self) -> MutexGuard<'_, Postgres> {
        self.primary.lock().await
    }

    /// Puts a promoted standby in the place of the primary, which is dead.
    pub(crate) async fn switch_to(&self, primary: &mut Postgres, promoted: Postgres) {
        let address = promoted.address();
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
        for replica in &self.replicas {
            replica.back.retarget(address);
            replica.back.cut().await;
        }
        *primary = promoted;
    }

    fn address(&self) -> SocketAddr {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
