//! The process that ends the command's group when `fencepost run` cannot.
//!
//! `fencepost` may be killed by a signal that it cannot handle, or be stopped, or
//! get no time to run, and what the command has started would go on after the
//! lease. So a second process of this program waits at the end of a pipe. It is
//! told the group, again and again until when the lease may be trusted, and at
//! last that the command has ended. When the pipe ends without that, or the time
//! is over, it kills the group.
//!
//! It is in a process group of its own, so that the keys of a terminal and a KILL
//! of the command's group do not reach it, and it takes no notice of signals, which
//! service managers send to all that they find. Whoever kills both at once, as the
//! end of a container does, has to kill the command as well.

use std::{
    fmt,
    io::{self, BufRead as _, Write as _},
    os::unix::process::CommandExt as _,
    process::{ChildStdin, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};

use super::job::this_program;
use crate::{clock::Moment, exit::Exit};

/// Timers may stand still while the machine sleeps.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Our end of the pipe. Dropped without [`done`](Self::done), it has the group
/// killed.
pub(super) struct Guardian {
    pipe: ChildStdin,
}

/// What is said on the pipe, a line each.
enum Word {
    Group(i32),
    Until(Moment),
    Done,
}

impl Guardian {
    pub(super) fn start() -> io::Result<Self> {
        let child = Command::new(this_program()?)
            .arg0("fencepost")
            .arg("guardian")
            .stdin(Stdio::piped())
            // Nobody should wait for the end of these.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = child.stdin.ok_or(io::ErrorKind::BrokenPipe)?;
        // A guardian that does not read holds up nobody.
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        Ok(Self { pipe })
    }

    pub(super) fn watch(&mut self, group: Pid) {
        self.say(&Word::Group(group.as_raw_nonzero().get()));
    }

    /// The lease may be trusted until then.
    pub(super) fn trust(&mut self, until: Moment) {
        self.say(&Word::Until(until));
    }

    pub(super) fn done(mut self) {
        self.say(&Word::Done);
    }

    fn say(&mut self, word: &Word) {
        // It was killed, or is far behind: then there is one belt less.
        let _: io::Result<()> = self.pipe.write_all(word.to_string().as_bytes());
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group(group) => writeln!(f, "group {group}"),
            Self::Until(time) => writeln!(f, "until {}", time.0),
            Self::Done => writeln!(f, "done"),
        }
    }
}

impl Word {
    fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            Some(("group", group)) => group.parse().ok().map(Self::Group),
            Some(("until", time)) => time.parse().ok().map(|time| Self::Until(Moment(time))),
            Some(_) => None,
            None => (line == "done").then_some(Self::Done),
        }
    }
}

/// The other end: the hidden subcommand.
pub(crate) fn run() -> Exit {
    // For all threads to come. The end of the pipe is what ends this process.
    let _: nix::Result<()> = SigSet::all().thread_block();
    let (says, words) = mpsc::channel();
    let _reader = thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if says.send(Word::parse(&line)).is_err() {
                break;
            }
        }
    });
    let mut group = None;
    let mut until = Moment::NEVER;
    loop {
        match words.recv_timeout(until.remaining().min(LONGEST_WAIT)) {
            Ok(Some(Word::Group(number))) => group = Pid::from_raw(number),
            Ok(Some(Word::Until(time))) => until = time,
            Ok(Some(Word::Done)) => return Exit::Done,
            Ok(None) => {}
            Err(RecvTimeoutError::Timeout) if Moment::now() < until => {}
            Err(RecvTimeoutError::Timeout) => {
                kill(group);
                // It may have been between two forks.
                thread::sleep(LONGEST_WAIT / 25);
            }
            Err(RecvTimeoutError::Disconnected) => {
                kill(group);
                return Exit::Done;
            }
        }
    }
}

fn kill(group: Option<Pid>) {
    if let Some(group) = group {
        // Nobody there is as well.
        let _: Result<(), Errno> = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_across() {
        for word in [Word::Group(7), Word::Until(Moment::NEVER), Word::Done] {
            let said = word.to_string();
            let heard = Word::parse(said.trim_end()).map(|word| word.to_string());
            assert_eq!(heard, Some(said));
        }
        assert!(Word::parse("").is_none());
        assert!(Word::parse("until soon").is_none());
    }
}
