//! Who may do what with the kit, and who may not turn it.

use fencepost_support::postgres::fresh_database;

use crate::fence_world::{KIT, admit, fenced, may, rejected, role, state};

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
            "CREATE ROLE \"Owner-{name}\"; CREATE ROLE other_{name};
             GRANT CREATE ON DATABASE {name} TO \"Owner-{name}\", other_{name}; SET ROLE \"Owner-{name}\""
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

/// What an owner gives away by default is not given away with the kit. What is
/// granted on purpose stays, also when the kit is installed again.
#[tokio::test(flavor = "multi_thread")]
async fn default_privileges_hand_nobody_the_fence() {
    let database = fresh_database().await;
    let client = database.client().await;
    let name = database.name();
    client
        .run(&format!(
            "CREATE ROLE owner_{name}; CREATE ROLE w_{name};
             GRANT CREATE ON DATABASE {name} TO owner_{name}; SET ROLE owner_{name}"
        ))
        .await;
    for what in ["SCHEMAS", "TABLES", "SEQUENCES", "FUNCTIONS"] {
        client
            .run(&format!(
                "ALTER DEFAULT PRIVILEGES GRANT ALL ON {what} TO w_{name} WITH GRANT OPTION"
            ))
            .await;
    }
    client.run(KIT).await;
    let given = format!(
        "SELECT has_schema_privilege('w_{name}', 'fence', 'USAGE, CREATE')
             OR has_table_privilege('w_{name}', 'fence.tokens', 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')
             OR has_sequence_privilege('w_{name}', 'fence.rejections', 'USAGE, SELECT, UPDATE')
             OR has_function_privilege('w_{name}', 'fence.admit(text, bigint)', 'EXECUTE')
             OR has_function_privilege('w_{name}', 'fence.reset(text)', 'EXECUTE')
             OR has_function_privilege('w_{name}', 'fence.reset(text, bigint)', 'EXECUTE')"
    );
    assert!(!client.value::<bool>(&given).await);

    for grant in [
        "USAGE ON SCHEMA fence",
        "SELECT ON fence.tokens",
        "SELECT ON SEQUENCE fence.rejections",
        "EXECUTE ON FUNCTION fence.admit(text, bigint), fence.reset(text)",
    ] {
        client.run(&format!("GRANT {grant} TO w_{name}")).await;
    }
    // A part that was dropped is made anew, and writing was never to be granted.
    client
        .run(&format!(
            "DROP FUNCTION fence.reset(text, bigint);
             GRANT INSERT, UPDATE, DELETE ON fence.tokens TO w_{name}"
        ))
        .await;
    client.run(KIT).await;
    client.run(&format!("RESET ROLE; SET ROLE w_{name}")).await;
    may(
        &client,
        &[
            ("SELECT fence.admit('r', 5)", "00000"),
            ("SELECT token FROM fence.tokens", "00000"),
            ("SELECT last_value FROM fence.rejections", "00000"),
            ("SELECT fence.reset('r')", "00000"),
            ("SELECT fence.reset('r', 5)", "42501"),
            ("UPDATE fence.tokens SET token = 1", "42501"),
        ],
    )
    .await;
}

/// The counter is an alarm: who cannot admit cannot ring it, with tables and
/// triggers of their own neither.
#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_cannot_raise_the_counter() {
    let database = fenced().await;
    let client = database.client().await;
    let role = role(&database, "").await;
    admit(&client, "r", 7).await.unwrap();
    let functions: Vec<String> = client
        .query(
            "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'fence'::regnamespace
                AND prorettype <> 'trigger'::regtype AND has_function_privilege($1, oid, 'EXECUTE')",
            &[&role],
        )
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    client.run(&format!("SET ROLE {role}")).await;
    client
        .run(
            "CREATE TEMP TABLE mine (fencing_token bigint); INSERT INTO mine VALUES (9);
             CREATE TRIGGER g AFTER INSERT OR UPDATE OR DELETE ON mine FOR EACH ROW EXECUTE FUNCTION fence.guard('r')",
        )
        .await;
    may(
        &client,
        &[
            ("INSERT INTO mine VALUES (1)", "42501"),
            ("UPDATE mine SET fencing_token = 1", "42501"),
            ("INSERT INTO mine VALUES (0)", "FP428"),
            ("DELETE FROM mine", "FP428"),
        ],
    )
    .await;
    // Whatever else they may call, with an old token wherever one is asked for.
    assert!(functions.len() >= 4, "{functions:?}");
    for function in functions {
        let call = function
            .replace("text", "'r'")
            .replace("bigint", "1::bigint");
        let _ = client.batch_execute(&format!("SELECT {call}")).await;
    }
    assert_eq!(rejected(&client).await, 0);
}
