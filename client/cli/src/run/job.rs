//! The command and its process group.

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::unix::process::CommandExt as _,
    process::{self, Command},
};

use fencepost_client::Guard;
use rustix::{
    io::Errno,
    process::{
        Pid, Signal, WaitOptions, WaitStatus, getppid, getsid, kill_current_process_group,
        kill_process_group, test_kill_process_group, wait,
    },
};
use tokio::signal::unix::{SignalKind, signal};

use super::{guardian::Guardian, terminal::Terminal};
use crate::{clock::Moment, exit::Exit};

/// A command that was started.
pub(super) struct Job {
    /// The command itself, and the group that it leads.
    group: Pid,
    children: tokio::signal::unix::Signal,
    terminal: Terminal,
    guardian: Guardian,
    /// One that cannot live is not started for ever.
    guardians_left: u8,
}

/// What became of the command.
pub(super) enum Change {
    Ended {
        exit: Exit,
        by_signal: bool,
    },
    /// It was stopped from the terminal, most likely.
    Paused,
}

impl Job {
    pub(super) fn start(command: &[OsString], guard: &Guard) -> io::Result<Self> {
        let children = signal(SignalKind::child())?;
        adopt_orphans();
        let mut guardian = Guardian::start(None)?;
        // Not `Child`: we reap whatever comes, and a PID is all that is needed.
        let child = Command::new(this_program()?)
            .arg0("fencepost")
            .args(["exec", &process::id().to_string(), "--"])
            .args(command)
            .env("FENCEPOST_RESOURCE", guard.resource())
            .env("FENCEPOST_OWNER", guard.owner())
            .env("FENCEPOST_TOKEN", guard.fencing_token().to_string())
            .process_group(0)
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let group = pid.ok_or(io::ErrorKind::InvalidData)?;
        guardian.watch(group);
        let mut job = Self {
            group,
            children,
            terminal: Terminal::ours(),
            guardian,
            guardians_left: 100,
        };
        job.hand_over_terminal();
        Ok(job)
    }

    /// To all of the group.
    pub(super) fn signal(&self, signal: Signal) {
        // Nobody there: it has just ended.
        let _: Result<(), Errno> = kill_process_group(self.group, signal);
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Whether nothing of the group is left that could do anything.
    pub(super) fn is_gone(&self) -> bool {
        test_kill_process_group(self.group) == Err(Errno::SRCH)
            || members(self.group).is_some_and(|alive| alive == 0)
    }

    /// Waits until something becomes of the command. Orphans that it leaves are
    /// buried on the way. May be dropped and called again.
    pub(super) async fn changed(&mut self) -> Change {
        loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.group => {
                    if let Some(change) = change(status) {
                        return change;
                    }
                }
                Ok(Some((pid, status))) if pid == self.guardian.pid() && !status.stopped() => {
                    self.replace_guardian();
                }
                Ok(Some(_orphan)) => {}
                // No child has anything to say, or there is none.
                Ok(None) | Err(_) => {
                    self.children.recv().await;
                }
            }
        }
    }

    /// Somebody has killed it, as it may have us next.
    fn replace_guardian(&mut self) {
        if self.guardians_left > 0 {
            self.guardians_left -= 1;
            if let Ok(guardian) = Guardian::start(Some(self.group)) {
                self.guardian = guardian;
            }
        }
    }

    /// Stops ourselves, so that the shell that we were started from goes on; when
    /// it wakes us, the command goes on as well. Not without a terminal: whoever
    /// has stopped the command alone wants it so.
    pub(super) fn pause_with_it(&mut self) {
        if self.terminal.take_back() {
            if somebody_can_continue_us() {
                // Returns when we are continued.
                let _: Result<(), Errno> = kill_current_process_group(Signal::STOP);
            }
            self.hand_over_terminal();
        }
    }

    /// Has the group killed, whatever becomes of us, when the lease can no longer
    /// be trusted. To be said anew while it can, and not once it cannot: the last
    /// word stands.
    pub(super) fn not_beyond(&mut self, guard: &Guard) {
        let asked = Moment::now();
        self.guardian.trust(asked.after(guard.remaining()));
    }

    /// Nothing of it needs looking after any longer.
    pub(super) fn done(mut self) {
        self.terminal.take_back();
        self.guardian.done();
    }

    fn hand_over_terminal(&mut self) {
        if self.terminal.hand_to(self.group) {
            // It may have been stopped for reading from it too early.
            self.signal(Signal::CONT);
        }
    }
}

fn change(status: WaitStatus) -> Option<Change> {
    if status.stopped() {
        return Some(Change::Paused);
    }
    let (exit, by_signal) = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => (Exit::Command(u8::try_from(code).unwrap_or(u8::MAX)), false),
        (None, Some(signal)) => (Exit::by_signal_number(signal), true),
        (None, None) => return None,
    };
    Some(Change::Ended { exit, by_signal })
}

/// How many of the group are alive, where the machine tells: a process that has
/// ended is there until its parent, who may be anybody, looks for it. See
/// proc_pid_stat(5).
fn members(group: Pid) -> Option<usize> {
    let alive = |stat: &str| -> Option<bool> {
        // The name, in parentheses, may contain anything.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        let its_group: i32 = fields.nth(1)?.parse().ok()?;
        Some(its_group == group.as_raw_nonzero().get() && !matches!(state, "Z" | "X"))
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let stats =
        processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    let mut any = false;
    let count = stats
        .filter(|stat| {
            any = true;
            alive(stat).unwrap_or(false)
        })
        .count();
    any.then_some(count)
}

/// Processes of the group whose parent has ended become our children, so that we
/// hear when they end. As the first process of a container we have them anyway.
fn adopt_orphans() {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        // Without it they are looked at now and then.
        let _: Result<(), Errno> =
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    }
}

/// Whether there is a shell that we are a job of: our parent is in our session. Where
/// there is none, the kernel drops the stop of a terminal as well.
fn somebody_can_continue_us() -> bool {
    let session = |pid| getsid(pid).ok();
    getppid().is_some_and(|parent| session(Some(parent)) == session(None))
}

/// This very program, also when its file was replaced since.
pub(super) fn this_program() -> io::Result<OsString> {
    if cfg!(target_os = "linux") {
        Ok("/proc/self/exe".into())
    } else {
        env::current_exe().map(Into::into)
    }
}
