//! A `fencepost run`, what is left of its command, and when that ran.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::{self, Command},
    sync::OnceLock,
    time::Duration,
};

use fencepost_support::{
    leash::End,
    process::Process,
    system::{self, PrivateDirectory, private_directory},
    wait::{PATIENCE, within},
};
use rustix::process::Signal;
use tokio::time::timeout;

use crate::{
    programs::{self, bare, cli},
    world,
};

/// A name that no other test uses, nor another test process.
pub(crate) fn fresh(stem: &str) -> String {
    world::fresh(&format!("{stem}-{}", process::id()))
}

/// The variable by which the processes of one [`Run`] are found.
const MARK: &str = "RUN_OF_A_TEST";

/// A `fencepost run` with all that it and its command print in its log.
/// Dropping it ends them all.
pub(crate) struct Run {
    pub(crate) process: Process,
    mark: String,
}

impl Run {
    pub(crate) fn start(endpoint: &str, resource: &str, flags: &[&str], command: &[&str]) -> Self {
        Self::through("exec \"$@\"", endpoint, resource, flags, command)
    }

    /// Started by a script, which finds it in `$@`.
    pub(crate) fn through(
        script: &str,
        endpoint: &str,
        resource: &str,
        flags: &[&str],
        command: &[&str],
    ) -> Self {
        let mut shell = bare("env".into());
        shell
            // Whatever this process was told to ignore by those who started it.
            .args(["--default-signal", "/bin/sh"])
            // No core files of commands that die.
            .args(["-c", &format!("ulimit -c 0; exec >&2; {script}"), "sh"])
            .arg(cli())
            .args(arguments(endpoint, resource, flags, command))
            .current_dir("/");
        let mark = fresh("run");
        shell.env(MARK, &mark);
        Self {
            process: Process::start("fencepost", &mut shell, End::KillGroup),
            mark,
        }
    }

    /// Waits for a line with this in it.
    pub(crate) async fn says(&self, words: &str) {
        let line = self
            .process
            .log()
            .wait_for(|line| line.contains(words).then_some(()));
        let found = timeout(PATIENCE, line).await;
        let tail = self.process.tail();
        assert!(matches!(found, Ok(Some(()))), "no {words:?} in {tail}");
    }

    /// Whether there is a line with this in it by now.
    pub(crate) fn has_said(&self, words: &str) -> bool {
        let lines = self.process.log().lines();
        lines.iter().any(|line| line.contains(words))
    }

    /// Waits for its end, of which this is the exit code; and then nothing of
    /// the command may be left.
    pub(crate) async fn ends(&self, code: i32) {
        self.ends_within(PATIENCE, code).await;
        let left = self.left();
        assert!(left.is_empty(), "{left:?} are left of the command");
        // Nobody is left to say more.
        let end = self.process.log().wait_for(|_| None::<()>);
        assert_eq!(timeout(PATIENCE, end).await, Ok(None));
    }

    pub(crate) async fn ends_within(&self, patience: Duration, code: i32) {
        let status = self.process.wait_exit_within(patience).await;
        assert_eq!(status.code(), Some(code), "{}", self.process.tail());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// All processes of the command, in whatever group and whoever's children.
    pub(crate) fn left(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").unwrap();
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let mark = format!("{MARK}={}", self.mark).into_bytes();
        pids.filter(|pid| {
            // Unreadable for processes that have ended, and of others.
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            // A command knows its lock; fencepost and the guardian do not.
            variables.clone().any(|variable| variable == mark)
                && variables.any(|variable| variable.starts_with(b"FENCEPOST_TOKEN="))
        })
        .collect()
    }

    /// Waits until nothing of the command is left.
    pub(crate) async fn nothing_left_within(&self, patience: Duration) {
        within(patience, "nothing of the command is left", async || {
            self.left().is_empty().then_some(())
        })
        .await;
    }

    /// The process that ends the command's group when `fencepost` cannot.
    pub(crate) fn guardian(&self) -> u32 {
        self.find_guardian().expect("a guardian")
    }

    pub(crate) fn find_guardian(&self) -> Option<u32> {
        let children = system::children_of(self.process.pid());
        children.into_iter().find(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"fencepost\0guardian\0")
        })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // First, so that there is nobody to start another.
        self.process.signal(Signal::KILL);
        for pid in self.left() {
            system::signal(pid, Signal::KILL);
        }
    }
}

fn arguments<'a>(
    endpoint: &'a str,
    resource: &'a str,
    flags: &[&'a str],
    command: &[&'a str],
) -> Vec<&'a str> {
    let before = ["--endpoint", endpoint, "run", resource];
    [&before, flags, &["--"], command].concat()
}

/// The same as a plain command that ends by itself.
pub(crate) fn plain(endpoint: &str, resource: &str, flags: &[&str], command: &[&str]) -> Command {
    let mut program = bare(cli());
    program
        .args(arguments(endpoint, resource, flags, command))
        .current_dir("/");
    program
}

/// In namespaces of its own; killed with what has started it.
pub(crate) const UNSHARE: [&str; 4] = ["unshare", "-Urpf", "--mount-proc", "--kill-child"];

/// Whether the kernel lets us; a line that says so if it does not.
pub(crate) async fn may_unshare() -> bool {
    let mut command = bare(UNSHARE[0].into());
    command.args(&UNSHARE[1..]).arg("true");
    let ended = programs::run(command).await;
    let may = ended.code == Some(0);
    if !may {
        println!("skipped, no PID namespaces here: {}", ended.said());
    }
    may
}

pub(crate) fn url_of(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// Stamps a file with the time, every few milliseconds, until it is killed; as
/// the `stubborn` kind with three processes that ignore what asks them to end.
const STAMPING: &str = "
import os, signal, sys, time
path, kind = sys.argv[1:]
if kind == 'stubborn':
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.fork()
stamps = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
end = time.monotonic() + 60
while time.monotonic() < end:
    os.write(stamps, b'%d\\n' % time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    time.sleep(0.004)
";

/// When a command ran: since boot, on the clock that the machine has once.
pub(crate) struct Stamps {
    directory: PrivateDirectory,
}

impl Stamps {
    pub(crate) fn new() -> Self {
        Self {
            directory: private_directory(),
        }
    }

    /// A command that stamps.
    pub(crate) fn command(&self, kind: &str) -> Vec<String> {
        let file = self.file().display().to_string();
        ["-ISc", STAMPING, &file, kind].iter().fold(
            vec![python().to_owned()],
            |mut command, word| {
                command.push((*word).to_owned());
                command
            },
        )
    }

    /// Waits for the first one.
    pub(crate) async fn first(&self) -> Duration {
        within(PATIENCE, "a first stamp", async || {
            self.all().into_iter().min()
        })
        .await
    }

    /// The last one so far.
    pub(crate) fn last(&self) -> Duration {
        self.all().into_iter().max().expect("stamps")
    }

    fn all(&self) -> Vec<Duration> {
        let text = fs::read_to_string(self.file()).unwrap_or_default();
        // A line may be written just now.
        let lines = text.split_inclusive('\n');
        lines
            .filter_map(|line| line.strip_suffix('\n')?.parse().ok())
            .map(Duration::from_nanos)
            .collect()
    }

    fn file(&self) -> PathBuf {
        self.directory.join("stamps")
    }
}

/// For Python: says that it is ready, and does nothing more. A shell is not as good
/// as that: dash forgets an INT that comes while it starts something.
pub(crate) const WAITING: &str = "
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
print('ready', flush=True)
signal.pause()
";

/// The interpreter itself: what is first in the PATH may be a script that looks
/// for it, and takes its time.
pub(crate) fn python() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let output = Command::new("python3")
            .args(["-c", "import sys; print(sys.executable)"])
            .output()
            .expect("Python 3");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    })
}

/// As [`Run::start`] takes them.
pub(crate) fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}
