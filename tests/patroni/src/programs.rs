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

/// Whether this Patroni is from before 3.0.3: with etcd's v3 API, a leader that was
/// away for longer than its lease may write its name over that of the next.
pub(crate) fn overwrites_leader() -> bool {
    let version = program("patroni")
        .arg("--version")
        .current_dir("/")
        .output();
    let version = version.unwrap_or_else(|error| panic!("cannot run patroni: {error}"));
    is_before_3_0_3(&String::from_utf8_lossy(&version.stdout))
}

fn is_before_3_0_3(version: &str) -> bool {
    let number = version.split_whitespace().last().unwrap_or_default();
    let numbers: Vec<u32> = number.split('.').map_while(|n| n.parse().ok()).collect();
    !numbers.is_empty() && numbers < vec![3, 0, 3]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(is_before_3_0_3("patroni 3.0.2\n"));
        assert!(is_before_3_0_3("patroni 2.1.10\n"));
        for later in [
            "patroni 3.0.3\n",
            "patroni 3.0.10\n",
            "patroni 4.1.0\n",
            "nonsense",
        ] {
            assert!(!is_before_3_0_3(later), "{later}");
        }
    }
}
