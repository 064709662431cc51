//! Clocks that are wrong: those of the servers never matter; that of the
//! database is watched, and tokens rise whatever it does.

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server, calls,
    clock::{self, Clock},
    eventually,
    postgres::{Stop, fresh_database},
    server::{Builder, Client},
    wait::within,
};
use serde_json::Value;

use crate::{metrics::scrape::Scrape, programs};

fn faketime() -> String {
    clock::library().expect("faketime is installed")
}

/// A server whose wall clock is off; its monotonic clocks are not.
fn skewed(url: &str, offset: &str) -> Builder {
    Server::builder(url)
        .flag("--drain-delay", "0s")
        .env("LD_PRELOAD", &faketime())
        .env("FAKETIME", offset)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
}

/// How far a server's wall clock is ahead, by the time stamps of its log.
async fn ahead(server: &Server, database: &fencepost_support::postgres::Client) -> f64 {
    let line = server.logs().pop().expect("a server logs its start");
    let line: Value = serde_json::from_str(&line).unwrap();
    let stamp = line["timestamp"].as_str().unwrap();
    database
        .value(&format!(
            "SELECT extract(epoch FROM '{stamp}'::timestamptz - now())::float8"
        ))
        .await
}

/// Tries to take a lock at all of these servers in turn until one grants it;
/// returns when that was asked for.
async fn take_over(clients: &mut [Client], name: &str) -> Instant {
    within(Duration::from_secs(20), "somebody takes over", async || {
        for (n, client) in clients.iter_mut().enumerate() {
            let asked = Instant::now();
            let owner = format!("contender {n}");
            let answer = calls::acquire(client, name, &owner, Duration::from_secs(60)).await;
            // A server that restarts does not answer.
            if answer.is_ok_and(|answer| answer.acquired) {
                return Some(asked);
            }
        }
        None
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_is_at_the_ttl_whatever_the_servers_clocks_say() {
    let database = fresh_database().await;
    let observer = database.client().await;
    let mut servers = Vec::new();
    for (offset, expected) in [("+0", 0.0), ("+5m", 300.0), ("-5m", -300.0)] {
        let server = skewed(&database.url(), offset).start().await;
        let found = ahead(&server, &observer).await;
        assert!((found - expected).abs() < 20.0, "{offset}: {found}");
        server.wait_ready().await;
        servers.push(server);
    }
    let (a, b, c) = (
        takeover(&servers, 0),
        takeover(&servers, 1),
        takeover(&servers, 2),
    );
    tokio::join!(a, b, c);
}

/// A lease taken through one of the servers ends at all of them at its time.
async fn takeover(servers: &[Server], holder: usize) {
    const TTL: Duration = Duration::from_secs(3);
    let name = format!("held through {holder}");
    let mut holder = servers[holder].client().await;
    let mut others = Vec::new();
    for server in servers {
        others.push(server.client().await);
    }
    let asked = Instant::now();
    calls::granted(&mut holder, &name, "holder", TTL).await;
    let granted = Instant::now();

    // A duration, and the same one from all of them.
    let mut ends = Vec::new();
    for client in &mut others {
        let before = Instant::now();
        let lock = calls::get(client, &name).await.unwrap();
        let remaining = calls::span(lock.remaining);
        assert!(remaining <= TTL && remaining > TTL / 2, "{remaining:?}");
        ends.push((before + remaining, Instant::now() + remaining));
    }
    let latest = ends.iter().map(|(earliest, _)| *earliest).max().unwrap();
    let earliest = ends.iter().map(|(_, latest)| *latest).min().unwrap();
    let apart = latest.saturating_duration_since(earliest);
    assert!(apart < Duration::from_millis(500), "{apart:?}");

    let taken = take_over(&mut others, &name).await;
    let early = taken + Duration::from_millis(150) < asked + TTL;
    assert!(!early, "after {:?}", taken - asked);
    let after = taken - granted;
    assert!(after < TTL + Duration::from_secs(1), "{after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_a_wrong_clock_hears_the_same() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let ttl = Duration::from_secs(600);
    calls::granted(&mut server.client().await, "a", "b", ttl).await;
    for offset in ["+5m", "-5m"] {
        let run = async |arguments: &[&str]| {
            let mut command = programs::bare(programs::cli());
            command.args(arguments).args(["--endpoint", &server.url()]);
            command
                .env("LD_PRELOAD", faketime())
                .env("FAKETIME", offset);
            command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            programs::run(command).await
        };
        let seen = run(&["get", "a", "--output", "json"]).await;
        assert_eq!(seen.code, Some(0), "{}", seen.stderr);
        let seen: Value = serde_json::from_str(&seen.stdout).unwrap();
        let lock = seen.get("lock").unwrap_or(&seen);
        let rest = lock["remaining"].as_str().unwrap().trim_end_matches('s');
        let rest: f64 = rest.parse().unwrap();
        assert!((560.0..=600.0).contains(&rest), "{offset}: {rest}");
        let refused = run(&["acquire", "a", "--ttl", "10s"]).await;
        assert_eq!(refused.code, Some(75), "{}", refused.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_replicas_do_not_prolong_a_dead_lease() {
    const TTL: Duration = Duration::from_secs(6);
    let database = fresh_database().await;
    let mut tasks = Vec::new();
    let mut clients = Vec::new();
    for n in 0..3 {
        let builder = Server::builder(&database.url()).flag("--drain-delay", "0s");
        let mut server = builder.start().await;
        server.wait_ready().await;
        let lazy = server.endpoint().connect_lazy();
        clients.push(Client::new(lazy));
        tasks.push(async move {
            // One after the other, again and again, half of them killed.
            tokio::time::sleep(Duration::from_millis(700 * n)).await;
            for round in 0.. {
                if round % 2 == 0 {
                    server.kill9().await;
                }
                server.restart().await;
                tokio::time::sleep(Duration::from_millis(1500)).await;
            }
        });
    }
    let asked = Instant::now();
    calls::granted(&mut clients[0], "a", "dead", TTL).await;
    let granted = Instant::now();
    let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
    let taken = take_over(&mut clients, "a").await;
    for task in tasks {
        assert!(!task.is_finished(), "the restarts went on to the end");
        task.abort();
    }
    assert!(taken + Duration::from_millis(150) >= asked + TTL);
    let after = taken - granted;
    assert!(after < TTL + Duration::from_secs(2), "{after:?}");
}

/// A database whose wall clock can be stepped while it runs.
struct Stepped {
    postgres: Postgres,
    clock: Clock,
}

impl Stepped {
    async fn start() -> Self {
        let clock = Clock::right();
        let mut builder = Postgres::builder();
        for (name, value) in clock.environment() {
            builder = builder.env(name, &value);
        }
        Self {
            postgres: builder.start().await,
            clock,
        }
    }
}

/// Waits until a server reports the step number `count`; returns its seconds.
async fn reported_step(server: &Server, count: u64) -> f64 {
    let line = server
        .wait_for_log("a step of the database's clock", |line| {
            line["steps"] == count && line["level"] == "ERROR"
        })
        .await;
    line["step_seconds"].as_f64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_the_databases_clock_is_reported_and_tokens_rise() {
    let mut database = Stepped::start().await;
    let server = Server::start(&database.postgres.url()).await;
    let other = Server::start(&database.postgres.url()).await;
    let (mut client, mut there) = (server.client().await, other.client().await);
    let long = Duration::from_secs(5400);
    let held = calls::granted(&mut client, "held", "a", long).await;
    let mut last = held.fencing_token;
    let mut next = async |client: &mut Client, name: &str| {
        let lock = calls::granted(client, name, "a", Duration::from_secs(60)).await;
        assert!(
            lock.fencing_token > last,
            "{} after {last}",
            lock.fencing_token
        );
        last = lock.fencing_token;
        calls::span(lock.remaining)
    };
    next(&mut client, "a").await;

    database.clock.set("+3600");
    for server in [&server, &other] {
        let step = reported_step(server, 1).await;
        assert!((step - 3600.0).abs() < 5.0, "{step}");
    }
    let told = Scrape::of(&server).await;
    assert_eq!(told.value("fencepost_clock_steps_total", &[]), 1.0);
    let step = told.value("fencepost_clock_step_seconds", &[]);
    assert!((step - 3600.0).abs() < 5.0, "{step}");
    // Leases are nearer to their end by the step, or over.
    calls::refused(&mut client, "held", "b", long).await;
    let rest = calls::span(calls::get(&mut client, "held").await.unwrap().remaining);
    assert!(rest < Duration::from_secs(1801), "{rest:?}");
    calls::get(&mut client, "a")
        .await
        .expect_err("it has ended");
    // What is granted from now on has its full time.
    let rest = next(&mut there, "a").await;
    assert!(rest > Duration::from_secs(55), "{rest:?}");

    database.clock.set("+0");
    for server in [&server, &other] {
        let step = reported_step(server, 2).await;
        assert!((step + 3600.0).abs() < 5.0, "{step}");
    }
    let told = Scrape::of(&server).await;
    assert_eq!(told.value("fencepost_clock_steps_total", &[]), 2.0);
    let step = told.value("fencepost_clock_step_seconds", &[]);
    assert!((step + 3600.0).abs() < 5.0, "{step}");
    // A lease of before lasts longer by the step, and by no more.
    let row = database.postgres.admin().await;
    let rest: f64 = row
        .value(
            "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
               FROM fencepost.locks WHERE resource = 'a'",
        )
        .await;
    assert!((3550.0..3660.0).contains(&rest), "{rest}");
    for name in ["b", "a", "held"] {
        next(&mut there, name).await;
        next(&mut client, name).await;
    }

    // With a wrong clock at its start it leaps, and not to where that clock is.
    database.clock.set("-3600");
    database.postgres.restart(Stop::Fast).await;
    server.wait_ready().await;
    eventually("the server serves again", async || {
        let ready = calls::acquire(&mut client, "ready", "a", long).await;
        ready.is_ok().then_some(())
    })
    .await;
    next(&mut client, "held").await;
    next(&mut there, "c").await;
    let leap = |line: &Value| {
        let message = line["message"].as_str().unwrap_or_default();
        message.contains("ahead of the database's clock")
    };
    let lines = [server.logs(), other.logs()].concat();
    let lines = lines
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    assert_eq!(
        lines.filter(|line| leap(line)).count(),
        1,
        "one fault, logged once"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn purge_rests_after_a_step_of_the_databases_clock() {
    const RETENTION: Duration = Duration::from_secs(6);
    let database = Stepped::start().await;
    let server = Server::builder(&database.postgres.url())
        .flag("--request-timeout", "500ms")
        .flag("--purge-retention", "6s")
        .flag("--purge-retention-floor", "1s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let rows = database.postgres.admin().await;
    let gone = async |name: &str| {
        let count: i64 = rows
            .value(&format!(
                "SELECT count(*) FROM fencepost.locks WHERE resource = '{name}'"
            ))
            .await;
        count == 0
    };
    let mut release = async |name: &str| {
        let lock = calls::granted(&mut client, name, "a", RETENTION).await;
        calls::release(&mut client, name, "a", lock.fencing_token)
            .await
            .unwrap();
    };
    release("first").await;
    within(RETENTION * 5, "purge is at work", async || {
        gone("first").await.then_some(())
    })
    .await;

    // By the clock, it is idle for an hour; nobody has watched it for that long.
    release("second").await;
    database.clock.set("+3600");
    reported_step(&server, 1).await;
    let stepped = Instant::now();
    within(RETENTION * 5, "purge is at work again", async || {
        gone("second").await.then_some(())
    })
    .await;
    let rested = stepped.elapsed();
    assert!(rested + Duration::from_secs(1) >= RETENTION, "{rested:?}");
}

/// A new primary with another clock: leases end early or late by the difference,
/// tokens rise.
#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_with_another_clock_moves_the_ends_of_leases_and_tokens_rise() {
    let hour = Duration::from_secs(3600);
    for (offset, ahead) in [("+3600", true), ("-3600", false)] {
        let mut primary = Postgres::start().await;
        let mut standby = primary.base_backup().await;
        for (name, value) in [
            ("LD_PRELOAD", faketime().as_str()),
            ("FAKETIME", offset),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ] {
            standby.set_env(name, value);
        }
        standby.follow(&primary, "other");
        standby.start_again().await;
        let server = Server::start(&primary.url()).await;
        let client = &mut server.client().await;
        calls::granted(client, "short", "a", hour / 2).await;
        let long = calls::granted(client, "long", "a", 3 * hour).await;
        primary.wait_replayed(&standby).await;
        // The standby may have it, or not.
        let last = calls::granted(client, "last", "b", hour).await;
        primary.kill9().await;
        standby.promote().await;

        let server = Server::start(&standby.url()).await;
        let client = &mut server.client().await;
        let held = calls::get(client, "long").await.unwrap();
        assert_eq!(held.fencing_token, long.fencing_token);
        let left = calls::span(held.remaining);
        let expected = if ahead { 2 * hour } else { 4 * hour };
        let off = left.abs_diff(expected);
        assert!(off < Duration::from_secs(60), "{offset}: {left:?}");
        let short_lives = calls::get(client, "short").await.is_ok();
        assert_eq!(short_lives, !ahead, "{offset}");
        for name in ["last", "new"] {
            let new = calls::granted(client, name, "b", hour).await;
            assert!(
                new.fencing_token > last.fencing_token,
                "{offset}: {new:?}, {last:?}"
            );
        }
    }
}
