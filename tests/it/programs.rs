//! Programs that are run to their end: what they said, and their exit code.

use std::{env, path::PathBuf, process::Command};

use fencepost_support::server::{self, Builder, NoStart};
use serde_json::Value;

/// How a program ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// All that it said.
    pub(crate) fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

/// The command line's binary.
pub(crate) fn cli() -> PathBuf {
    server::binary().with_file_name("fencepost")
}

/// A command with none of this process's own settings.
pub(crate) fn bare(program: PathBuf) -> Command {
    let mut command = Command::new(program);
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        if ["FENCEPOST_", "DATABASE_", "PG", "RUST_LOG"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command that ends by itself.
pub(crate) async fn run(mut command: Command) -> Ended {
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Expects that a server does not start, with this exit code, and says why in
/// one line of its log. Returns that line's message.
pub(crate) async fn expect_no_start(builder: Builder, code: i32) -> String {
    let NoStart { status, lines } = builder
        .try_start()
        .await
        .expect_err("a server that does not start");
    assert_eq!(status.code(), Some(code), "{lines:?}");
    let errors: Vec<Value> = lines
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{lines:?}")))
        .filter(|line| line["level"] == "ERROR")
        .collect();
    let [error] = &errors[..] else {
        panic!("not one line of error: {lines:?}");
    };
    error["message"].as_str().unwrap().to_owned()
}
