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
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    process::{ChildStdin, Command, Stdio},
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
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
    pid: Pid,
    pipe: ChildStdin,
}

/// What is said on the pipe, a line each.
enum Word {
    Group(i32),
    Until(Moment),
    Done,
}

impl Guardian {
    /// Of this group from the start, if it is there already.
    pub(super) fn start(group: Option<Pid>) -> io::Result<Self> {
        let group = group.map(|group| group.as_raw_nonzero().to_string());
        let child = Command::new(this_program()?)
            .arg0("fencepost")
            .arg("guardian")
            .args(group)
            .stdin(Stdio::piped())
            // Nobody should wait for the end of these.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
        let pipe = child.stdin.ok_or(io::ErrorKind::BrokenPipe)?;
        // A guardian that does not read holds up nobody.
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        Ok(Self { pid, pipe })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
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

/// What the hidden subcommand takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The group, if it is there already.
    group: Option<i32>,
}

/// The other end: the hidden subcommand.
pub(crate) fn run(args: &Args) -> Exit {
    // The end of the pipe is what ends this process.
    let _: nix::Result<()> = SigSet::all().thread_block();
    let pipe = io::stdin();
    let mut heard = Vec::new();
    let mut group = args.group.and_then(Pid::from_raw);
    let mut until = Moment::NEVER;
    loop {
        // Whatever has been said by now counts: this process may have been stopped
        // for a while, and then knows less than it has been told.
        match wait_for_word(&pipe, until.remaining().min(LONGEST_WAIT)) {
            Ok(true) => {}
            Ok(false) => {
                if Moment::now() >= until {
                    kill(group);
                    // It may have been between two forks.
                    thread::sleep(LONGEST_WAIT / 25);
                }
                continue;
            }
            Err(_) => {
                kill(group);
                return Exit::Bug;
            }
        }
        let mut bytes = [0; 4096];
        match rustix::io::read(&pipe, &mut bytes) {
            Ok(0) | Err(_) => {
                kill(group);
                return Exit::Done;
            }
            Ok(count) => heard.extend_from_slice(&bytes[..count]),
        }
        while let Some(end) = heard.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = heard.drain(..=end).collect();
            match str::from_utf8(&line[..end]).ok().and_then(Word::parse) {
                Some(Word::Group(number)) => group = Pid::from_raw(number),
                Some(Word::Until(time)) => until = time,
                Some(Word::Done) => return Exit::Done,
                None => {}
            }
        }
    }
}

/// Whether there is something to read, or the pipe has ended.
fn wait_for_word(pipe: &io::Stdin, limit: Duration) -> Result<bool, Errno> {
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: limit.min(LONGEST_WAIT).subsec_nanos().into(),
    };
    let mut pipes = [PollFd::new(pipe, PollFlags::IN)];
    match poll(&mut pipes, Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error),
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
