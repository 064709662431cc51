//! The command line against a stub of the server: what is sent, what is
//! printed, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{net::SocketAddr, process::Stdio};

use serde_json::Value;
use tokio::process::Command;

mod answers;
mod calls;
mod codes;
mod stub;

/// How one run of the program ended.
#[derive(Debug)]
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The value of a `key: value` line.
    fn text(&self, key: &str) -> &str {
        let line = self.stdout.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            (name == key).then_some(value)
        });
        line.unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }
}

fn fencepost(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
    for name in ["FENCEPOST_ENDPOINT", "FENCEPOST_OWNER", "FENCEPOST_TOKEN"] {
        command.env_remove(name);
    }
    command.args(arguments.split_whitespace());
    command.stdin(Stdio::null());
    command
}

async fn finish(mut command: Command) -> Run {
    let output = command.output().await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run {
        code: output.status.code().unwrap(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Runs against the server at `address`.
async fn run(address: SocketAddr, arguments: &str) -> Run {
    let mut command = fencepost(arguments);
    command.env("FENCEPOST_ENDPOINT", format!("http://{address}"));
    finish(command).await
}
