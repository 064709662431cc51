//! Finds the programs of the newest Postgres on this machine.

use std::{env, fs, path::PathBuf, process::Command};

use crate::system;

/// A program of Postgres, to be run as an account that is not root.
pub fn program(name: &str) -> Command {
    let mut command = Command::new(find(name));
    system::drop_root(&mut command)
        .env("LC_ALL", "C")
        .current_dir("/");
    for variable in [
        "PGHOST",
        "PGPORT",
        "PGUSER",
        "PGDATABASE",
        "PGOPTIONS",
        "PGDATA",
    ] {
        command.env_remove(variable);
    }
    command
}

/// Debian keeps the server's programs outside the path, one directory a
/// version; others have them on the path.
fn find(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let newest = versions
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version: u32 = path.file_name()?.to_str()?.parse().ok()?;
            let program = path.join("bin").join(name);
            program.exists().then_some((version, program))
        })
        .max();
    let on_path = || {
        env::split_paths(&env::var_os("PATH")?)
            .map(|directory| directory.join(name))
            .find(|program| program.exists())
    };
    newest
        .map(|(_, program)| program)
        .or_else(on_path)
        .unwrap_or_else(|| {
            panic!("no {name} in /usr/lib/postgresql/*/bin or on the path: install PostgreSQL")
        })
}
