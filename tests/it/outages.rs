//! The contract's second table while the database is away, read-only or
//! silent; and what comes after.

use std::time::{Duration, Instant};

use fencepost_proto::v1::LOCK_SERVICE;
use fencepost_support::{
    Postgres, Server,
    calls::{
        acquire, expect_error, expect_resource, expect_retryable, get, granted, release, renew,
    },
    eventually,
    postgres::{Stop, fresh_database},
    proxy::Proxy,
    server::Client,
};
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;

use crate::{
    errors::expect_transient,
    world::{LONG, World},
};

/// Long enough that a lease survives the longest outage here.
const VERY_LONG: Duration = Duration::from_secs(600);

/// Every call on a lease, one after the other.
async fn every_call(client: &mut Client, name: &str, token: i64) -> [Result<(), Status>; 4] {
    [
        acquire(client, name, "b", LONG).await.map(drop),
        renew(client, name, "a", token, None).await.map(drop),
        get(client, name).await.map(drop),
        // A token that was never given harms nothing should it arrive late.
        release(client, name, "nobody", 1).await,
    ]
}

#[tokio::test]
async fn database_away_is_store_unavailable_and_the_lease_is_there_afterwards() {
    let mut postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let mut client = server.client().await;
    let token = granted(&mut client, "kept", "a", VERY_LONG)
        .await
        .fencing_token;
    for way in ["fast", "immediate", "kill"] {
        match way {
            "fast" => postgres.stop(Stop::Fast).await,
            "immediate" => postgres.stop(Stop::Immediate).await,
            _ => postgres.kill9().await,
        }
        for answer in every_call(&mut client, "kept", token).await {
            let status = expect_error(answer, Code::Unavailable, "STORE_UNAVAILABLE");
            expect_retryable(&status);
            expect_resource(&status, "kept");
        }
        eventually("health says so", async || {
            let health = server.health(LOCK_SERVICE).await;
            (health == Some(ServingStatus::NotServing)).then_some(())
        })
        .await;
        assert_eq!(
            server.health("liveness").await,
            Some(ServingStatus::Serving)
        );

        postgres.start_again().await;
        let back = Instant::now();
        server.wait_ready().await;
        renew(&mut client, "kept", "a", token, None).await.unwrap();
        let took = back.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?} after {way}");
    }
    // The token of a lease after three ways down is above all before.
    let next = granted(&mut client, "next", "a", LONG).await;
    assert!(next.fencing_token > token);
    assert_eq!(get(&mut client, "kept").await.unwrap().fencing_token, token);
}

/// While it is away the server rests: no spinning, no sessions left over.
#[tokio::test]
async fn an_absent_database_costs_little() {
    let mut postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    postgres.stop(Stop::Fast).await;
    let (start, before) = (Instant::now(), server.cpu_time());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let used = server.cpu_time() - before;
    let share = used.as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(share < 0.2, "{share} of a core");
}

#[tokio::test]
async fn read_only_is_store_unavailable() {
    let world = World::start().await;
    let mut client = world.server.client().await;
    let token = granted(&mut client, "kept", "a", VERY_LONG)
        .await
        .fencing_token;
    let name = world.database.name();
    let admin = world.database.client().await;
    let set = |to: &str| {
        format!(
            "ALTER DATABASE {name} SET default_transaction_read_only = {to};
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = '{name}' AND pid <> pg_backend_pid()"
        )
    };
    admin.run(&set("on")).await;
    eventually("health says so", async || {
        let health = world.server.health(LOCK_SERVICE).await;
        (health == Some(ServingStatus::NotServing)).then_some(())
    })
    .await;
    for answer in every_call(&mut client, "kept", token).await {
        let status = expect_error(answer, Code::Unavailable, "STORE_UNAVAILABLE");
        expect_retryable(&status);
    }
    let undo = format!("SET default_transaction_read_only = off; {}", set("off"));
    admin.run(&undo).await;
    world.server.wait_ready().await;
    renew(&mut client, "kept", "a", token, None).await.unwrap();
}

/// Killed sessions are an unknown outcome for one call at most: the next finds
/// a new connection.
#[tokio::test]
async fn killed_sessions_are_replaced() {
    let world = World::start().await;
    let mut client = world.server.client().await;
    let token = granted(&mut client, "kept", "a", VERY_LONG)
        .await
        .fencing_token;
    let admin = world.database.client().await;
    for _ in 0..5 {
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid()";
        admin.run(kill).await;
        eventually("the lease can be renewed", async || {
            match renew(&mut client, "kept", "a", token, None).await {
                Ok(_) => Some(()),
                answer => {
                    expect_transient(answer);
                    None
                }
            }
        })
        .await;
    }
}

/// Packets vanish. Every call ends within its budget, and all is well soon
/// after the link is.
#[tokio::test]
async fn a_silent_database_ends_every_call_in_time_and_heals() {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = Postgres::url_via(proxy.address(), database.name());
    let server = Server::builder(&url)
        .flag("--request-timeout", "2s")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let token = granted(&mut client, "kept", "a", VERY_LONG)
        .await
        .fencing_token;

    proxy.black_hole();
    let calls: Vec<_> = (0..10)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let asked = Instant::now();
                let answers = every_call(&mut client, "kept", token).await;
                (answers, asked.elapsed())
            })
        })
        .collect();
    for call in calls {
        let (answers, took) = call.await.unwrap();
        for answer in answers {
            expect_transient(answer);
        }
        // Four calls, one after the other, of two seconds and a little each.
        assert!(took < Duration::from_secs(10), "after {took:?}");
    }
    assert_eq!(
        server.health("liveness").await,
        Some(ServingStatus::Serving)
    );
    eventually("health says so", async || {
        let health = server.health(LOCK_SERVICE).await;
        (health == Some(ServingStatus::NotServing)).then_some(())
    })
    .await;

    proxy.forward().await;
    let healed = Instant::now();
    server.wait_ready().await;
    renew(&mut client, "kept", "a", token, None).await.unwrap();
    let took = healed.elapsed();
    assert!(took < Duration::from_secs(10), "healed after {took:?}");
}

/// Not in the log, not in a message, not in the words of a failed start.
#[tokio::test]
async fn the_password_of_the_database_appears_nowhere() {
    const MARKER: &str = "marker-of-a-password";
    let silent = |lines: &[String]| {
        for line in lines {
            assert!(!line.contains(MARKER), "{line}");
        }
    };
    let mut postgres = Postgres::start().await;
    let address = postgres.address();
    let good = format!("postgres://postgres:{MARKER}@{address}/postgres");
    let server = Server::builder(&good)
        .env("FENCEPOST_LOG", "debug")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    postgres.stop(Stop::Fast).await;
    for answer in every_call(&mut client, "a", 1).await {
        let status = format!("{:?}", answer.unwrap_err());
        assert!(!status.contains(MARKER), "{status}");
    }
    silent(&server.logs());

    for bad in [
        format!("postgres://postgres:{MARKER}@127.0.0.1:nonsense/postgres"),
        format!("postgres://postgres:{MARKER}@/?port=x&{MARKER}"),
        format!("{MARKER}://postgres:{MARKER}@127.0.0.1"),
        format!("host=127.0.0.1 password='{MARKER} user=x"),
    ] {
        let ended = Server::builder(&bad).spawn();
        ended.wait_exit().await;
        silent(&ended.log().lines());
    }
}
