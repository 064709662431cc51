//! The parts that break things must themselves be beyond doubt.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod leash;
mod pgbouncer;
mod postgres;
mod proxy;
mod row_lock;
mod standby;
