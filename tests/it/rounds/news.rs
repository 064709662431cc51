//! What became of a row after the statement of a round had begun.

use std::iter;

use fencepost_proto::v1::AcquireResponse;
use fencepost_support::calls::{acquire, grant_in, granted, refusal_in, release};
use tonic::Status;

use super::stage::{LONG, Stage};

const TAKE: &str = "UPDATE fencepost.locks SET owner = 'psql', released = false,
    prev_token = fencing_token, fencing_token = nextval('fencepost.fencing_tokens'),
    expires_at = clock_timestamp() + interval '60 s' WHERE resource = '$R'";
const REVIVE: &str = "UPDATE fencepost.locks SET released = false,
    expires_at = clock_timestamp() + interval '60 s' WHERE resource = '$R'";
const RELEASE: &str = "UPDATE fencepost.locks SET released = true,
    expires_at = clock_timestamp() WHERE resource = '$R'";
const INSERT: &str = "INSERT INTO fencepost.locks VALUES ('$R', 'psql', false,
    nextval('fencepost.fencing_tokens'), 0, 60000, clock_timestamp(),
    clock_timestamp() + interval '60 s', false, '', gen_random_uuid(), 1, '{}')";
const DELETE: &str = "DELETE FROM fencepost.locks WHERE resource = '$R'";

/// Who holds it before.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Nobody,
    Released,
    Expired,
    Other,
    Asker,
}

/// What the asker must hear.
#[derive(Clone, Copy, Debug)]
enum Truth {
    Held(&'static str),
    Granted,
    /// It was held when the statement began, and is free when it ends.
    Either,
}

type Case = (Before, &'static [&'static str], Truth);

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_version_of_a_row_decides_and_not_the_one_that_was_looked_up() {
    run(&[
        (Before::Released, &[TAKE], Truth::Held("psql")),
        (Before::Released, &[TAKE, RELEASE], Truth::Granted),
        (Before::Released, &[REVIVE], Truth::Held("before")),
        (Before::Expired, &[TAKE], Truth::Held("psql")),
        (Before::Expired, &[REVIVE], Truth::Held("before")),
        (Before::Expired, &[TAKE, RELEASE], Truth::Granted),
        (Before::Other, &[RELEASE], Truth::Either),
        (Before::Other, &[TAKE], Truth::Either),
        (Before::Asker, &[TAKE], Truth::Held("psql")),
        (Before::Asker, &[RELEASE], Truth::Granted),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_came_or_went_is_seen_as_it_is() {
    run(&[
        (Before::Released, &[TAKE, RELEASE], Truth::Granted),
        (Before::Released, &[DELETE], Truth::Granted),
        (Before::Released, &[DELETE, INSERT], Truth::Held("psql")),
        (Before::Nobody, &[INSERT], Truth::Held("psql")),
        (Before::Nobody, &[INSERT, RELEASE], Truth::Granted),
    ])
    .await;
}

/// On a busy machine a round that is held may be given up for stuck, and the calls
/// not make one statement.
async fn run(cases: &[Case]) {
    for _ in 0..10 {
        if run_once(cases).await {
            return;
        }
    }
    panic!("not staged: this machine is too busy");
}

/// Asks for the lock of each case in one statement, which stands still after its
/// first row until the news have come. False when they were not in one.
async fn run_once(cases: &[Case]) -> bool {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    let name = |n: usize| format!("case {n}");
    for gate in ["!1", "!2"] {
        granted(&mut client, gate, "gate", LONG).await;
    }
    for (n, (before, ..)) in cases.iter().enumerate() {
        let owner = if *before == Before::Asker {
            "asker"
        } else {
            "before"
        };
        if *before == Before::Nobody {
            continue;
        }
        let lock = granted(&mut client, &name(n), owner, LONG).await;
        match before {
            Before::Released => release(&mut client, &name(n), owner, lock.fencing_token)
                .await
                .unwrap(),
            Before::Expired => {
                let query = format!(
                    "UPDATE fencepost.locks SET expires_at = clock_timestamp() - interval '1 s'
                      WHERE resource = '{}'",
                    name(n)
                );
                stage.psql.run(&query).await;
            }
            _ => {}
        }
    }

    let held = stage.hold_round("!1").await;
    // The first row of the next statement, which the others come behind.
    stage.close("!2").await;
    let ask = |name: String, owner: &'static str| {
        let mut client = stage.client.clone();
        async move { acquire(&mut client, &name, owner, LONG).await }
    };
    let gate = ask("!2".to_owned(), "gate");
    let all = iter::once(gate).chain((0..cases.len()).map(|n| ask(name(n), "asker")));
    let sent = stage.send(all).await;
    stage.open("!1").await;
    held.await.unwrap();
    stage.wait_at_gate().await;
    if stage.asked_for().await != i64::try_from(cases.len()).unwrap() + 1 {
        stage.open("!2").await;
        sent.answers().await;
        return false;
    }
    stage.psql.run("SET statement_timeout = '5s'").await;
    for (n, (_, news, _)) in cases.iter().enumerate() {
        for news in *news {
            stage.psql.run(&news.replace("$R", &name(n))).await;
        }
    }
    let token = |n| {
        format!(
            "SELECT coalesce(max(fencing_token), 0) FROM fencepost.locks WHERE resource = '{}'",
            name(n)
        )
    };
    let mut tokens = Vec::new();
    for n in 0..cases.len() {
        tokens.push(stage.psql.value::<i64>(&token(n)).await);
    }
    stage.open("!2").await;
    let mut answers = sent.answers().await.into_iter();
    grant_in(answers.next().unwrap());
    for (n, answer) in answers.enumerate() {
        check(n, answer, cases[n].2, tokens[n]);
    }
    // They were in that statement, and not alone after it.
    let beside: i64 = stage
        .psql
        .value(
            "SELECT count(*) FROM fencepost.locks AS g JOIN fencepost.locks AS c ON c.xmin = g.xmin
              WHERE g.resource = '!2' AND c.resource LIKE 'case %'",
        )
        .await;
    assert!(beside > 0);
    let fallen: i64 = stage
        .psql
        .value("SELECT count(*) FROM fencepost.locks WHERE fencing_token <= prev_token")
        .await;
    assert_eq!(fallen, 0);
    true
}

fn check(n: usize, answer: Result<AcquireResponse, Status>, truth: Truth, token: i64) {
    match truth {
        Truth::Held(owner) => assert_eq!(refusal_in(answer).owner, owner, "case {n}"),
        Truth::Granted => assert!(grant_in(answer).fencing_token > token, "case {n}"),
        Truth::Either => {
            if answer.as_ref().is_ok_and(|answer| answer.acquired) {
                assert!(grant_in(answer).fencing_token > token, "case {n}");
            } else {
                refusal_in(answer);
            }
        }
    }
}
