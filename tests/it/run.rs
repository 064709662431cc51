//! `fencepost run`: a command that runs while a lock is held, on real
//! processes.
//!
//! Whatever happens to the network, the lock, `fencepost` or the machine's
//! patience: nothing of the command runs when the next holder starts, and the
//! lock is not blocked for longer than that needs.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod codes;
mod environment;
pub(crate) mod first_process;
mod killed;
mod lost;
mod never_two;
mod renewals;
mod signals;
pub(crate) mod stage;
mod stopping;
mod streams;
mod terminal;
mod waiting;
