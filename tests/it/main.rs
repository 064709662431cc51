//! The contract, tested on real servers over a real Postgres.
//!
//! Every test takes names of its own, so that all can share a server; those
//! that break something start their own.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod abuse;
mod audit;
mod bodies;
mod cancel;
mod clocks;
mod contract_acquire;
mod contract_get;
mod contract_release;
mod contract_renew;
mod costs;
mod drain;
mod errors;
mod exclusion;
mod fence_admit;
mod fence_cli;
mod fence_guard;
mod fence_guard_writes;
mod fence_kit;
mod fence_model;
mod fence_objects;
mod fence_privileges;
mod fence_property;
mod fence_recipes;
mod fence_world;
mod fence_zombies;
mod flood;
mod guard;
mod health;
mod holders;
mod keep_alive;
mod keep_alive_holders;
mod keep_alive_many;
mod keep_alive_outage;
mod leaps;
mod limits;
mod limits_ttl;
mod metrics;
mod migrate;
mod names;
mod object_stub;
mod outage;
mod outages;
mod overload;
mod pgbouncer;
mod plans;
mod private;
mod programs;
mod refusals;
mod replicas;
mod rolling;
mod rounds;
mod row_locks;
mod run;
mod secrets;
mod settings;
mod sidecar;
mod stalled;
mod start;
mod tls;
mod tokens;
mod tokens_advance;
mod tokens_belts;
mod tokens_copies;
mod tokens_crash;
mod tokens_failover;
mod tokens_purge;
mod tokens_race;
mod tokens_restore;
mod traces;
mod usage;
mod world;
