//! Postgres stopped, killed, restarted, its sessions ended.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server,
    calls::{get, granted, renew},
    postgres::Stop,
};

use super::{LONG, Patient};

#[tokio::test(flavor = "multi_thread")]
async fn postgres_stopped_for_a_minute() {
    let mut postgres = Postgres::start().await;
    let mut patient = Patient::new(Server::start(&postgres.url()).await).await;
    let lock = granted(&mut patient.server.client().await, "kept", "holder", LONG).await;

    let stopped = Instant::now();
    let cpu = patient.server.cpu_time();
    postgres.stop(Stop::Fast).await;
    patient.falls_ill("a stop", stopped).await;
    tokio::time::sleep_until((stopped + Duration::from_secs(60)).into()).await;
    let busy = (patient.server.cpu_time() - cpu).as_secs_f64() / stopped.elapsed().as_secs_f64();
    println!("a stop: {:.1} % of a core", busy * 100.0);
    assert!(busy < 0.2, "{busy}");

    let started = Instant::now();
    postgres.start_again().await;
    patient.recovers("a stop", started).await;
    // A lease outlives the outage.
    let mut client = patient.server.client().await;
    let token = lock.fencing_token;
    renew(&mut client, "kept", "holder", token, None)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_restart() {
    let mut postgres = Postgres::start().await;
    let mut patient = Patient::new(Server::start(&postgres.url()).await).await;
    let mut client = patient.server.client().await;
    let token = granted(&mut client, "kept", "holder", LONG)
        .await
        .fencing_token;

    for what in ["fast", "immediate", "kill -9"] {
        let began = Instant::now();
        match what {
            "fast" => postgres.stop(Stop::Fast).await,
            "immediate" => postgres.stop(Stop::Immediate).await,
            _ => postgres.kill9().await,
        }
        patient.falls_ill(what, began).await;
        let started = Instant::now();
        postgres.start_again().await;
        patient.recovers(what, started).await;
        let seen = get(&mut client, "kept").await.unwrap();
        assert_eq!(seen.fencing_token, token);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_session_is_ended_again_and_again() {
    let postgres = Postgres::start().await;
    let mut patient = Patient::new(Server::start(&postgres.url()).await).await;
    let admin = postgres.admin().await;
    for _ in 0..5 {
        let ended = Instant::now();
        admin
            .run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE application_name = 'fencepostd'",
            )
            .await;
        patient.load.wait_until_well(ended).await;
    }
    let (failed, longest) = patient.load.judge();
    println!("sessions ended: {failed} calls failed, the longest took {longest:?}");
    // It need not have fallen ill at all; it must be well now.
    let now = Instant::now();
    patient.watch.wait_for(true, now, super::RECOVERY).await;
    patient.watch.assert_sound();
}
