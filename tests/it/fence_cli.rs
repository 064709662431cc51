//! `fencepost fence`: the command line that installs the kit and looks after it.

use fencepost_support::{
    postgres::{Database, fresh_database},
    wait::within,
};
use serde_json::{Value, json};

use crate::{
    fence_world::{KIT, admit, fenced, highest, state},
    programs::{Ended, bare, cli, run},
    world::LONG,
};

/// `fencepost fence`, with the URL in its environment.
async fn fence(database: &Database, arguments: &[&str]) -> Ended {
    let mut command = bare(cli());
    command
        .env("FENCEPOST_FENCE_DATABASE_URL", database.url())
        // Nobody listens there, and nobody needs to.
        .env("FENCEPOST_ENDPOINT", "not an endpoint")
        .arg("fence")
        .args(arguments);
    run(command).await
}

fn json(ended: &Ended) -> Value {
    let mut value: Value = serde_json::from_str(&ended.stdout).unwrap();
    if let Some(at) = value.as_object_mut().unwrap().remove("admitted_at") {
        assert!(at.as_str().unwrap().ends_with('Z'), "{at}");
    }
    value
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_installs_checks_and_resets() {
    let database = fresh_database().await;
    let none = fence(&database, &["check", "r"]).await;
    assert_eq!((none.code, none.stdout.as_str()), (Some(78), ""));
    assert!(
        none.stderr.contains("fencepost fence install"),
        "{}",
        none.stderr
    );

    for _ in 0..2 {
        let installed = fence(&database, &["install"]).await;
        assert_eq!(installed.code, Some(0), "{}", installed.stderr);
        assert_eq!(installed.said(), "installed: true\n");
    }
    let printed = fence(&database, &["install", "--print"]).await;
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), KIT));

    let client = database.client().await;
    let unseen = fence(
        &database,
        &["check", "r", "--token", "1", "--output", "json"],
    )
    .await;
    assert_eq!(unseen.code, Some(0));
    assert_eq!(
        json(&unseen),
        json!({"resource": "r", "highest_token": 0, "rejected_total": 0, "would_be_admitted": true})
    );
    admit(&client, "r", 7).await.unwrap();
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    for (token, code, admitted) in [("6", 76, false), ("7", 0, true), ("8", 0, true)] {
        let checked = fence(
            &database,
            &["check", "r", "--token", token, "--output", "json"],
        )
        .await;
        assert_eq!(checked.code, Some(code), "{token}: {}", checked.stderr);
        assert_eq!(
            json(&checked),
            json!({"resource": "r", "highest_token": 7, "rejected_total": 1, "would_be_admitted": admitted})
        );
    }
    let text = fence(&database, &["check", "r"]).await;
    assert!(
        text.stdout
            .starts_with("resource: r\nhighest_token: 7\nadmitted_at: "),
        "{}",
        text.stdout
    );

    let reset = fence(&database, &["reset", "r", "--to", "3"]).await;
    assert_eq!(
        (reset.code, reset.said().as_str()),
        (
            Some(0),
            "resource: r\nhighest_token: 3\nprevious_token: 7\n"
        )
    );
    assert_eq!(highest(&client, "r").await, 3);
    // Nobody has shown this one yet.
    let checked = fence(&database, &["check", "r"]).await;
    assert_eq!(
        checked.said(),
        "resource: r\nhighest_token: 3\nrejected_total: 1\n"
    );
    let forgot = fence(&database, &["reset", "r", "--forget", "--output", "json"]).await;
    assert_eq!(
        json(&forgot),
        json!({"resource": "r", "highest_token": 0, "previous_token": 3})
    );
    assert_eq!(highest(&client, "r").await, 0);
    for target in [&["--to", "3"][..], &["--forget"]] {
        let unknown = fence(&database, &[&["reset", "r"], target].concat()).await;
        assert_eq!((unknown.code, unknown.stdout.as_str()), (Some(64), ""));
        assert!(
            unknown.stderr.contains("no token was ever seen"),
            "{target:?}: {}",
            unknown.stderr
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_says_what_is_wrong_and_no_password() {
    let database = fresh_database().await;
    let nowhere = "postgres://u:swordfish@127.0.0.1:1/db";
    let long = "x".repeat(513);
    for (arguments, code) in [
        (vec!["install"], 78),
        (
            vec!["install", "--database-url", "postgres://u:swordfish@:x"],
            78,
        ),
        (
            vec![
                "install",
                "--database-url",
                "postgres://u:swordfish@h/db?sslmode=verify-full",
            ],
            78,
        ),
        (
            vec!["install", "--database-url-file", "/no such swordfish"],
            78,
        ),
        (vec!["install", "--database-url", nowhere], 69),
        (vec!["check", "r", nowhere], 64),
        (vec![nowhere], 64),
        (vec!["check", "r", "--token", nowhere], 64),
        (vec!["reset", "r"], 64),
        (vec!["reset", "r", "--to", "1", "--forget"], 64),
        (vec!["reset", "r", "--to", "0"], 64),
        (vec!["check", "r", "--token", "-1"], 64),
        (vec!["check", "r", "--token", "9007199254740992"], 64),
        (vec!["reset", "r", "--to", "9007199254740992"], 64),
        (vec!["check", ""], 64),
        (vec!["check", &long], 64),
        (vec!["reset", "", "--forget"], 64),
    ] {
        let mut command = bare(cli());
        command.arg("fence").args(&arguments);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(code), "{arguments:?} {}", ended.stderr);
        assert_eq!(ended.stdout, "");
        assert!(!ended.stderr.is_empty());
        assert!(!ended.stderr.contains("swordfish"), "{}", ended.stderr);
    }
    let help = fence(&database, &["reset", "--help"]).await;
    assert_eq!(help.code, Some(0));
    assert!(help.stdout.contains("THIS OPENS THE FENCE"));
    assert!(help.stdout.contains("1 to 2^53 - 1"), "{}", help.stdout);
    assert!(!help.stdout.contains(&database.url()));
}

/// Newer holders may have been there by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_that_gave_up_does_not_happen_later() {
    let database = fenced().await;
    let (writer, observer) = (database.client().await, database.client().await);
    admit(&writer, "r", 10).await.unwrap();
    for target in [&["--to", "7"][..], &["--forget"]] {
        writer.run("BEGIN").await;
        admit(&writer, "r", 10).await.unwrap();
        let reset = [&["reset", "r", "--timeout", "500ms"], target].concat();
        let gave_up = fence(&database, &reset).await;
        assert_eq!(gave_up.code, Some(69), "{}", gave_up.said());
        writer.run("COMMIT").await;
        let others = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND application_name = 'fencepost fence'";
        within(LONG, "the reset's session to end", async || {
            let count: i64 = observer.value(others).await;
            (count == 0).then_some(())
        })
        .await;
        assert_eq!(highest(&observer, "r").await, 10, "{target:?}");
    }
}
