//! A watchdog for what must not outlive the test process.
//!
//! `Drop` does not run when a test process is killed, and never runs for a
//! static. A leash is a tiny shell that waits for the end of its standard
//! input: when the test process is gone, however it went, the pipe closes and
//! the shell ends the process and removes its files.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};

/// `$1` is the process, `$2` the group or process to signal, `$3` the signal.
/// A line on standard input means that all is done already.
const END_PROCESS: &str = r#"
trap '' HUP INT TERM QUIT
read -r _ && exit 0
children=$(cat "/proc/$1/task/"*/children 2>/dev/null)
kill -s CONT -- "$2" $children
kill -s "$3" -- "$2"
left=50
while kill -s 0 -- "$1" && [ "$left" -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
kill -s KILL -- "$2" $children
"#;

/// `$1` is a directory. Whoever still writes there is about to be ended.
const REMOVE: &str = r#"
trap '' HUP INT TERM QUIT
read -r _ && exit 0
left=100
while [ -e "$1" ] && [ "$left" -gt 0 ]; do rm -rf -- "$1"; sleep 0.1; left=$((left - 1)); done
"#;

/// `$1` is a directory. Whoever works there is asked to quit, which Postgres takes
/// for an immediate shutdown, and killed when that is not enough.
const END_THERE: &str = r#"
trap '' HUP INT TERM QUIT
read -r _ && exit 0
left=100 signal=QUIT
while [ "$left" -gt 0 ]; do
    there=
    for link in /proc/[0-9]*/cwd; do
        case $(readlink "$link" 2>/dev/null) in
        "$1" | "$1"/* | "$1 (deleted)")
            pid=${link#/proc/}
            there="$there ${pid%/cwd}" ;;
        esac
    done
    [ -n "$there" ] || exit 0
    [ "$left" -gt 50 ] || signal=KILL
    kill -s "$signal" $there
    left=$((left - 1))
    sleep 0.1
done
"#;

/// Ends a process, or removes a directory, when this process dies.
#[derive(Debug)]
pub struct Leash {
    shell: Child,
}

/// Whom a leash signals, and how.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// The whole process group at once.
    KillGroup,
    /// The process alone, which ends its children itself, by `SIGQUIT`: what
    /// Postgres takes for an immediate shutdown.
    QuitProcess,
}

impl Leash {
    /// Ties process `pid` to the life of this process.
    pub fn of_process(pid: u32, end: End) -> Self {
        let (target, signal) = match end {
            End::KillGroup => (format!("-{pid}"), "KILL"),
            End::QuitProcess => (pid.to_string(), "QUIT"),
        };
        Self::new(
            END_PROCESS,
            &[
                pid.to_string().as_ref(),
                target.as_ref(),
                OsStr::new(signal),
            ],
        )
    }

    /// Ties a directory to the life of this process.
    pub fn of_directory(path: &Path) -> Self {
        Self::new(REMOVE, &[path.as_os_str()])
    }

    /// Ties all processes that work in a directory to the life of this process, or
    /// of the [`Sweep`]: also those whose parent let go of them, and that are
    /// nobody's child here.
    pub fn of_those_in(path: &Path) -> Sweep {
        Sweep(Self::new(END_THERE, &[path.as_os_str()]))
    }

    fn new(script: &str, arguments: &[&OsStr]) -> Self {
        let shell = Command::new("/bin/sh")
            .args(["-c", script, "leash"])
            .args(arguments)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("a shell at /bin/sh");
        Self { shell }
    }

    /// Does what the death of this process would: closes the pipe without a
    /// word, so that the shell does its work.
    pub fn abandon(&mut self) {
        drop(self.shell.stdin.take());
    }
}

/// Ends all processes that work in a directory when it is dropped.
#[derive(Debug)]
pub struct Sweep(Leash);

impl Drop for Sweep {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Drop for Leash {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.shell.stdin.take() {
            // A shell that has gone has nothing left to do.
            let _ = stdin.write_all(b"done\n");
        }
        let _ = self.shell.wait();
    }
}
