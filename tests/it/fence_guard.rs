//! `fence.guard` where it is less simple than in `fence_guard_writes`: other
//! transactions, other triggers, rows from elsewhere, and the ways around it.

use fencepost_support::postgres::Client;

use crate::fence_world::{fenced, rejected, state};

/// `orders` has a lock per row, `stock` one for the whole table.
pub(crate) const TABLES: &str = "
CREATE TABLE orders (id int PRIMARY KEY, state text, fencing_token bigint NOT NULL DEFAULT 0);
CREATE TABLE stock (id int PRIMARY KEY, state text, fencing_token bigint);
CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON orders
   FOR EACH ROW EXECUTE FUNCTION fence.guard('order-', 'id');
CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON stock
   FOR EACH ROW EXECUTE FUNCTION fence.guard('stock');
CREATE TRIGGER fence_guard_truncate AFTER TRUNCATE ON orders
   FOR EACH STATEMENT EXECUTE FUNCTION fence.guard('order-', 'id');
CREATE TRIGGER fence_guard_truncate AFTER TRUNCATE ON stock
   FOR EACH STATEMENT EXECUTE FUNCTION fence.guard('stock');
BEGIN;
SELECT fence.admit('order-1', 5), fence.admit('order-2', 5), fence.admit('stock', 5);
INSERT INTO orders VALUES (1, 'new', 5), (2, 'new', 5);
INSERT INTO stock VALUES (1, 'new', 5);
COMMIT";

pub(crate) const OK: &str = "00000";
pub(crate) const STALE: &str = "FP409";
pub(crate) const UNSHOWN: &str = "FP428";

/// How a write ends in a transaction that has admitted these; it leaves nothing.
pub(crate) async fn case(client: &Client, admitted: &[(&str, i64)], write: &str) -> String {
    client.run("BEGIN").await;
    for (resource, token) in admitted {
        client
            .run(&format!("SELECT fence.admit('{resource}', {token})"))
            .await;
    }
    let answer = state(client.batch_execute(write).await);
    client.run("ROLLBACK").await;
    answer
}

/// A program that forgets its admit, and a row or a default with a token from long
/// ago: a bug of the holder that is there, and no corruption that was stopped.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_admit_is_a_bug_whatever_the_row_carries() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    client
        .run("SELECT fence.admit('order-1', 9), fence.admit('order-3', 9), fence.admit('stock', 9)")
        .await;
    for write in [
        "INSERT INTO orders (id) VALUES (3)",
        "UPDATE orders SET state = 'x' WHERE id = 1",
        "UPDATE orders SET fencing_token = 0 WHERE id = 1",
        "UPDATE stock SET fencing_token = NULL",
        "INSERT INTO stock (id) VALUES (2)",
        "DELETE FROM stock",
    ] {
        assert_eq!(case(&client, &[], write).await, UNSHOWN, "{write}");
    }
    assert_eq!(rejected(&client).await, 0);
}

/// A token that was admitted before, by another transaction of the same session
/// or by another session at this moment, is not shown by this one.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_counts_in_its_own_transaction_alone() {
    let database = fenced().await;
    let client = database.client().await;
    let other = database.client().await;
    client.run(TABLES).await;
    let write = "UPDATE orders SET state = 'x', fencing_token = 6 WHERE id = 1";
    client.run("SELECT fence.admit('order-1', 6)").await;
    assert_eq!(case(&client, &[], write).await, UNSHOWN);
    other.run("BEGIN; SELECT fence.admit('order-1', 6)").await;
    assert_eq!(case(&client, &[], write).await, UNSHOWN);
    other.run(write).await;
    other.run("COMMIT").await;
}

/// A dump or logical replication brings rows from elsewhere, and with them the
/// number of a transaction that may be this one's here.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_of_elsewhere_with_the_same_number_is_not_this_one() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    let restored =
        "UPDATE fence.tokens SET admitted_in = pg_current_xact_id() WHERE resource = 'order-1'";
    let delete = "DELETE FROM orders WHERE id = 1";
    // The clock there may have been behind this one's, or ahead of it.
    for at in [
        "transaction_timestamp() - interval '1 day'",
        "transaction_timestamp() + interval '1 day'",
    ] {
        let restored = format!(
            "{restored}; UPDATE fence.tokens SET admitted_at = {at} WHERE resource = 'order-1'"
        );
        let unshown = format!("{restored}; {delete}");
        assert_eq!(case(&client, &[], &unshown).await, UNSHOWN, "{at}");
        // Shown by this one, it counts, although the token is not new.
        let shown = format!("{restored}; SELECT fence.admit('order-1', 5); {delete}");
        assert_eq!(case(&client, &[], &shown).await, OK, "{at}");
    }
}

/// A row that was written past the guard, with a token that the fence has not
/// seen, is safe from an older one all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_a_newer_token_is_not_written() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    client
        .run(
            "SET session_replication_role = replica;
             UPDATE orders SET fencing_token = 9 WHERE id = 1;
             RESET session_replication_role",
        )
        .await;
    for write in [
        "UPDATE orders SET fencing_token = 6 WHERE id = 1",
        "DELETE FROM orders WHERE id = 1",
    ] {
        client.run("BEGIN; SELECT fence.admit('order-1', 6)").await;
        let error = client.batch_execute(write).await.unwrap_err();
        client.run("ROLLBACK").await;
        let error = error.as_db_error().unwrap();
        assert_eq!(
            (error.code().code(), error.table()),
            (STALE, Some("orders"))
        );
        assert!(
            error
                .detail()
                .unwrap()
                .contains("the existing row carries token 9"),
            "{error:?}"
        );
        assert_eq!(
            case(&client, &[("order-1", 9)], &write.replace('6', "9")).await,
            OK
        );
    }
    assert_eq!(rejected(&client).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_trigger_cannot_change_what_was_judged() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    client
        .run(
            "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN NEW.fencing_token := 1; RETURN NEW; END $$;
             CREATE TRIGGER zz_meddle BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION meddle()",
        )
        .await;
    let write = "UPDATE orders SET fencing_token = 6 WHERE id = 1";
    assert_eq!(case(&client, &[("order-1", 6)], write).await, UNSHOWN);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_and_cascades_are_guarded_too() {
    let database = fenced().await;
    let client = database.client().await;
    client
        .run(
            "CREATE TABLE p (id int, region text, fencing_token bigint) PARTITION BY LIST (region);
             CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a');
             CREATE TABLE p_b PARTITION OF p FOR VALUES IN ('b');
             CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON p
                FOR EACH ROW EXECUTE FUNCTION fence.guard('p');
             CREATE TABLE parent (id int PRIMARY KEY);
             CREATE TABLE child (id int REFERENCES parent ON DELETE CASCADE, fencing_token bigint);
             CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON child
                FOR EACH ROW EXECUTE FUNCTION fence.guard('child');
             BEGIN; SELECT fence.admit('p', 5), fence.admit('child', 5);
             INSERT INTO p VALUES (1, 'a', 5); INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 5);
             COMMIT",
        )
        .await;
    for (resource, unshown, shown) in [
        (
            "p",
            "UPDATE p SET region = 'b'",
            "UPDATE p SET region = 'b', fencing_token = 6",
        ),
        (
            "p",
            "DELETE FROM p_b WHERE false; UPDATE p_a SET id = 2",
            "UPDATE p_a SET fencing_token = 6",
        ),
        ("child", "DELETE FROM parent", "DELETE FROM parent"),
    ] {
        assert_eq!(case(&client, &[], unshown).await, UNSHOWN, "{unshown}");
        assert_eq!(case(&client, &[(resource, 6)], shown).await, OK, "{shown}");
    }
}

/// What the kit's header says of ways around the guard.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_bypasses_are_as_documented() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    let replica = "SET LOCAL session_replication_role = replica; DELETE FROM orders";
    assert_eq!(case(&client, &[], replica).await, OK);
    client
        .run("ALTER TABLE orders ENABLE ALWAYS TRIGGER fence_guard")
        .await;
    assert_eq!(case(&client, &[], replica).await, UNSHOWN);
    client
        .run("DROP TRIGGER fence_guard_truncate ON stock")
        .await;
    assert_eq!(case(&client, &[], "TRUNCATE stock").await, OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_not_set_up_rightly_lets_nothing_pass() {
    let database = fenced().await;
    let client = database.client().await;
    for trigger in [
        "BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fence.guard('t')",
        "AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION fence.guard()",
        "AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION fence.guard('t')",
    ] {
        client
            .run(&format!(
                "DROP TABLE IF EXISTS t; CREATE TABLE t (fencing_token bigint); CREATE TRIGGER g {trigger}"
            ))
            .await;
        let answer = case(&client, &[("t", 5)], "INSERT INTO t VALUES (5)").await;
        assert_eq!(answer, "0A000", "{trigger}");
    }
}

/// The kit asks for bigint; numeric is compared like it.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_in_a_numeric_column_is_judged_like_any() {
    let database = fenced().await;
    let client = database.client().await;
    client
        .run(
            "CREATE TABLE sums (id int, fencing_token numeric NOT NULL DEFAULT 0);
             CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON sums
                FOR EACH ROW EXECUTE FUNCTION fence.guard('sums');
             BEGIN; SELECT fence.admit('sums', 7); INSERT INTO sums VALUES (1, 7); COMMIT",
        )
        .await;
    let update = |token: &str| format!("UPDATE sums SET fencing_token = {token}");
    assert_eq!(case(&client, &[], &update("6")).await, STALE);
    assert_eq!(case(&client, &[], &update("6.5")).await, UNSHOWN);
    assert_eq!(case(&client, &[("sums", 8)], &update("7.5")).await, UNSHOWN);
    assert_eq!(case(&client, &[("sums", 8)], &update("8")).await, OK);
}
