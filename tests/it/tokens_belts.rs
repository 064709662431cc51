//! The three belts, for what the identity cannot see: a sequence that was set
//! back by hand, as a data-only restore into the same tables does.

use std::time::Duration;

use fencepost_support::{Server, calls, eventually, postgres::fresh_database};
use tokio::task::JoinSet;

use crate::{
    metrics::scrape::Scrape,
    tokens::{LONG, Record, advance_tokens, expect_leaps, leaps, position},
};

const MOMENT: Duration = Duration::from_millis(300);

/// Sets the sequence back, so that the next token would be `to` + 1.
async fn set_back(session: &fencepost_support::postgres::Client, to: i64) {
    session
        .run(&format!("SELECT setval('fencepost.fencing_tokens', {to})"))
        .await;
}

/// The belt of the row: its check refuses, whoever asks.
#[tokio::test]
async fn a_sequence_behind_the_rows_leaps_by_itself() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    record.burst(&mut server.client().await, "hot", 3).await;
    let held = record
        .granted(&mut server.client().await, "held", "holder", LONG)
        .await;
    for back_to in [1000, record.highest() - 2] {
        set_back(&session, back_to).await;
        let mut client = server.client().await;
        let (highest, before) = (record.highest(), leaps(&server));
        let lock = record.granted(&mut client, "hot", "next", LONG).await;
        assert!(lock.fencing_token > highest);
        expect_leaps(&[&server], before + 1).await;
        calls::release(&mut client, "hot", "next", lock.fencing_token)
            .await
            .unwrap();
        assert!(position(&session).await >= lock.fencing_token);
        let held = calls::renew(&mut client, "held", "holder", held.fencing_token, None).await;
        held.unwrap();
    }
    record.assert_rising();
}

/// The belt of the leap: no token is below where the last one went. The end of
/// a plain dump sets the sequence back after a leap in its middle.
#[tokio::test]
async fn a_sequence_behind_the_last_leap_leaps_by_itself() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    record.granted(&mut client, "old", "holder", LONG).await;
    set_back(&session, 1000).await;
    // No row stands behind a new name.
    let (highest, before) = (record.highest(), leaps(&server));
    let lock = record.granted(&mut client, "new", "next", LONG).await;
    assert!(lock.fencing_token > highest);
    expect_leaps(&[&server], before + 1).await;
}

/// The belt of the server: it remembers the highest token that it has seen,
/// granted, renewed or looked up.
#[tokio::test]
async fn a_token_below_what_a_server_has_seen_is_given_back_and_forces_a_leap() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    record.burst(&mut client, "hot", 20).await;
    let held = record.granted(&mut client, "held", "holder", LONG).await;
    let url = database.url();
    let (by_get, by_renew) = tokio::join!(Server::start(&url), Server::start(&url));
    calls::get(&mut by_get.client().await, "held")
        .await
        .unwrap();
    let mut renewing = by_renew.client().await;
    calls::renew(&mut renewing, "held", "holder", held.fencing_token, None)
        .await
        .unwrap();

    for (n, server) in [&server, &by_get, &by_renew].into_iter().enumerate() {
        let highest = record.highest();
        // Twenty names as new as can be: the row's check knows none of them.
        set_back(&session, held.fencing_token - 20).await;
        let before = leaps(server);
        let name = format!("new-{n}");
        let mut client = server.client().await;
        let lock = record.granted(&mut client, &name, "first", LONG).await;
        assert!(lock.fencing_token > highest);
        expect_leaps(&[server], before + 1).await;
        let found = calls::get(&mut client, &name).await.unwrap();
        assert_eq!(found.fencing_token, lock.fencing_token);
    }
}

/// How often a server has asked how the database is.
async fn probes(server: &Server) -> f64 {
    let name = "fencepost_statement_duration_seconds_count";
    Scrape::of(server)
        .await
        .value(name, &[("statement", "probe")])
}

/// What a server has seen is also what the others have drawn: its probes ask.
#[tokio::test]
async fn an_idle_server_knows_how_far_the_tokens_of_others_have_come() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let url = database.url();
    let (busy, idle) = tokio::join!(Server::start(&url), Server::start(&url));
    idle.wait_ready().await;
    let low = record
        .granted(&mut busy.client().await, "low", "holder", LONG)
        .await;
    record.burst(&mut busy.client().await, "hot", 50).await;
    let asked = probes(&idle).await;
    eventually("it asks twice more", async || {
        (probes(&idle).await >= asked + 2.0).then_some(())
    })
    .await;
    set_back(&session, low.fencing_token).await;
    let (highest, before) = (record.highest(), leaps(&idle));
    let mut client = idle.client().await;
    let lock = record.granted(&mut client, "new", "next", LONG).await;
    assert!(lock.fencing_token > highest);
    expect_leaps(&[&idle], before + 1).await;
}

#[tokio::test]
async fn many_callers_at_once_trip_the_belts_and_all_get_larger_tokens() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let url = database.url();
    let (one, two) = tokio::join!(Server::start(&url), Server::start(&url));
    for round in 0..5 {
        // Both have seen the highest token: one gave it, the other was asked.
        let top = format!("top-{round}");
        record
            .granted(&mut one.client().await, &top, "holder", LONG)
            .await;
        calls::get(&mut two.client().await, &top).await.unwrap();
        let highest = record.highest();
        set_back(&session, highest - 60).await;
        let mut callers = JoinSet::new();
        for n in 0..24 {
            let mut client = [&one, &two][n % 2].client().await;
            let record = std::sync::Arc::clone(&record);
            // Names that exist, and names that do not.
            let name = if n % 3 == 0 {
                format!("old-{n}")
            } else {
                format!("new-{round}-{n}")
            };
            callers.spawn(async move {
                let lock = record.granted(&mut client, &name, "caller", LONG).await;
                calls::release(&mut client, &name, "caller", lock.fencing_token)
                    .await
                    .unwrap();
                lock
            });
        }
        while let Some(lock) = callers.join_next().await {
            let lock = lock.unwrap();
            assert!(
                lock.fencing_token > highest,
                "{lock:?} is not above {highest}"
            );
        }
    }
    record.assert_rising();
}

/// The leap of a server that starts comes before its first grant, not after one that is given
/// back: with that would go what the owner has.
#[tokio::test]
async fn a_server_that_starts_gives_back_no_lease_of_an_owner_that_acquires_anew() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let old = Server::start(&database.url()).await;
    let before = record
        .granted(&mut old.client().await, "name", "holder", LONG)
        .await;
    session
        .run(
            "CREATE TABLE public.seen AS
                 SELECT fencing_token FROM fencepost.locks WHERE false;
             CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO public.seen VALUES (NEW.fencing_token);
                 RETURN NEW;
             END $$;
             CREATE TRIGGER see BEFORE UPDATE ON fencepost.locks
                 FOR EACH ROW EXECUTE FUNCTION public.see()",
        )
        .await;
    // No server can leap.
    session
        .run("BEGIN; SELECT FROM fencepost.identity FOR UPDATE")
        .await;
    let new = Server::builder(&database.url()).start().await;
    let mut client = new.client().await;
    let mut again = Box::pin(record.granted(&mut client, "name", "holder", LONG));
    let early = tokio::time::timeout(MOMENT, &mut again).await;
    session.run("COMMIT").await;
    assert!(early.is_err(), "a grant before the leap");
    let again = again.await;
    assert!(again.fencing_token > before.fencing_token);
    let seen: i64 = session.value("SELECT count(*) FROM public.seen").await;
    assert_eq!(seen, 1, "the row has changed more than once");
}

/// A fresh server, a name without a row: no belt sees it.
#[tokio::test]
async fn after_a_data_only_restore_a_server_that_starts_leaps() {
    data_only_restore(false).await;
}

#[tokio::test]
async fn after_a_data_only_restore_tokens_may_be_advanced_by_hand() {
    data_only_restore(true).await;
}

async fn data_only_restore(by_hand: bool) {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    record.burst(&mut client, "hot", 5).await;
    let dump = postgres
        .dump(name, &["--data-only", "--schema=fencepost"])
        .await;
    record.burst(&mut client, "lost", 60).await;
    drop(server);

    let session = database.client().await;
    session
        .run("TRUNCATE fencepost.locks, fencepost.identity, fencepost.migrations")
        .await;
    postgres.psql(name, &dump).await;
    let highest = record.highest();
    assert!(position(&session).await < highest);
    if by_hand {
        let (status, lines) = advance_tokens(&database.url(), &[]).await;
        assert!(status.success(), "{lines:?}");
        assert!(position(&session).await > highest);
    }

    let fresh = Server::start(&database.url()).await;
    let lock = record
        .granted(&mut fresh.client().await, "lost", "next", LONG)
        .await;
    assert!(lock.fencing_token > highest);
    record.assert_rising();
}
