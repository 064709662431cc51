//! What has to be installed.

use std::{env, process::Command};

use fencepost_support::{postgres, system};

/// Those of the programs that a cluster needs and that are not here.
pub(crate) fn missing() -> Vec<&'static str> {
    let needed = ["patroni", "etcd", "haproxy"];
    let mut missing: Vec<_> = needed
        .into_iter()
        .filter(|name| system::find_program(name).is_none())
        .collect();
    if postgres::find("pg_rewind").is_none() {
        missing.push("PostgreSQL");
    }
    missing
}

/// A program that is there, to be run as an account that is not root.
pub(crate) fn program(name: &str) -> Command {
    let found = system::find_program(name);
    let mut command = Command::new(found.unwrap_or_else(|| name.into()));
    system::drop_root(&mut command);
    for (variable, _) in env::vars_os() {
        let variable = variable.to_string_lossy();
        let ours = ["PATRONI_", "ETCD_", "PG"];
        if ours.iter().any(|prefix| variable.starts_with(prefix)) {
            command.env_remove(variable.as_ref());
        }
    }
    command
}
