//! A child process with its log: signals, exit, and lines as they come.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::process::{Signal, kill_process_group};
use tokio::sync::watch;

use crate::{
    leash::{End, Leash},
    system,
    wait::PATIENCE,
};

/// A running child in a process group of its own. Dropping it kills the group.
///
/// It belongs to no runtime: what one test started, another can use.
#[derive(Debug)]
pub struct Process {
    name: &'static str,
    pid: u32,
    exit: watch::Receiver<Option<ExitStatus>>,
    log: Log,
    waiter: Option<JoinHandle<()>>,
    end: End,
    leash: Option<Leash>,
}

/// The lines that a process wrote to its standard error.
#[derive(Clone, Debug)]
pub struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    count: watch::Receiver<usize>,
}

impl Log {
    /// All lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until `find` finds something in the lines, old or new. `None`
    /// when the writer has ended without it.
    pub async fn wait_for<T>(&self, mut find: impl FnMut(&str) -> Option<T>) -> Option<T> {
        let mut count = self.count.clone();
        let mut seen = 0;
        loop {
            let lines = self.lines();
            if let Some(found) = lines[seen..].iter().find_map(|line| find(line)) {
                return Some(found);
            }
            seen = lines.len();
            let more = count.wait_for(|count| *count > seen).await;
            if more.is_err() && self.lines().len() == seen {
                return None;
            }
        }
    }
}

impl Process {
    /// Starts `command`, reads its standard error, and ties it to the life of
    /// this process.
    pub fn start(name: &'static str, command: &mut Command, end: End) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let pid = child.id();
        let leash = Leash::of_process(pid, end);

        let stderr = child.stderr.take().expect("stderr is a pipe");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (counter, count) = watch::channel(0);
        let kept = Arc::clone(&lines);
        thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.push(line);
                counter.send_replace(kept.len());
            }
        });

        let (exited, exit) = watch::channel(None);
        let waiter = thread::spawn(move || {
            let status = child.wait().expect("a child can be waited for");
            exited.send_replace(Some(status));
        });
        Self {
            name,
            pid,
            exit,
            log: Log { lines, count },
            waiter: Some(waiter),
            end,
            leash: Some(leash),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it wrote to its standard error.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// How it ended, when it has.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        *self.exit.borrow()
    }

    /// Sends a signal to the process alone, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        if self.exit_status().is_none() {
            system::signal(self.pid, signal);
        }
    }

    /// Waits for its end, at most [`PATIENCE`] long.
    pub async fn wait_exit(&self) -> ExitStatus {
        self.wait_exit_within(PATIENCE).await
    }

    /// Waits for its end; panics with its log when that takes longer than
    /// `patience`.
    pub async fn wait_exit_within(&self, patience: Duration) -> ExitStatus {
        let mut exit = self.exit.clone();
        match tokio::time::timeout(patience, exit.wait_for(Option::is_some)).await {
            Ok(Ok(status)) => status.expect("waited until it is there"),
            _ => panic!(
                "{} did not end within {patience:?}\n{}",
                self.name,
                self.tail()
            ),
        }
    }

    /// The last lines of its log, for a panic message.
    pub fn tail(&self) -> String {
        let lines = self.log.lines();
        let from = lines.len().saturating_sub(40);
        format!("--- log of {} ---\n{}", self.name, lines[from..].join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit_status().is_none() {
            let group = system::as_pid(self.pid);
            match self.end {
                End::KillGroup => {
                    let _ = kill_process_group(group, Signal::KILL);
                }
                End::QuitProcess => {
                    for child in system::children_of(self.pid) {
                        system::signal(child, Signal::CONT);
                    }
                    system::signal(self.pid, Signal::CONT);
                    system::signal(self.pid, Signal::QUIT);
                }
            }
        }
        if let Some(waiter) = self.waiter.take() {
            let _ = waiter.join();
        }
        drop(self.leash.take());
        if thread::panicking() {
            show(&self.tail());
        }
    }
}

/// Shows the log of a failed test where the test runner collects it.
#[expect(clippy::print_stderr, reason = "a test's output is for its reader")]
fn show(text: &str) {
    eprintln!("{text}");
}
