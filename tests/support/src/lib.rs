//! What the tests share: a private Postgres, real servers, proxies that break
//! connections, and a checker for histories of leases.
//!
//! Everything here binds to loopback only, picks free ports, and leaves
//! nothing behind: dropping a value ends its processes and removes its files,
//! and a [`leash`] does the same when the test process itself is killed.
//!
//! Helpers panic with a message when the machine does not do what a test
//! needs; they return an error only where the failure is what a test is about.

pub mod calls;
pub mod clock;
pub mod fence;
pub mod frames;
pub mod haproxy;
pub mod history;
pub mod leash;
pub mod network;
pub mod pgbouncer;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod raw;
pub mod row_lock;
pub mod server;
pub mod system;
pub mod tls;
pub mod wait;
pub mod wire;

pub use calls::{reason, violations};
pub use postgres::Postgres;
pub use server::Server;
pub use wait::eventually;
