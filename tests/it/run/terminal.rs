//! Started from a terminal: the command has it, and the caller gets it back.

use fencepost_support::{leash::End, process::Process};

use super::stage::{WAITING, fresh, plain, python};
use crate::{programs::bare, world::shared};

/// A terminal, and a shell on it that has a job in the foreground. Types what it
/// is told to when it has read what it waits for, and says all in the end.
const TERMINAL: &str = r#"
import os, pty, signal, sys, threading
end = sys.argv.index("--")
plan, command = sys.argv[1:end], sys.argv[end + 1:]
inside, terminal = pty.fork()
if inside == 0:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execv(command[0], command)
    while True:
        _, status = os.waitpid(job, os.WUNTRACED)
        whose = "the job's" if os.tcgetpgrp(0) == job else "another's"
        if not os.WIFSTOPPED(status):
            break
        print("stopped, the terminal is", whose, flush=True)
        os.tcsetpgrp(0, os.getpgrp())
        os.tcsetpgrp(0, job)
        os.killpg(job, signal.SIGCONT)
    print("ended with", os.waitstatus_to_exitcode(status), "the terminal is", whose, flush=True)
    # What it says may be lost when it ends: so it stays until all was read.
    print("over", flush=True)
    signal.pause()
# Its shell and all that runs on it are told when this one ends.
threading.Timer(25, lambda: os._exit(1)).start()
said = b""
def until(words):
    global said
    while words not in said:
        try:
            more = os.read(terminal, 4096)
        except OSError:
            more = b""
        if not more:
            break
        os.write(2, more)
        said += more
for words, keys in zip(plan[::2], plan[1::2]):
    until(words.encode())
    os.write(terminal, keys.encode().decode("unicode_escape").encode())
until(b"over\r\n")
os._exit(0)
"#;

/// Runs a command on a terminal, where these keys are pressed after those words.
/// What came of it.
async fn on_a_terminal(stem: &str, command: &[&str], plan: &[&str]) -> Vec<String> {
    let endpoint = shared().await.server.url();
    let run = plain(&endpoint, &fresh(stem), &[], command);
    let mut command = bare("env".into());
    command.args(["--default-signal", python()]);
    command
        .args(["-ISc", TERMINAL])
        .args(plan)
        .arg("--")
        .arg(run.get_program())
        .args(run.get_args());
    let process = Process::start("terminal", &mut command, End::KillGroup);
    process.wait_exit().await;
    // All of it.
    process.log().wait_for(|_| None::<()>).await;
    let lines = process.log().lines();
    let lines = lines.iter().map(|line| line.trim_end().to_owned());
    lines.filter(|line| line != "over").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_reads_the_terminal_and_is_told_of_its_keys() {
    const READS: &str = "
        trap 'echo got INT; exit 23' INT
        echo ready; read -r line; echo read $line
        while :; do sleep 0.02; done";
    let plan = ["ready", "hello\\n", "read hello", "\\x03"];
    let lines = on_a_terminal("terminal", &["/bin/sh", "-c", READS], &plan).await;
    assert!(lines.iter().any(|line| line == "read hello"), "{lines:?}");
    assert!(
        lines.iter().any(|line| line.contains("got INT")),
        "{lines:?}"
    );
    let last = lines.last().unwrap();
    assert_eq!(last, "ended with 23 the terminal is the job's", "{lines:?}");
}

/// One that does nothing about it dies of it, and that is what is told.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_from_the_terminal_ends_the_command() {
    let plan = ["ready", "\\x03"];
    let lines = on_a_terminal("interrupt", &[python(), "-ISc", WAITING], &plan).await;
    let last = lines.last().unwrap();
    // After the key's echo.
    let ended = last.ends_with("ended with 130 the terminal is the job's");
    assert!(ended, "{lines:?}");
}

/// The shell sees the job stop, and wakes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_can_be_stopped_and_woken() {
    const READS: &str = "
        echo ready; read -r line; echo read $line; exit 24";
    let plan = ["ready", "\\x1a", "stopped", "hello\\n"];
    let lines = on_a_terminal("stopped-job", &["/bin/sh", "-c", READS], &plan).await;
    let stopped = "stopped, the terminal is the job's";
    assert!(lines.iter().any(|line| line.contains(stopped)), "{lines:?}");
    let last = lines.last().unwrap();
    assert_eq!(last, "ended with 24 the terminal is the job's", "{lines:?}");
}
