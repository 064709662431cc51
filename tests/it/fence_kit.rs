//! The kit as a whole: installed, installed again, reset.

use fencepost_support::postgres::fresh_database;

use crate::fence_world::{KIT, admit, fenced, highest, may, rejected, role, state};

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
    assert_eq!(rejected(&client).await, 1);
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
            ("SELECT fence.reset('no such')", "P0002"),
            ("SELECT fence.reset(NULL)", "P0002"),
        ],
    )
    .await;
    assert_eq!(highest(&client, "r").await, 1 << 52);
    let before: i64 = client.value("SELECT fence.reset('r', 7)").await;
    assert_eq!(before, 1 << 52);
    let seen = "SELECT admitted_at IS NULL FROM fence.check('r')";
    assert!(client.value::<bool>(seen).await, "nobody has shown 7");
    assert_eq!(state(admit(&client, "r", 6).await), "FP409");
    assert_eq!(state(admit(&client, "r", 7).await), "00000");
    assert!(!client.value::<bool>(seen).await);
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

/// At commit it is durable too, whatever comes around the admit or after it.
#[tokio::test(flavor = "multi_thread")]
async fn what_undoes_the_setting_of_an_admit_is_undone_at_commit() {
    let database = fenced().await;
    let client = database.client().await;
    // Deferred triggers run in the order of what they follow.
    client
        .run(
            "CREATE TABLE work (n int); CREATE TABLE seen (setting text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER note AFTER INSERT ON work DEFERRABLE INITIALLY DEFERRED
                 FOR EACH ROW EXECUTE FUNCTION note();
             CREATE FUNCTION show(t bigint) RETURNS void LANGUAGE plpgsql SET synchronous_commit = off AS $$
                 BEGIN PERFORM fence.admit('r', t); END $$",
        )
        .await;
    for transaction in [
        "SET synchronous_commit = off; BEGIN; SELECT show(7)",
        "SET synchronous_commit = on; BEGIN; SELECT fence.admit('r', 8); SET LOCAL synchronous_commit = off",
        "SET synchronous_commit = off; BEGIN; SELECT show(8)",
        "SET synchronous_commit = local; BEGIN; SELECT fence.admit('r', 9)",
    ] {
        client
            .run(&format!(
                "{transaction}; INSERT INTO work VALUES (1); COMMIT"
            ))
            .await;
    }
    let seen: Vec<String> = client.value("SELECT array_agg(setting) FROM seen").await;
    assert_eq!(seen, ["on", "on", "on", "local"]);
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
    client
        .run("SELECT fence.admitted(n), fence.check(n), fence.reset(n, 7) FROM names")
        .await;
}

/// The comment on `fence.reset` says how to mend rows that carry the bad token.
#[tokio::test(flavor = "multi_thread")]
async fn guarded_rows_are_mended_as_the_kit_says() {
    let database = fenced().await;
    let client = database.client().await;
    let bad: i64 = 1 << 52;
    client
        .run(&format!(
            "CREATE TABLE orders (id int, fencing_token bigint NOT NULL DEFAULT 0);
             CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON orders
                FOR EACH ROW EXECUTE FUNCTION fence.guard('order-', 'id');
             BEGIN; SELECT fence.admit('order-7', {bad}); INSERT INTO orders VALUES (7, {bad}); COMMIT"
        ))
        .await;
    let (_, recipe) = KIT.split_once("--     BEGIN;\n").unwrap();
    let (recipe, _) = recipe.split_once("--     COMMIT;").unwrap();
    let recipe = recipe.replace("--     ", "");
    let token: i64 = 120_540_998_346_497;
    assert!(recipe.contains(&token.to_string()), "{recipe}");
    let write = format!(
        "BEGIN; SELECT fence.admit('order-7', {token}); UPDATE orders SET fencing_token = {token}; COMMIT"
    );

    // The reset alone does not do it.
    client
        .run(&format!("SELECT fence.reset('order-7', {token})"))
        .await;
    assert_eq!(state(client.batch_execute(&write).await), "FP409");
    client.run("ROLLBACK").await;
    client.run(&format!("BEGIN; {recipe} COMMIT")).await;
    client.run(&write).await;
    // And the guard is back.
    let unshown = client.batch_execute("DELETE FROM orders").await;
    assert_eq!(state(unshown), "FP428");
}

/// A database of another encoding could not take it.
#[test]
fn the_kit_is_plain_ascii() {
    assert!(KIT.is_ascii());
}
