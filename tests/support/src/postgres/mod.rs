//! Private Postgres clusters: durable, on loopback and a Unix socket, gone
//! with the test.
//!
//! [`Postgres::start`] gives a cluster of one's own, for tests that stop it,
//! kill it, fill it or change its settings. All others share one cluster per
//! test process, with a [`Database`] each: [`fresh_database`].

mod binaries;
mod client;
mod cluster;
mod copies;
mod shared;
mod standby;

pub use binaries::{find, program};
pub use client::Client;
pub use cluster::{Builder, Postgres, Stop};
pub use shared::{Database, fresh_database};
pub use standby::Replication;
