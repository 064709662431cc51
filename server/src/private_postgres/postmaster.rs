//! Is a Postgres running on this cluster, and is it ready? Read from
//! `postmaster.pid`, which Postgres keeps for that purpose.

use std::{fs, io, path::Path, path::PathBuf};

use rustix::{
    io::Errno,
    process::{Pid, test_kill_process},
};

use super::{PrivatePostgresError, error::io_error};

/// A postmaster that is alive.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Postmaster {
    /// Where it listens.
    pub(super) socket_dir: PathBuf,
    /// Whether it accepts connections; if not, it is starting, recovering or
    /// stopping.
    pub(super) ready: bool,
}

/// The postmaster of this cluster, if one is alive.
///
/// A file whose process is alive but is not Postgres was left by a crash, and
/// the number went to somebody else: in a container the same few numbers come
/// back at every start. Postgres would refuse to start because of it, so it is
/// removed. That is safe: should Postgres processes be alive after all, the
/// next start refuses by the cluster's shared memory (version 12 on).
pub(super) fn find(cluster: &Path) -> Result<Option<Postmaster>, PrivatePostgresError> {
    let path = cluster.join("postmaster.pid");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("read", &path)(error)),
    };
    // What Postgres has not finished writing, or cannot be read, is left for
    // Postgres to judge.
    let Some((pid, postmaster)) = parse(&text) else {
        return Ok(None);
    };
    match test_kill_process(pid) {
        // Alive, or alive and another user's.
        Ok(()) | Err(Errno::PERM) => {}
        Err(_) => return Ok(None),
    }
    if is_something_else(pid) {
        tracing::warn!(path = %path.display(), pid = %pid, "removing a stale PID file");
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
        return Ok(None);
    }
    Ok(Some(postmaster))
}

/// Lines: PID, data directory, start time, port, socket directory, TCP
/// address, shared memory, status.
pub(super) fn parse(text: &str) -> Option<(Pid, Postmaster)> {
    let mut lines = text.lines();
    let pid = Pid::from_raw(lines.next()?.trim().parse().ok().filter(|pid| *pid > 0)?)?;
    let socket_dir = lines.nth(3)?.into();
    let ready = lines.nth(2).is_some_and(|status| status.trim() == "ready");
    Some((pid, Postmaster { socket_dir, ready }))
}

/// Whether the process certainly is no Postgres. Where there is no `/proc`
/// nothing is certain.
fn is_something_else(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .is_ok_and(|name| !matches!(name.trim(), "postgres" | "postmaster"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn pid_files() {
        let text = "42\n/d/postgres\n1795962984\n5432\n/d/run\n\n 10043927        10\nready   \n";
        let (pid, postmaster) = parse(text).unwrap();
        assert_eq!(pid.as_raw_nonzero().get(), 42);
        assert_eq!(postmaster.socket_dir, Path::new("/d/run"));
        assert!(postmaster.ready);
        let starting = text.replace("ready   ", "starting");
        assert!(!parse(&starting).unwrap().1.ready);
        // A single-user backend, and a file that is not written to its end.
        assert_eq!(parse(&text.replacen("42", "-42", 1)), None);
        assert_eq!(parse("42\n/d"), None);
        assert_eq!(parse(""), None);
    }
}
