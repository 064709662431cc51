//! The zombie story: a holder is frozen for three TTLs, another one takes over and
//! writes, and the first wakes up and writes at once. Its write is refused, every
//! time.
//!
//! The holder is one process with 200 leases, each with a late write of its own to
//! two tables in one transaction. The order to write lies in its standard input
//! before it wakes.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use fencepost_support::{
    calls,
    fence::{self, Method, Outcome, Writer},
    leash::{End, Leash},
    postgres::Database,
    server, system,
};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    time::timeout,
};

use crate::{
    fence_world::{fenced, rejected},
    world::{SHORT, shared},
};

const ZOMBIES: i32 = 200;
const LANES: usize = 8;

/// The process that is frozen. Dropping it kills it.
struct Holder {
    child: Child,
    pid: u32,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _leash: Leash,
}

impl Holder {
    fn start(server: &str, database: &Database, method: Method, level: &str, name: &str) -> Self {
        let mut command = Command::new(server::binary().with_file_name("fence_worker"));
        command
            .args([server, &database.url(), method.as_str(), level, name])
            .args([ZOMBIES.to_string(), SHORT.as_millis().to_string()])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        let mut child = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let pid = child.id().unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()).lines(),
            child,
            pid,
            _leash: Leash::of_process(pid, End::KillGroup),
        }
    }

    async fn line(&mut self) -> String {
        let line = timeout(Duration::from_secs(30), self.output.next_line()).await;
        line.expect("a line in time").unwrap().expect("a line")
    }
}

/// Takes over all resources: shows its token, then writes. Returns the tokens.
async fn take_over(
    server: &server::Server,
    database: &Database,
    method: Method,
    level: &str,
    name: &str,
) -> Vec<i64> {
    let mut lanes = Vec::new();
    for lane in 0..LANES {
        let mut client = server.client().await;
        let writer = Writer::connect(&database.url(), method, level, name).await;
        let (writer, name) = (writer.unwrap(), name.to_owned());
        lanes.push(tokio::spawn(async move {
            let mut tokens = Vec::new();
            for id in (0..ZOMBIES).skip(lane).step_by(LANES) {
                let resource = format!("{name}-{id}");
                // Free, since three TTLs have passed.
                let lock = calls::granted(&mut client, &resource, "next", LEASE).await;
                let token = lock.fencing_token;
                assert_eq!(writer.show(id, token).await, Outcome::Written);
                assert_eq!(writer.write(id, token, "next").await, Outcome::Written);
                tokens.push((id, token));
            }
            tokens
        }));
    }
    let mut tokens = vec![0; usize::try_from(ZOMBIES).unwrap()];
    for lane in lanes {
        for (id, token) in lane.await.unwrap() {
            tokens[usize::try_from(id).unwrap()] = token;
        }
    }
    tokens
}

/// Of the new holder.
const LEASE: Duration = Duration::from_secs(60);

async fn all_late_writes_are_refused(method: Method, level: &str, expected: Outcome) {
    let world = shared().await;
    let database = fenced().await;
    let observer = database.client().await;
    let name = format!("zombie {} {level}", method.as_str());
    observer.run(fence::TABLES).await;
    if method == Method::Trigger {
        observer.run(&fence::guards(&name)).await;
    }

    let address = world.server.grpc().to_string();
    let mut holder = Holder::start(&address, &database, method, level, &name);
    assert_eq!(holder.line().await, "ready");
    system::signal(holder.pid, Signal::STOP);
    let stopped = Instant::now();
    holder.input.write_all(b"write\n").await.unwrap();
    // The passing of time is what the story is about.
    tokio::time::sleep(SHORT * 3).await;
    let tokens = take_over(&world.server, &database, method, level, &name).await;
    assert!(stopped.elapsed() >= SHORT * 3);

    system::signal(holder.pid, Signal::CONT);
    let mut refused = 0;
    loop {
        let line = holder.line().await;
        if line == "done" {
            break;
        }
        let (id, rest) = line.split_once(' ').unwrap();
        let (token, outcome) = rest.split_once(' ').unwrap();
        let (id, token): (usize, i64) = (id.parse().unwrap(), token.parse().unwrap());
        assert!(token < tokens[id], "{token} was followed by {}", tokens[id]);
        assert_eq!(outcome, format!("{expected:?}"), "{name}-{id}");
        refused += 1;
    }
    assert_eq!(refused, ZOMBIES);
    assert!(holder.child.wait().await.unwrap().success());

    for table in ["accounts", "journal"] {
        let sql = format!("SELECT id, state, fencing_token FROM {table} ORDER BY id");
        let rows = observer.query(&sql, &[]).await.unwrap();
        assert_eq!(rows.len(), tokens.len());
        for (row, token) in rows.iter().zip(&tokens) {
            assert_eq!(row.get::<_, &str>(1), "next", "{table} {row:?}");
            assert_eq!(row.get::<_, i64>(2), *token, "{table} {row:?}");
        }
    }
    let counted = match method {
        Method::Kit | Method::Trigger => i64::from(ZOMBIES),
        Method::Plain => 0,
    };
    assert_eq!(rejected(&observer).await, counted);
}

fn stale() -> Outcome {
    Outcome::Refused("FP409".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kit_on_read_committed() {
    all_late_writes_are_refused(Method::Kit, "READ COMMITTED", stale()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kit_on_serializable() {
    all_late_writes_are_refused(Method::Kit, "SERIALIZABLE", stale()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trigger_on_read_committed() {
    all_late_writes_are_refused(Method::Trigger, "READ COMMITTED", stale()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trigger_on_serializable() {
    all_late_writes_are_refused(Method::Trigger, "SERIALIZABLE", stale()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_sql_on_read_committed() {
    all_late_writes_are_refused(Method::Plain, "READ COMMITTED", Outcome::NoRow).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_sql_on_serializable() {
    all_late_writes_are_refused(Method::Plain, "SERIALIZABLE", Outcome::NoRow).await;
}
