//! Finds the programs of Postgres: of the version that is being tested, or
//! else of the newest on this machine.

use std::{env, fs, path::PathBuf, process::Command};

use crate::system;

/// Names the directory of the programs, to test another version. Nothing is
/// then looked for elsewhere: a mixture of versions would prove nothing.
const DIRECTORY: &str = "FENCEPOST_TEST_POSTGRES";

/// A program of Postgres, to be run as an account that is not root.
pub fn program(name: &str) -> Command {
    let found = find(name).unwrap_or_else(|| {
        panic!("no {name} in /usr/lib/postgresql/*/bin or on the path: install PostgreSQL")
    });
    let mut command = Command::new(found);
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
pub fn find(name: &str) -> Option<PathBuf> {
    if let Some(directory) = env::var_os(DIRECTORY).filter(|directory| !directory.is_empty()) {
        let program = PathBuf::from(directory).join(name);
        assert!(
            program.is_absolute() && program.is_file(),
            "{DIRECTORY}: no {}",
            program.display()
        );
        return Some(program);
    }
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let newest = versions
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version: u32 = path.file_name()?.to_str()?.parse().ok()?;
            let program = path.join("bin").join(name);
            program.exists().then_some((version, program))
        })
        .max();
    newest
        .map(|(_, program)| program)
        .or_else(|| system::find_program(name))
}
