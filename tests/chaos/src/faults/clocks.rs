//! Wall clocks that step, and step back.

use std::{process::Stdio, time::Duration};

use fencepost_model::{Recorder, history::What};
use fencepost_support::{clock::Clock, server};
use rand::Rng as _;
use tokio::process::Command;

use super::Stage;

/// The farthest step: leases end this much later.
pub(crate) const FARTHEST: Duration = Duration::from_secs(3);

/// The database's.
pub(super) async fn database(mut stage: Stage<'_>) {
    let Some(clock) = &stage.world.clock else {
        return;
    };
    let by = step(&mut stage);
    set(&stage.recorder, clock, by, by);
    stage.hold().await;
    set(&stage.recorder, clock, 0, -by);
}

/// Those of replicas, each in its own direction, by more.
pub(super) async fn servers(mut stage: Stage<'_>) {
    let replicas = stage.replicas();
    for clock in replicas.iter().filter_map(|replica| replica.clock.as_ref()) {
        clock.set(&offset(100 * step(&mut stage)));
    }
    stage.hold().await;
    for clock in replicas.iter().filter_map(|replica| replica.clock.as_ref()) {
        clock.set(&offset(0));
    }
}

/// That of clients: a process with a load of its own, whose history it checks itself.
pub(super) async fn clients(mut stage: Stage<'_>) {
    let Some(clock) = Clock::try_right() else {
        return;
    };
    let mut command = Command::new(server::program("fencepost-model"));
    command
        .args(["run", "--faults"])
        .args(["--seed", &stage.rng.random::<u32>().to_string()])
        .args(["--endpoint", &stage.world.endpoints().join(",")])
        .args(["--register", &stage.world.register()])
        .args(["--seconds", &stage.time.as_secs().max(3).to_string()])
        .envs(clock.environment())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut steps = stage.rng.clone();
    let stepping = stage.repeat(50..500, async || {
        clock.set(&offset(steps.random_range(-300_000..300_000)));
    });
    let (found, ()) = tokio::join!(command.output(), stepping);
    let found = found.expect("the program runs");
    assert!(
        found.status.success(),
        "clients whose clock steps: {}",
        String::from_utf8_lossy(&found.stdout)
    );
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

#[expect(clippy::cast_precision_loss, reason = "a step is short")]
fn offset(ms: i64) -> String {
    format!("{:+.3}", ms as f64 / 1000.0)
}
