//! Commands that are run when the lock comes and goes.

use std::{
    fs,
    future::pending,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process_group, waitpid};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use super::Args;
use crate::output;

/// How long a hook may take; then it is killed, with all that it has started.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Hooks {
    /// The process of the hook that runs; 0: none.
    running: Arc<AtomicI32>,
    resource: String,
    on_gain: Option<String>,
    on_loss: Option<String>,
}

impl Hooks {
    pub(super) fn new(args: &Args) -> Self {
        Self {
            running: Arc::default(),
            resource: args.resource.clone(),
            on_gain: args.on_gain.clone(),
            on_loss: args.on_loss.clone(),
        }
    }

    /// As the first process of a container we are the parent of whatever the hooks
    /// leave behind, and have to look for those when they end. For as long as it is
    /// polled.
    pub(super) fn bury_orphans(&self) -> impl Future<Output = ()> + Send + use<> {
        let running = Arc::clone(&self.running);
        async move {
            let Ok(mut children) = signal(SignalKind::child()) else {
                // What is left is not buried; that is no reason to end.
                return pending().await;
            };
            while getpid().is_init() && children.recv().await.is_some() {
                for orphan in children_of_ours() {
                    // The hook itself is looked for by whoever runs it.
                    if orphan.as_raw_nonzero().get() != running.load(Ordering::SeqCst) {
                        // One that lives is not waited for.
                        let _: Result<_, _> = waitpid(Some(orphan), WaitOptions::NOHANG);
                    }
                }
            }
            pending().await
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
        let running = Running(&self.running);
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        running.0.store(pid.unwrap_or(0), Ordering::SeqCst);
        let group = Group(pid.and_then(Pid::from_raw));
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

/// Forgets which process it was.
struct Running<'a>(&'a AtomicI32);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

/// See proc_pid_task(5).
fn children_of_ours() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            let pids = list.split_whitespace();
            pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
                .collect::<Vec<_>>()
        })
        .collect()
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
