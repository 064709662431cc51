//! The step between `fencepost run` and its command.
//!
//! The command must not go on when `fencepost` is killed by a signal that it
//! cannot handle: nobody would renew its lease. The kernel can see to that for
//! whoever asks for it himself, and the request outlives execve(2). So the child
//! is this program once more, which asks, looks whether its parent is still
//! there, and becomes the command.
//!
//! It holds for the command alone, not for what it has started, and not for
//! set-user-ID programs or those with capabilities of their own, for which the
//! kernel forgets the request (`PR_SET_PDEATHSIG` in prctl(2)). Linux and FreeBSD
//! only; elsewhere the command outlives a killed `fencepost`.

use std::{ffi::OsString, io, os::unix::process::CommandExt as _, process::Command};

use rustix::process::{Pid, Signal, getppid};

use crate::{exit::Exit, output};

/// What the hidden subcommand takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The process that must be there.
    parent: i32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Returns only when the command could not be started.
pub(crate) fn run(args: &Args) -> Exit {
    if let Err(error) = die_with_parent() {
        output::error(&format!("the command would outlive us: {error}"));
        return Exit::Bug;
    }
    if getppid() != Pid::from_raw(args.parent) {
        return Exit::by_signal(Signal::KILL);
    }
    let Some((program, rest)) = args.command.split_first() else {
        return Exit::Usage;
    };
    let error = Command::new(program).args(rest).exec();
    let name = program.to_string_lossy();
    output::error(&format!("cannot run {name}: {error}"));
    if error.kind() == io::ErrorKind::NotFound {
        Exit::NOT_FOUND
    } else {
        Exit::NOT_EXECUTABLE
    }
}

#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(
        Signal::KILL,
    ))?)
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
fn die_with_parent() -> io::Result<()> {
    Ok(())
}
