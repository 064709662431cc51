//! The agent of one language: a process that does what it is told.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::Duration,
};

use fencepost_support::{
    leash::{End, Leash},
    server, system,
};
use rustix::process::Signal;
use serde_json::Value;
use tokio::{sync::mpsc, time::timeout};

/// The longest that a command takes: a wait of its own, or a hundred holders.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Agent {
    child: Child,
    says: ChildStdin,
    answers: mpsc::Receiver<String>,
    _leash: Leash,
}

impl Agent {
    pub(crate) fn start(language: &str) -> Self {
        let mut command = if language == "rust" {
            Command::new(server::binary().with_file_name("polyglot"))
        } else {
            let mut command = Command::new("/bin/sh");
            command.arg(format!("tests/polyglot/agents/{language}.sh"));
            command
        };
        let mut child = command
            .current_dir(root())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("no agent for {language}: {error}"));
        let leash = Leash::of_process(child.id(), End::KillGroup);
        let says = child.stdin.take().expect("a pipe");
        let stdout = child.stdout.take().expect("a pipe");
        let (sends, answers) = mpsc::channel(1);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if sends.blocking_send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            says,
            answers,
            _leash: leash,
        }
    }

    /// Sends a command, and waits for its answer.
    pub(crate) async fn ask(&mut self, command: &Value) -> Result<Value, String> {
        writeln!(self.says, "{command}").map_err(|error| format!("{command}: {error}"))?;
        let answer = timeout(PATIENCE, self.answers.recv()).await;
        let line = answer
            .map_err(|_elapsed| format!("{command} was not answered in {PATIENCE:?}"))?
            .ok_or_else(|| format!("{command}: the agent has ended"))?;
        serde_json::from_str(&line).map_err(|error| format!("{command}: {line}: {error}"))
    }

    /// To the whole of it: what started it may stay around.
    pub(crate) fn signal(&self, name: &str) -> Result<(), String> {
        let signal = match name {
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            other => return Err(format!("no signal {other}")),
        };
        let group = system::as_pid(self.child.id());
        rustix::process::kill_process_group(group, signal).map_err(|error| error.to_string())
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let group = system::as_pid(self.child.id());
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}
