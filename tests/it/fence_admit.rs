//! `fence.admit`: which tokens it lets in, alone and next to others.

use fencepost_support::postgres::Client;

use crate::fence_world::{LEVELS, admit, blocked, fenced, highest, pid, rejected, state};

#[tokio::test(flavor = "multi_thread")]
async fn an_older_token_is_refused_and_an_equal_one_admitted() {
    let database = fenced().await;
    let client = database.client().await;
    for (token, expected, then) in [
        (5, "00000", 5),
        (5, "00000", 5),
        (4, "FP409", 5),
        (1, "FP409", 5),
        (6, "00000", 6),
        ((1 << 53) - 1, "00000", (1 << 53) - 1),
        (6, "FP409", (1 << 53) - 1),
    ] {
        assert_eq!(state(admit(&client, "r", token).await), expected, "{token}");
        assert_eq!(highest(&client, "r").await, then, "after {token}");
    }
    assert_eq!(state(admit(&client, "another", 1).await), "00000");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_says_what_to_do() {
    let database = fenced().await;
    let client = database.client().await;
    admit(&client, "r", 7).await.unwrap();
    let error = admit(&client, "r", 5).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(
        error.message(),
        "fencing token is older than the highest one seen"
    );
    assert_eq!(
        error.detail(),
        Some("Resource \"r\": token 5, highest seen 7.")
    );
    assert!(error.hint().unwrap().contains("Stop working"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_a_token_or_a_name_is_refused() {
    let database = fenced().await;
    let client = database.client().await;
    let long = "x".repeat(513);
    for call in [
        "'r', 0",
        "'r', -1",
        "'r', -9223372036854775808",
        "'r', 9007199254740992",
        "'r', 9223372036854775807",
        "'r', NULL",
        "NULL, 1",
        "NULL, NULL",
        "'', 1",
        &format!("'{long}', 1"),
    ] {
        let answer = client
            .batch_execute(&format!("SELECT fence.admit({call})"))
            .await;
        assert_eq!(state(answer), "22023", "{call}");
    }
    assert_eq!(highest(&client, "r").await, 0);
    assert_eq!(rejected(&client).await, 0);
    assert_eq!(state(admit(&client, &long[1..], 1).await), "00000");
}

/// Session A has shown 5 and not ended; session B shows another token, waits, and
/// A ends. B never gets in with an older token, on any level, whether or not the
/// row was there before.
#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_are_told_apart() {
    let database = fenced().await;
    let (a, b, observer) = (
        database.client().await,
        database.client().await,
        database.client().await,
    );
    let waiting = pid(&b).await;
    let mut n = 0;
    for level in LEVELS {
        for first in [true, false] {
            for end in ["COMMIT", "ROLLBACK"] {
                for token in [4, 5, 6] {
                    n += 1;
                    let case = format!("{level}, first: {first}, {end}, {token}");
                    let resource = format!("r{n}");
                    if !first {
                        admit(&a, &resource, 5).await.unwrap();
                    }
                    a.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
                    admit(&a, &resource, 5).await.unwrap();
                    b.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
                    let (answer, ()) = tokio::join!(admit(&b, &resource, token), async {
                        blocked(&observer, waiting).await;
                        a.run(end).await;
                    });
                    let seen_five = !first || end == "COMMIT";
                    let expected = match (level, end) {
                        // B's snapshot is from before A's end.
                        ("REPEATABLE READ" | "SERIALIZABLE", "COMMIT") => "40001",
                        _ if seen_five && token < 5 => "FP409",
                        _ => "00000",
                    };
                    assert_eq!(state(answer), expected, "{case}");
                    b.run("COMMIT").await;
                    // And again, as a transaction that follows.
                    b.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
                    let again = if seen_five && token < 5 {
                        "FP409"
                    } else {
                        "00000"
                    };
                    assert_eq!(state(admit(&b, &resource, token).await), again, "{case}");
                    b.run("COMMIT").await;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_rolled_back_was_not_shown() {
    let database = fenced().await;
    let client = database.client().await;
    client.run("BEGIN").await;
    admit(&client, "r", 9).await.unwrap();
    client.run("ROLLBACK").await;
    assert_eq!(state(admit(&client, "r", 5).await), "00000");

    client.run("BEGIN; SAVEPOINT s").await;
    admit(&client, "r", 9).await.unwrap();
    client.run("ROLLBACK TO s; COMMIT").await;
    assert_eq!(highest(&client, "r").await, 5);
    assert_eq!(state(admit(&client, "r", 6).await), "00000");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejections_are_counted_although_they_roll_back() {
    let database = fenced().await;
    let client = database.client().await;
    assert_eq!(rejected(&client).await, 0);
    admit(&client, "r", 7).await.unwrap();
    for n in 1..=3 {
        client.run("BEGIN").await;
        assert_eq!(state(admit(&client, "r", 6).await), "FP409");
        client.run("ROLLBACK").await;
        assert_eq!(rejected(&client).await, n);
    }
    // Also where the error is caught and never reaches the server's log.
    client
        .run("DO $$ BEGIN PERFORM fence.admit('r', 6); EXCEPTION WHEN SQLSTATE 'FP409' THEN END $$")
        .await;
    assert_eq!(rejected(&client).await, 4);
    admit(&client, "r", 8).await.unwrap();
    assert_eq!(rejected(&client).await, 4);
}

/// A holder with token 5 that has admitted and written 1, not yet committed.
async fn writes_one(a: &Client) {
    a.run(
        "CREATE TABLE register (value int); INSERT INTO register VALUES (0);
         SELECT fence.admit('r', 5)",
    )
    .await;
    a.run("BEGIN; SELECT fence.admit('r', 5); UPDATE register SET value = 1")
        .await;
}

/// Runs `query` while the holder of [`writes_one`] commits.
async fn reads_meanwhile(a: &Client, b: &Client, observer: &Client, query: &str) -> String {
    let waiting = pid(b).await;
    let (answer, ()) = tokio::join!(b.query(query, &[]), async {
        blocked(observer, waiting).await;
        a.run("COMMIT").await;
    });
    match answer {
        Ok(rows) if rows[0].len() == 2 => rows[0].get::<_, i32>(1).to_string(),
        answer => state(answer),
    }
}

/// Documented wrong use: the admit waits for the other holder, and the read next
/// to it does not see what that one wrote.
#[tokio::test(flavor = "multi_thread")]
async fn in_one_statement_with_the_read_it_is_too_late() {
    let database = fenced().await;
    let (a, b, observer) = (
        database.client().await,
        database.client().await,
        database.client().await,
    );
    writes_one(&a).await;
    let together = "SELECT fence.admit('r', 6), value FROM register";
    assert_eq!(reads_meanwhile(&a, &b, &observer, together).await, "0");
    assert_eq!(b.value::<i32>("SELECT value FROM register").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn as_a_statement_of_its_own_the_read_after_it_is_fresh() {
    for level in LEVELS {
        let database = fenced().await;
        let (a, b, observer) = (
            database.client().await,
            database.client().await,
            database.client().await,
        );
        writes_one(&a).await;
        b.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
        let answer = reads_meanwhile(&a, &b, &observer, "SELECT fence.admit('r', 6)").await;
        if level == "READ COMMITTED" {
            assert_eq!(answer, "00000", "{level}");
        } else {
            // Its snapshot is an old one, and it is told so, although the other
            // token was there before and did not change.
            assert_eq!(answer, "40001", "{level}");
            b.run(&format!("ROLLBACK; BEGIN ISOLATION LEVEL {level}"))
                .await;
            admit(&b, "r", 6).await.unwrap();
        }
        assert_eq!(b.value::<i32>("SELECT value FROM register").await, 1);
        b.run("COMMIT").await;
    }
}

/// A holder that froze inside its transaction holds the row until the database
/// ends its session, and then has written nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_frozen_in_a_transaction_is_cut_off() {
    let database = fenced().await;
    let (a, b, observer) = (
        database.client().await,
        database.client().await,
        database.client().await,
    );
    b.run("CREATE TABLE register AS SELECT 0 AS value").await;
    a.run("SET idle_in_transaction_session_timeout = '300ms'; BEGIN")
        .await;
    admit(&a, "r", 5).await.unwrap();
    a.run("UPDATE register SET value = 5").await;
    let waiting = pid(&b).await;
    let (answer, ()) = tokio::join!(admit(&b, "r", 6), blocked(&observer, waiting));
    assert_eq!(state(answer), "00000");
    assert!(a.batch_execute("COMMIT").await.is_err());
    assert_eq!(b.value::<i32>("SELECT value FROM register").await, 0);
}

/// One transaction may show its token as often as it likes, and leaves one new
/// version of the row.
#[tokio::test(flavor = "multi_thread")]
async fn showing_a_token_again_costs_nothing() {
    let database = fenced().await;
    let client = database.client().await;
    admit(&client, "r", 5).await.unwrap();
    client.run("BEGIN").await;
    let place = "SELECT ctid::text FROM fence.tokens";
    let before: String = client.value(place).await;
    admit(&client, "r", 5).await.unwrap();
    let first: String = client.value(place).await;
    for _ in 0..10 {
        admit(&client, "r", 5).await.unwrap();
    }
    let last: String = client.value(place).await;
    assert_ne!(first, before);
    assert_eq!(last, first);
    admit(&client, "r", 6).await.unwrap();
    client.run("COMMIT").await;
    assert_eq!(highest(&client, "r").await, 6);
}
