//! Commands that are run when the lock comes and goes.

use std::{process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{process::Command, time::timeout};

use super::Args;
use crate::output;

/// How long a hook may take; then it is killed, with all that it has started.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Hooks {
    resource: String,
    on_gain: Option<String>,
    on_loss: Option<String>,
}

impl Hooks {
    pub(super) fn new(args: &Args) -> Self {
        Self {
            resource: args.resource.clone(),
            on_gain: args.on_gain.clone(),
            on_loss: args.on_loss.clone(),
        }
    }

    /// Dropping it ends the hook.
    pub(super) async fn gained(&self, owner: &str, token: i64) {
        if let Some(command) = &self.on_gain {
            self.run("--on-gain", command, owner, token, None).await;
        }
    }

    pub(super) async fn lost(&self, owner: &str, token: i64, reason: &str) {
        if let Some(command) = &self.on_loss {
            self.run("--on-loss", command, owner, token, Some(reason))
                .await;
        }
    }

    async fn run(&self, flag: &str, text: &str, owner: &str, token: i64, reason: Option<&str>) {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", text])
            .env("FENCEPOST_RESOURCE", &self.resource)
            .env("FENCEPOST_OWNER", owner)
            .env("FENCEPOST_TOKEN", token.to_string())
            .stdin(Stdio::null())
            .process_group(0);
        if let Some(reason) = reason {
            command.env("FENCEPOST_REASON", reason);
        }
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return output::error(&format!("{flag} cannot be run: {error}")),
        };
        let group = Group(
            child
                .id()
                .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)),
        );
        match timeout(LIMIT, child.wait()).await {
            Ok(Ok(status)) if status.success() => group.leave(),
            Ok(Ok(status)) => {
                group.leave();
                output::error(&format!("{flag} has failed: {status}"));
            }
            Ok(Err(error)) => output::error(&format!("{flag} cannot be waited for: {error}")),
            Err(_elapsed) => output::error(&format!("{flag} took longer than {LIMIT:?}: killed")),
        }
    }
}

/// A process group that is killed when this is dropped.
struct Group(Option<Pid>);

impl Group {
    /// What it left in the background may stay.
    fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Nobody there: it has just ended.
            let _: Result<(), _> = kill_process_group(group, Signal::KILL);
        }
    }
}
