//! The kit as a whole: installed, installed again, who may do what, reset; and the
//! command line that does it.

use fencepost_support::postgres::{Client, Database, fresh_database};
use serde_json::{Value, json};

use crate::{
    fence_world::{KIT, admit, fenced, highest, state},
    programs::{Ended, bare, cli, run},
};

#[tokio::test(flavor = "multi_thread")]
async fn installing_again_keeps_tokens_and_grants() {
    let database = fenced().await;
    let client = database.client().await;
    let role = role(
        &database,
        "GRANT EXECUTE ON FUNCTION fence.admit(text, bigint) TO",
    )
    .await;
    admit(&client, "r", 7).await.unwrap();
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    client.run(KIT).await;
    assert_eq!(highest(&client, "r").await, 7);
    assert_eq!(crate::fence_world::rejected(&client).await, 1);
    client.run(&format!("SET ROLE {role}")).await;
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    assert_eq!(state(admit(&client, "r", 8).await), "00000");
}

#[tokio::test(flavor = "multi_thread")]
async fn installing_beside_a_writer_waits_for_nothing() {
    let database = fenced().await;
    let (writer, client) = (database.client().await, database.client().await);
    writer.run("BEGIN").await;
    admit(&writer, "r", 7).await.unwrap();
    client.run("SET lock_timeout = '2s'").await;
    client.run(KIT).await;
    writer.run("COMMIT").await;
    assert_eq!(highest(&client, "r").await, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_installations_at_once_are_one() {
    let database = fresh_database().await;
    let mut installing = Vec::new();
    for _ in 0..6 {
        let client = database.client().await;
        installing.push(tokio::spawn(async move { client.batch_execute(KIT).await }));
    }
    for installed in installing {
        installed.await.unwrap().unwrap();
    }
    admit(&database.client().await, "r", 1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_or_newer_is_left_alone() {
    let database = fresh_database().await;
    let client = database.client().await;
    client
        .run("CREATE SCHEMA fence; CREATE TABLE fence.tokens (mine int)")
        .await;
    assert_eq!(state(client.batch_execute(KIT).await), "42P06");
    client.run("DROP TABLE fence.tokens").await;
    client.run(KIT).await;
    client
        .run("COMMENT ON SCHEMA fence IS 'Fencepost fencing kit, version 2'")
        .await;
    assert_eq!(state(client.batch_execute(KIT).await), "55000");
    // A refused installation changes nothing, the version included.
    let version: String = client
        .value("SELECT obj_description('fence'::regnamespace, 'pg_namespace')")
        .await;
    assert!(version.ends_with("version 2"), "{version}");
}

/// A role with USAGE on the schema and what else `grant` says. Roles belong to the
/// whole cluster, so each has the name of its database.
async fn role(database: &Database, grant: &str) -> String {
    let role = format!("role_{}", database.name());
    let client = database.client().await;
    client
        .run(&format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA fence TO {role}"
        ))
        .await;
    if !grant.is_empty() {
        client.run(&format!("{grant} {role}")).await;
    }
    role
}

/// How each of these ends for a role.
async fn may(client: &Client, calls: &[(&str, &str)]) {
    for (sql, expected) in calls {
        assert_eq!(state(client.batch_execute(sql).await), *expected, "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_may_admit_and_nothing_else() {
    let database = fenced().await;
    let client = database.client().await;
    let role = role(
        &database,
        "GRANT EXECUTE ON FUNCTION fence.admit(text, bigint) TO",
    )
    .await;
    client
        .run(&format!(
            "CREATE TABLE t (id int, fencing_token bigint); GRANT INSERT, UPDATE, DELETE, SELECT ON t TO {role};
             CREATE TRIGGER g AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION fence.guard('t');
             SET ROLE {role}"
        ))
        .await;
    may(
        &client,
        &[
            ("SELECT fence.admit('r', 5)", "00000"),
            ("SELECT fence.admit('r', 4)", "FP409"),
            ("SELECT fence.check('r')", "00000"),
            ("INSERT INTO t VALUES (1, 5)", "FP428"),
            (
                "SELECT fence.admit('t', 5); INSERT INTO t VALUES (1, 5)",
                "00000",
            ),
            ("UPDATE t SET fencing_token = 4", "FP409"),
            ("SELECT token FROM fence.tokens", "42501"),
            ("UPDATE fence.tokens SET token = 1", "42501"),
            ("DELETE FROM fence.tokens", "42501"),
            (
                "INSERT INTO fence.tokens VALUES ('x', 1, NULL, now())",
                "42501",
            ),
            ("SELECT setval('fence.rejections', 1)", "42501"),
            ("SELECT fence.reset('r')", "42501"),
            ("SELECT fence.reset('r', 1)", "42501"),
            ("CREATE TABLE fence.mine (id int)", "42501"),
        ],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_may_look_and_a_stranger_may_not() {
    let database = fenced().await;
    let client = database.client().await;
    let role = role(&database, "").await;
    client
        .run(&format!(
            "CREATE TABLE t (fencing_token bigint);
             CREATE TRIGGER g AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION fence.guard('t');
             CREATE ROLE stranger_{role}; GRANT INSERT, DELETE ON t TO stranger_{role}; SET ROLE {role}"
        ))
        .await;
    may(
        &client,
        &[
            ("SELECT fence.check('r')", "00000"),
            ("SELECT fence.rejected_total()", "00000"),
            ("SELECT fence.admit('r', 5)", "42501"),
            ("SELECT fence.reset('r')", "42501"),
        ],
    )
    .await;
    client
        .run(&format!("RESET ROLE; SET ROLE stranger_{role}"))
        .await;
    may(
        &client,
        &[
            ("SELECT fence.check('r')", "42501"),
            ("DELETE FROM t", "00000"),
            ("INSERT INTO t VALUES (5)", "42501"),
        ],
    )
    .await;
}

/// The kit needs no superuser: its owner may be whoever owns the data.
#[tokio::test(flavor = "multi_thread")]
async fn a_plain_role_may_install_it_and_owns_it() {
    let database = fresh_database().await;
    let client = database.client().await;
    let name = database.name();
    client
        .run(&format!(
            "CREATE ROLE owner_{name}; CREATE ROLE other_{name};
             GRANT CREATE ON DATABASE {name} TO owner_{name}, other_{name}; SET ROLE owner_{name}"
        ))
        .await;
    client.run(KIT).await;
    client.run(KIT).await;
    admit(&client, "r", 7).await.unwrap();
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    client
        .run(&format!("RESET ROLE; SET ROLE other_{name}"))
        .await;
    assert_eq!(state(client.batch_execute(KIT).await), "42501");
}

/// A caller's search path, temporary tables and operators change nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_search_path_cannot_turn_the_fence() {
    let database = fenced().await;
    let client = database.client().await;
    admit(&client, "r", 7).await.unwrap();
    client
        .run(
            "CREATE SCHEMA evil;
             CREATE FUNCTION evil.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
             CREATE OPERATOR evil.< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.never)",
        )
        .await;
    client
        .run("CREATE TEMP TABLE tokens (resource text, token bigint); SET search_path = evil, pg_temp, pg_catalog")
        .await;
    assert!(!client.value::<bool>("SELECT 1::bigint < 2::bigint").await);
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    assert_eq!(state(admit(&client, "r", 8).await), "00000");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_row_is_reset_and_no_null_forgets() {
    let database = fenced().await;
    let client = database.client().await;
    admit(&client, "r", 1 << 52).await.unwrap();
    may(
        &client,
        &[
            ("SELECT fence.reset('r', NULL)", "22023"),
            ("SELECT fence.reset('r', 0)", "22023"),
            ("SELECT fence.reset('no such', 5)", "P0002"),
        ],
    )
    .await;
    assert_eq!(highest(&client, "r").await, 1 << 52);
    let before: i64 = client.value("SELECT fence.reset('r', 7)").await;
    assert_eq!(before, 1 << 52);
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    assert_eq!(state(admit(&client, "r", 7).await), "00000");
    let forgotten: Option<i64> = client.value("SELECT fence.reset('r')").await;
    assert_eq!(forgotten, Some(7));
    assert_eq!(state(admit(&client, "r", 1).await), "00000");
    // A reset shows no token.
    client.run("CREATE TABLE t (fencing_token bigint)").await;
    client
        .run("CREATE TRIGGER g AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION fence.guard('r')")
        .await;
    let write =
        "BEGIN; SELECT fence.admit('r', 1); SELECT fence.reset('r', 1); INSERT INTO t VALUES (1)";
    assert_eq!(state(client.batch_execute(write).await), "FP428");
}

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
    let forgot = fence(&database, &["reset", "r", "--forget", "--output", "json"]).await;
    assert_eq!(
        json(&forgot),
        json!({"resource": "r", "highest_token": 0, "previous_token": 3})
    );
    assert_eq!(highest(&client, "r").await, 0);
    let unknown = fence(&database, &["reset", "r", "--to", "3"]).await;
    assert_eq!((unknown.code, unknown.stdout.as_str()), (Some(64), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_says_what_is_wrong_and_no_password() {
    let database = fresh_database().await;
    let nowhere = "postgres://u:swordfish@127.0.0.1:1/db";
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
                "postgres://u:swordfish@h/db?sslmode=require",
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
    assert!(!help.stdout.contains(&database.url()));
}

/// Whoever owns the schema, or a function in it, could put code of their own
/// where others run it.
#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_somebody_else_is_refused() {
    let database = fresh_database().await;
    let client = database.client().await;
    client.run("CREATE SCHEMA fence").await;
    let mallory = role(&database, "").await;
    client
        .run(&format!("ALTER SCHEMA fence OWNER TO {mallory}"))
        .await;
    assert_eq!(state(client.batch_execute(KIT).await), "42501");
    client.run("ALTER SCHEMA fence OWNER TO CURRENT_USER").await;
    client.run(KIT).await;
    client
        .run(&format!("ALTER FUNCTION fence.guard() OWNER TO {mallory}"))
        .await;
    assert_eq!(state(client.batch_execute(KIT).await), "42501");
}

/// An admit is durable, whatever the writer thinks of its other commits.
#[tokio::test(flavor = "multi_thread")]
async fn an_admit_commits_durably() {
    let database = fenced().await;
    let client = database.client().await;
    client.run("SET synchronous_commit = off; BEGIN").await;
    admit(&client, "r", 7).await.unwrap();
    let during: String = client
        .value("SELECT current_setting('synchronous_commit')")
        .await;
    client.run("COMMIT").await;
    let after: String = client
        .value("SELECT current_setting('synchronous_commit')")
        .await;
    assert_eq!((during.as_str(), after.as_str()), ("on", "off"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_another_collation_is_compared_like_any() {
    let database = fenced().await;
    let client = database.client().await;
    client
        .run(
            "CREATE TABLE names (n text COLLATE \"POSIX\");
             INSERT INTO names VALUES ('x');
             SELECT fence.admit(n, 6) FROM names",
        )
        .await;
    let older = client.batch_execute("SELECT fence.admit(n, 5) FROM names");
    assert_eq!(state(older.await), "FP409");
    client.run("SELECT fence.admit(n, 6) FROM names").await;
}
