//! Where tokens start, and `fencepostd advance-tokens`.

use std::time::Duration;

use fencepost_support::{
    Server, eventually,
    postgres::{Stop, fresh_database},
};

use crate::tokens::{
    LONG, Load, Record, TICKS_PER_SECOND, advance_tokens, by_clock, leaps, position,
    quick_to_recover,
};

/// Of the exit codes in the manual: the command line asks for what cannot be.
const USAGE: Option<i32> = Some(64);

const DAY: i64 = 86_400 * TICKS_PER_SECOND;

#[tokio::test]
async fn a_fresh_database_starts_at_its_clock() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let before = by_clock(&session).await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let lock = record.granted(&mut client, "first", "owner", LONG).await;
    let after = by_clock(&session).await;
    let token = lock.fencing_token;
    assert!(
        before <= token && token <= after,
        "{before} <= {token} <= {after}"
    );
    // Too large for 32 bits from day one, exact in a double for decades.
    assert!(token > 1 << 32);
    assert!(after + 50 * 366 * DAY < 1 << 53);
    // From there it counts.
    let next = record.granted(&mut client, "second", "owner", LONG).await;
    assert!(next.fencing_token - token < 100);
    assert_eq!(leaps(&server), 0);
}

#[tokio::test]
async fn tokens_are_advanced_to_the_clock_or_as_far_as_told() {
    let database = fresh_database().await;
    let session = database.client().await;
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    record.burst(&mut client, "hot", 3).await;

    let now = by_clock(&session).await;
    let (status, lines) = advance_tokens(&database.url(), &[]).await;
    assert!(status.success(), "{lines:?}");
    let at = position(&session).await;
    assert!(now <= at && at <= by_clock(&session).await, "{now}, {at}");
    assert!(lines.iter().any(|line| line.contains(&at.to_string())));
    let lock = record.granted(&mut client, "hot", "next", LONG).await;
    assert!(lock.fencing_token >= at);

    let told = by_clock(&session).await + 30 * DAY;
    let (status, lines) = advance_tokens(&database.url(), &["--at-least", &told.to_string()]).await;
    assert!(status.success(), "{lines:?}");
    let lock = record.granted(&mut client, "new", "next", LONG).await;
    assert!(lock.fencing_token >= told);
    assert!(lock.fencing_token < told + DAY);

    // Ahead of the clock now, and still only upwards.
    let (status, lines) = advance_tokens(&database.url(), &[]).await;
    assert!(status.success(), "{lines:?}");
    let above = record.granted(&mut client, "newer", "next", LONG).await;
    assert!(above.fencing_token > lock.fencing_token);
    record.assert_rising();
}

#[tokio::test]
async fn tokens_are_never_lowered_and_not_made_absurd_without_force() {
    let database = fresh_database().await;
    let url = database.url();
    let session = database.client().await;
    let record = Record::new();
    let server = Server::start(&url).await;
    record.burst(&mut server.client().await, "hot", 3).await;
    let highest = record.highest();
    let absurd = (by_clock(&session).await + 800 * DAY).to_string();
    let exhausted = ((1_i64 << 53) - 1).to_string();
    let beyond = (1_i64 << 53).to_string();
    for words in [
        &["--at-least", "1"][..],
        &["--at-least", &(highest - 1).to_string()],
        &["--at-least", &highest.to_string()],
        &["--at-least", &highest.to_string(), "--force"],
        &["--at-least", "0"],
        &["--at-least", "-5"],
        &["--at-least", "soon"],
        &["--at-least", &absurd],
        &["--at-least", &exhausted],
        &["--at-least", &exhausted, "--force"],
        &["--at-least", &beyond, "--force"],
        &["--at-least", &i64::MAX.to_string(), "--force"],
        &["--force"],
    ] {
        let (status, lines) = advance_tokens(&url, words).await;
        assert_eq!(status.code(), USAGE, "{words:?}: {lines:?}");
        assert_eq!(position(&session).await, highest, "{words:?}");
    }
    let (status, lines) = advance_tokens(&url, &["--at-least", &absurd, "--force"]).await;
    assert!(status.success(), "{lines:?}");
    let lock = record
        .granted(&mut server.client().await, "hot", "next", LONG)
        .await;
    assert!(lock.fencing_token >= absurd.parse().unwrap());
    record.assert_rising();
}

#[tokio::test]
async fn tokens_are_advanced_while_servers_serve_and_nothing_fails() {
    let database = fresh_database().await;
    let url = database.url();
    let record = Record::new();
    let (one, two) = tokio::join!(Server::start(&url), Server::start(&url));
    let load = Load::start(&record, &[&one, &two], 4, 12).await;
    for round in 0..5 {
        load.more(100).await;
        let highest = record.highest();
        let (status, lines) = advance_tokens(&url, &[]).await;
        assert!(status.success(), "{lines:?}");
        // Whoever asks from now on is above all that was answered before.
        let lock = record
            .granted(
                &mut one.client().await,
                &format!("new-{round}"),
                "next",
                LONG,
            )
            .await;
        assert!(lock.fencing_token > highest + TICKS_PER_SECOND / 100);
        load.more(50).await;
    }
    let failed = load.stop().await;
    assert!(failed.is_empty(), "{} calls: {:?}", failed.len(), failed[0]);
    record.assert_rising();
    let slowest = record
        .grants()
        .iter()
        .map(|grant| grant.answered - grant.asked)
        .max();
    assert!(slowest < Some(Duration::from_secs(4)), "{slowest:?}");
    assert_eq!((leaps(&one), leaps(&two)), (0, 0));
}

/// A clock that was once far ahead: the leap still goes up, says so, and the
/// tokens stay exact in a double.
#[tokio::test]
async fn tokens_ahead_of_the_clock_leap_relatively_and_it_is_logged_as_an_error() {
    let mut postgres = quick_to_recover().await;
    let url = postgres.url();
    let record = Record::new();
    let server = Server::start(&url).await;
    let mut client = server.client().await;
    record.burst(&mut client, "hot", 3).await;
    let ahead = by_clock(&postgres.admin().await).await + 800 * DAY;
    let (status, lines) =
        advance_tokens(&url, &["--at-least", &ahead.to_string(), "--force"]).await;
    assert!(status.success(), "{lines:?}");
    for round in 1..=2 {
        record.burst(&mut client, "hot", 3).await;
        let highest = record.highest();
        assert!(highest >= ahead);
        postgres.restart(Stop::Immediate).await;
        let lock = record.granted(&mut client, "fresh", "next", LONG).await;
        let leapt = lock.fencing_token - highest;
        // By 2^28, counted from where the crash left the sequence.
        assert!((1 << 28..1 << 29).contains(&leapt), "{leapt}");
        fencepost_support::calls::release(&mut client, "fresh", "next", lock.fencing_token)
            .await
            .unwrap();
        eventually("it is logged as an error", async || {
            let lines = server.logs();
            let errors = lines
                .iter()
                .filter(|line| line.contains("leaps are relative") && line.contains("ERROR"));
            (errors.count() >= round).then_some(())
        })
        .await;
    }
    record.assert_rising();
}
