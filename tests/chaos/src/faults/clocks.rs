//! Wall clocks that step, and step back.

use std::{fs, process::Stdio, time::Duration};

use fencepost_model::{Recorder, history::What};
use fencepost_proto::v1::lock_service_client::LockServiceClient;
use fencepost_support::{calls, clock::Clock, postgres::Client, server};
use rand::Rng as _;
use tokio::process::Command;

use super::{Seen, Stage};
use crate::world::{Replica, World};

/// The farthest step: leases end this much later.
pub(crate) const FARTHEST: Duration = Duration::from_secs(3);

/// The database's.
pub(super) async fn database(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let clock = world.clock.as_ref()?;
    let right = Client::connect(&world.register()).await.ok()?;
    let by = step(&mut stage);
    set(&stage.recorder, clock, by, by);
    let look = async || {
        let session = world.session("template1").await?;
        let now = "SELECT extract(epoch FROM clock_timestamp())::float8";
        let before: f64 = right.try_value(now).await?;
        let its: f64 = session.try_value(now).await?;
        let after: f64 = right.try_value(now).await?;
        let (least, most) = (its - after - 0.05, its - before + 0.05);
        let there = (least..most).contains(&seconds(by));
        there.then(|| format!("its sessions were {} s off", offset(by)))
    };
    let seen = stage.watch(look).await;
    set(&stage.recorder, clock, 0, -by);
    seen
}

/// Those of replicas, each in its own direction, by more.
pub(super) async fn servers(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let replicas = stage.replicas();
    let mut steps = Vec::new();
    for replica in replicas {
        let by = 100 * step(&mut stage);
        replica.clock.as_ref()?.set(&offset(by));
        steps.push((replica, by));
    }
    let look = async || {
        for (replica, by) in &steps {
            let off = off_by(world, replica).await;
            if off.is_some_and(|off| (off - seconds(*by)).abs() < 5.0) {
                return Some(format!("a server's log was {} s off", offset(*by)));
            }
        }
        None
    };
    let seen = stage.watch(look).await;
    for clock in replicas.iter().filter_map(|replica| replica.clock.as_ref()) {
        clock.set(&offset(0));
    }
    seen
}

/// How far a server's wall clock is off, s, by the time that it writes into its log: a
/// token that nobody was given makes it write.
async fn off_by(world: &World, replica: &Replica) -> Option<f64> {
    let server = replica.server.try_lock().ok()?;
    let mut client = LockServiceClient::connect(server.url()).await.ok()?;
    let (name, owner, ttl) = ("wall clock", "nobody", Duration::from_secs(1));
    let answer = calls::acquire(&mut client, name, owner, ttl).await.ok()?;
    let unknown = answer.lock?.fencing_token + 1;
    let _ = calls::renew(&mut client, name, owner, unknown, None).await;
    let line: serde_json::Value = serde_json::from_str(server.logs().last()?).ok()?;
    let written = line.get("timestamp")?.as_str()?;
    let right = Client::connect(&world.register()).await.ok()?;
    let off = format!("SELECT extract(epoch FROM '{written}'::timestamptz - now())::float8");
    right.try_value(&off).await
}

/// That of clients: a process with a load of its own, whose history it checks itself.
pub(super) async fn clients(mut stage: Stage<'_>) -> Seen {
    let clock = Clock::try_right()?;
    let mut command = Command::new(server::program("fencepost-model"));
    command
        .args(["run", "--faults"])
        .args(["--seed", &stage.rng.random::<u32>().to_string()])
        .args(["--endpoint", &stage.world.endpoints().join(",")])
        .args(["--register", &stage.world.register()])
        .args(["--seconds", &stage.time.as_secs().max(3).to_string()])
        .envs(clock.environment())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let running = command.spawn().expect("the program runs");
    let maps = format!("/proc/{}/maps", running.id()?);
    let mut steps = stage.rng.clone();
    let mut seen = None;
    let stepping = stage.repeat(50..500, async || {
        clock.set(&offset(steps.random_range(-300_000..300_000)));
        let maps = fs::read_to_string(&maps).unwrap_or_default();
        if maps.contains("libfaketime") {
            seen = Some("the clients went by it".to_owned());
        }
    });
    let (found, ()) = tokio::join!(running.wait_with_output(), stepping);
    let found = found.expect("the program runs");
    assert!(
        found.status.success(),
        "clients whose clock steps: {}",
        String::from_utf8_lossy(&found.stdout)
    );
    seen
}

/// Milliseconds.
fn step(stage: &mut Stage<'_>) -> i64 {
    let farthest = i64::try_from(FARTHEST.as_millis()).unwrap_or(i64::MAX);
    let by = stage.rng.random_range(200..farthest);
    if stage.rng.random() { by } else { -by }
}

fn set(recorder: &Recorder, clock: &Clock, to: i64, by: i64) {
    let from = recorder.now();
    clock.set(&offset(to));
    recorder.event(from, recorder.now(), What::ClockStepped(by * 1000));
}

fn offset(ms: i64) -> String {
    format!("{:+.3}", seconds(ms))
}

#[expect(clippy::cast_precision_loss, reason = "a step is short")]
fn seconds(ms: i64) -> f64 {
    ms as f64 / 1000.0
}
