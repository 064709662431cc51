//! What a server tells of itself at `/metrics`: the right numbers. What the README
//! lists, and what must not be there, is next door, in [`listed`].

mod dropped;
pub(crate) mod listed;
pub(crate) mod scrape;

use std::time::Duration;

use fencepost_support::{
    Postgres, Server,
    calls::{self, acquire, get, granted, refused, release, renew, request_with_id, send},
    eventually,
    postgres::fresh_database,
    row_lock::RowLock,
    wait::within,
};
use tonic::Code;

use self::scrape::Scrape;
use crate::{
    keep_alive::stage::{Stream, request, request_for},
    world::{LONG, SHORT, World, expired},
};

/// A name, and what a counter or a gauge of it should have risen by.
type Rise<'a> = (&'a str, &'a [(&'a str, &'a str)], f64);

/// Expects these differences between two scrapes.
#[track_caller]
fn assert_rises(before: &Scrape, after: &Scrape, rises: &[Rise<'_>]) {
    for (name, labels, by) in rises {
        let found = after.value(name, labels) - before.value(name, labels);
        assert_eq!(found, *by, "{name} {labels:?}");
    }
}

/// Waits until a series has this value.
pub(crate) async fn wait_for(
    server: &Server,
    name: &str,
    labels: &[(&str, &str)],
    value: f64,
) -> Scrape {
    let what = format!("{name} {labels:?} is {value}");
    within(Duration::from_secs(30), &what, async || {
        let scrape = Scrape::of(server).await;
        (scrape.value(name, labels) == value).then_some(scrape)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_counted_by_what_came_of_them() {
    let World { server, .. } = &World::start().await;
    let mut client = server.client().await;
    let before = Scrape::of(server).await;
    assert_eq!(before.value("fencepost_ready", &[]), 1.0);

    let with_id = |id| request_with_id("a", "owner", LONG, id);
    let lock = calls::grant_in(send(&mut client, with_id("1")).await);
    calls::grant_in(send(&mut client, with_id("1")).await);
    refused(&mut client, "a", "other", LONG).await;
    renew(&mut client, "a", "owner", lock.fencing_token, None)
        .await
        .unwrap();
    calls::expect_error(
        send(&mut client, with_id("1")).await,
        Code::Aborted,
        "REQUEST_SPENT",
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    release(&mut client, "a", "owner", lock.fencing_token)
        .await
        .unwrap();
    release(&mut client, "a", "owner", lock.fencing_token)
        .await
        .unwrap_err();
    get(&mut client, "a").await.unwrap_err();
    acquire(&mut client, "", "owner", LONG).await.unwrap_err();

    let after = Scrape::of(server).await;
    let of = |method| [("method", method)];
    let rpc = |method, code| [("method", method), ("code", code)];
    assert_rises(
        &before,
        &after,
        &[
            ("fencepost_acquires_total", &[("outcome", "granted")], 1.0),
            ("fencepost_acquires_total", &[("outcome", "replayed")], 1.0),
            ("fencepost_acquires_total", &[("outcome", "held")], 1.0),
            ("fencepost_acquires_total", &[("outcome", "spent")], 1.0),
            ("fencepost_rpcs_total", &rpc("Acquire", "OK"), 3.0),
            ("fencepost_rpcs_total", &rpc("Acquire", "ABORTED"), 1.0),
            (
                "fencepost_rpcs_total",
                &rpc("Acquire", "INVALID_ARGUMENT"),
                1.0,
            ),
            ("fencepost_rpcs_total", &of("Acquire"), 5.0),
            ("fencepost_rpcs_total", &rpc("Renew", "OK"), 1.0),
            ("fencepost_rpcs_total", &rpc("Release", "OK"), 1.0),
            ("fencepost_rpcs_total", &rpc("Release", "NOT_FOUND"), 1.0),
            ("fencepost_rpcs_total", &rpc("Get", "NOT_FOUND"), 1.0),
            ("fencepost_rpc_duration_seconds_count", &of("Acquire"), 5.0),
            ("fencepost_rpc_duration_seconds_count", &of("Release"), 2.0),
            ("fencepost_lease_held_seconds_count", &[], 1.0),
            ("fencepost_round_calls_sum", &[("lane", "calls")], 6.0),
            ("fencepost_round_calls_sum", &[("lane", "gets")], 1.0),
            ("fencepost_round_calls_sum", &[("lane", "renewals")], 1.0),
            ("fencepost_calls_in_flight", &[], 0.0),
            ("fencepost_calls_waiting", &[], 0.0),
        ],
    );
    let held = after.value("fencepost_lease_held_seconds_sum", &[]);
    assert!((0.3..30.0).contains(&held), "{held}");
    // The replay and the spent id go on alone, whatever the round said.
    let statement = |name| [("statement", name)];
    for (name, least) in [("acquire_all", 4.0), ("acquire", 2.0), ("release_all", 2.0)] {
        let name = &statement(name);
        let count = after.value("fencepost_statement_duration_seconds_count", name);
        assert!(count >= least, "{name:?}: {count}");
    }
    let idle = after.value("fencepost_pool_connections", &[("state", "idle")]);
    assert!(idle >= 1.0, "{idle}");
}

#[tokio::test(flavor = "multi_thread")]
async fn takeovers_of_expired_leases_are_told_apart_from_fresh_grants() {
    let World { server, .. } = &World::start().await;
    let mut client = server.client().await;
    let fresh = granted(&mut client, "released", "first", LONG).await;
    release(&mut client, "released", "first", fresh.fencing_token)
        .await
        .unwrap();
    granted(&mut client, "released", "second", LONG).await;
    // A new acquisition by the one who holds it is no takeover.
    granted(&mut client, "released", "second", LONG).await;
    expired(&mut client, "expired", "first").await;
    granted(&mut client, "expired", "second", LONG).await;
    let after = Scrape::of(server).await;
    let count = |outcome| after.value("fencepost_acquires_total", &[("outcome", outcome)]);
    assert_eq!((count("granted"), count("taken_over")), (4.0, 1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_are_told_apart_and_are_few() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--metrics-prefixes", "2")
        .ready()
        .await;
    let mut client = server.client().await;
    for name in [
        "billing/eu",
        "billing/us",
        "mail.out",
        "third/x",
        "plain",
        "a\"b/x",
    ] {
        let lock = granted(&mut client, name, "owner", LONG).await;
        refused(&mut client, name, "other", LONG).await;
        release(&mut client, name, "owner", lock.fencing_token)
            .await
            .unwrap();
    }
    let scrape = Scrape::of(&server).await;
    for (prefix, count) in [("billing", 2.0), ("mail", 1.0), ("other", 3.0)] {
        for outcome in ["granted", "refused"] {
            let labels = &[("prefix", prefix), ("outcome", outcome)];
            let found = scrape.value("fencepost_prefix_acquires_total", labels);
            assert_eq!(found, count, "{labels:?}");
        }
        let held = scrape.value("fencepost_prefix_held_seconds_count", &[("prefix", prefix)]);
        assert_eq!(held, count, "{prefix}");
    }
    let prefixes = scrape.values("fencepost_prefix_acquires", "prefix");
    assert!(prefixes.len() <= 3, "{prefixes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_tell_their_slack_and_their_losses() {
    let World { server, .. } = &World::start().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "owner", LONG).await;
    let token = lock.fencing_token;
    renew(&mut client, "a", "owner", token, None).await.unwrap();

    let over = expired(&mut client, "over", "owner").await.fencing_token;
    for (name, owner, token) in [
        ("a", "owner", token - 1),
        ("a", "owner", token + (1 << 40)),
        ("a", "other", token),
        ("over", "owner", over),
        ("nobody", "owner", token),
    ] {
        renew(&mut client, name, owner, token, None)
            .await
            .unwrap_err();
    }
    let after = Scrape::of(server).await;
    for reason in [
        "TOKEN_SUPERSEDED",
        "TOKEN_UNKNOWN",
        "NOT_OWNER",
        "LOCK_EXPIRED",
        "LOCK_NOT_FOUND",
    ] {
        let lost = |via| {
            after.value(
                "fencepost_leases_lost_total",
                &[("reason", reason), ("via", via)],
            )
        };
        assert_eq!((lost("call"), lost("stream")), (1.0, 0.0), "{reason}");
    }

    // Of releases, those of a lease that was forgotten.
    for token in [token - 1, token + (1 << 40)] {
        release(&mut client, "a", "owner", token).await.unwrap_err();
    }
    let after = Scrape::of(server).await;
    let via = ("via", "release");
    for labels in [&[via][..], &[via, ("reason", "TOKEN_UNKNOWN")]] {
        assert_eq!(after.value("fencepost_leases_lost_total", labels), 1.0);
    }
    let call = &[("via", "call")];
    assert_eq!(
        after.value("fencepost_renewal_slack_seconds_count", call),
        1.0
    );
    let slack = after.value("fencepost_renewal_slack_seconds_sum", call);
    assert!((30.0..60.0).contains(&slack), "{slack}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_counted_from_their_opening_to_their_end() {
    let World { server, .. } = &World::start().await;
    let mut client = server.client().await;
    let mut held = Vec::new();
    for name in ["left", "lost", "over"] {
        held.push(granted(&mut client, name, "owner", LONG).await);
    }
    let mut left = Stream::open(&mut client, request(&held[0])).await;
    left.next().await;
    let mut lost = Stream::open(&mut client, request(&held[1])).await;
    lost.next().await;
    let open = Scrape::of(server).await;
    assert_eq!(open.value("fencepost_streams", &[]), 2.0);
    let stream = &[("via", "stream")];
    assert_eq!(
        open.value("fencepost_renewal_slack_seconds_count", stream),
        2.0
    );
    let slack = open.value("fencepost_renewal_slack_seconds_sum", stream);
    assert!((60.0..120.0).contains(&slack), "{slack}");
    assert_eq!(
        open.value("fencepost_rpcs_total", &[("method", "KeepAlive")]),
        0.0
    );

    drop(left);
    // One that opens a lease that was released in between hears it at once.
    drop(lost);
    release(&mut client, "lost", "owner", held[1].fencing_token)
        .await
        .unwrap();
    let mut lost = Stream::open(&mut client, request(&held[1])).await;
    assert_eq!(lost.try_next().await.unwrap_err().code(), Code::NotFound);
    let mut over = Stream::open(&mut client, request_for(&held[2], SHORT)).await;
    while over.try_next().await.is_ok() {}

    let ended = wait_for(server, "fencepost_streams", &[], 0.0).await;
    let reason = |reason| ended.value("fencepost_streams_ended_total", &[("reason", reason)]);
    assert_eq!(reason("CANCELLED"), 2.0);
    assert_eq!(reason("LOCK_NOT_FOUND"), 1.0);
    assert_eq!(reason("REOPEN"), 1.0);
    assert_eq!(ended.value("fencepost_streams_ended_total", &[]), 4.0);
    let lost = &[("via", "stream"), ("reason", "LOCK_NOT_FOUND")];
    assert_eq!(ended.value("fencepost_leases_lost_total", lost), 1.0);
    let code = |code| [("method", "KeepAlive"), ("code", code)];
    wait_for(
        server,
        "fencepost_rpcs_total",
        &[("method", "KeepAlive")],
        4.0,
    )
    .await;
    let ended = Scrape::of(server).await;
    for (name, count) in [("CANCELLED", 2.0), ("NOT_FOUND", 1.0), ("UNAVAILABLE", 1.0)] {
        assert_eq!(
            ended.value("fencepost_rpcs_total", &code(name)),
            count,
            "{name}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn live_leases_and_purged_names_are_counted() {
    let database = fresh_database().await;
    drop(Server::start(&database.url()).await);
    // More than a page, most of which are over.
    let admin = database.client().await;
    admin
        .run(
            "INSERT INTO fencepost.locks
             SELECT 'fill/' || n, 'owner', n % 3 = 0, n + 1, n, 60000, now(),
                    now() + CASE WHEN n % 5 = 0 THEN interval '1 day' ELSE interval '-1 day' END,
                    false, '', gen_random_uuid(), 1, '{}'
               FROM generate_series(1, 3000) AS n",
        )
        .await;
    let server = Server::builder(&database.url())
        .flag("--request-timeout", "500ms")
        .flag("--purge-retention", "8s")
        .flag("--purge-retention-floor", "1s")
        .start()
        .await;
    // A quarter of the retention after the start; purge waits for all of it.
    wait_for(&server, "fencepost_live_leases", &[], 400.0).await;
    wait_for(&server, "fencepost_purged_rows_total", &[], 2400.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_and_its_leap_are_counted() {
    let mut postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let absolute = &[("kind", "absolute")];
    let before = Scrape::of(&server).await;
    assert_eq!(before.value("fencepost_token_leaps_total", absolute), 1.0);
    postgres.kill9().await;
    let away = wait_for(&server, "fencepost_ready", &[], 0.0).await;
    assert!(away.value("fencepost_pool_failures_total", &[("pool", "probes")]) >= 1.0);
    postgres.start_again().await;
    let back = wait_for(&server, "fencepost_ready", &[], 1.0).await;
    assert_rises(
        &before,
        &back,
        &[
            ("fencepost_token_leaps_total", absolute, 1.0),
            ("fencepost_token_leaps_total", &[("kind", "relative")], 0.0),
            ("fencepost_clock_steps_total", &[], 0.0),
        ],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_of_a_drained_server_is_refused_and_of_a_draining_one_is_not() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "3s")
        .start()
        .await;
    server.wait_ready().await;
    server.sigterm();
    wait_for(&server, "fencepost_ready", &[], 0.0).await;
    eventually("the port closes", async || {
        let gone = tokio::net::TcpStream::connect(server.http()).await;
        gone.is_err().then_some(())
    })
    .await;
    assert!(server.wait_exit().await.success());
}

/// What a drain does can be seen while it does it.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_can_be_scraped_to_its_end() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "0s")
        .ready()
        .await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "kept", "owner", LONG).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    stream.next().await;
    let lock = granted(&mut client, "a", "owner", LONG).await;
    let row = RowLock::hold(&database.url(), "a").await;
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { release(&mut client, "a", "owner", lock.fencing_token).await }
    });
    row.wait_for_waiters(1).await;
    server.sigterm();
    stream.expect_end(Code::Unavailable, "DRAINING").await;
    let draining = Scrape::of(&server).await;
    let ended = [("reason", "DRAINING")];
    assert_eq!(draining.value("fencepost_streams_ended_total", &ended), 1.0);
    assert_eq!(draining.value("fencepost_ready", &[]), 0.0);
    assert_eq!(crate::health::get(server.http(), "/readyz").await.0, 503);
    row.rollback().await;
    call.await.unwrap().unwrap();
    assert!(server.wait_exit().await.success());
}
