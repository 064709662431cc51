//! `fence.guard`: which writes of a guarded table pass.

use crate::{
    fence_guard::{OK, STALE, TABLES, UNSHOWN, case},
    fence_world::{LEVELS, fenced, rejected},
};

/// What the transaction has admitted.
type Admitted = &'static [(&'static str, i64)];

/// What a transaction has admitted, what it writes, and how that ends.
const CASES: &[(Admitted, &str, &str)] = &[
    // INSERT: the row must carry the token of its own resource.
    (&[], "INSERT INTO orders VALUES (3, 'x', 6)", UNSHOWN),
    (&[], "INSERT INTO orders (id) VALUES (3)", UNSHOWN),
    (
        &[("order-3", 6)],
        "INSERT INTO orders (id) VALUES (3)",
        UNSHOWN,
    ),
    (
        &[("order-3", 6)],
        "INSERT INTO orders VALUES (3, 'x', 6)",
        OK,
    ),
    (
        &[("order-3", 6)],
        "INSERT INTO orders VALUES (3, 'x', 5)",
        UNSHOWN,
    ),
    (
        &[("order-3", 6)],
        "INSERT INTO orders VALUES (3, 'x', 7)",
        UNSHOWN,
    ),
    (
        &[("order-3", 6)],
        "INSERT INTO orders VALUES (3, 'x', 6), (4, 'x', 6)",
        UNSHOWN,
    ),
    (
        &[("stock", 6)],
        "INSERT INTO stock VALUES (2, 'x', NULL)",
        UNSHOWN,
    ),
    (
        &[("stock", 6)],
        "INSERT INTO stock VALUES (2, 'x', 6), (3, 'x', 6)",
        OK,
    ),
    // UPDATE: one that leaves the column alone shows nothing.
    (&[], "UPDATE orders SET state = 'x'", UNSHOWN),
    (
        &[],
        "UPDATE orders SET state = 'x', fencing_token = 5 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[],
        "UPDATE orders SET state = 'x', fencing_token = 6 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[],
        "UPDATE orders SET state = 'x', fencing_token = 4 WHERE id = 1",
        STALE,
    ),
    (
        &[],
        "INSERT INTO orders VALUES (1, 'x', 4) ON CONFLICT (id) DO UPDATE SET fencing_token = 4",
        STALE,
    ),
    (&[], "INSERT INTO stock VALUES (2, 'x', 4)", STALE),
    (
        &[],
        "UPDATE orders SET state = 'x', fencing_token = 0 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[],
        "UPDATE stock SET state = 'x', fencing_token = NULL",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "UPDATE orders SET state = 'x' WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "UPDATE orders SET state = 'x', fencing_token = 5 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "UPDATE orders SET state = 'x', fencing_token = 6 WHERE id = 1",
        OK,
    ),
    (
        &[("order-1", 5)],
        "UPDATE orders SET state = 'x' WHERE id = 1",
        OK,
    ),
    (
        &[("order-1", 6)],
        "UPDATE orders SET state = 'x', fencing_token = 6",
        UNSHOWN,
    ),
    (
        &[("order-1", 6), ("order-2", 7)],
        "UPDATE orders SET fencing_token = id + 5",
        OK,
    ),
    (
        &[("stock", 6)],
        "UPDATE stock SET fencing_token = NULL",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "UPDATE stock SET fencing_token = 6",
        UNSHOWN,
    ),
    // A row that goes from one resource to another needs both.
    (
        &[("order-1", 6)],
        "UPDATE orders SET id = 3, fencing_token = 6 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[("order-3", 6)],
        "UPDATE orders SET id = 3, fencing_token = 6 WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[("order-1", 9), ("order-3", 6)],
        "UPDATE orders SET id = 3, fencing_token = 6 WHERE id = 1",
        OK,
    ),
    // DELETE has no row to carry a token.
    (&[], "DELETE FROM orders WHERE id = 1", UNSHOWN),
    (&[("order-1", 6)], "DELETE FROM orders WHERE id = 1", OK),
    (&[("order-1", 5)], "DELETE FROM orders WHERE id = 1", OK),
    (&[("order-1", 6)], "DELETE FROM orders", UNSHOWN),
    // Both halves of an upsert, and MERGE.
    (
        &[("order-1", 6)],
        "INSERT INTO orders VALUES (1, 'x', 6) ON CONFLICT (id) DO UPDATE SET state = 'x'",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "INSERT INTO orders VALUES (1, 'x', 6) ON CONFLICT (id) DO UPDATE SET fencing_token = EXCLUDED.fencing_token",
        OK,
    ),
    (
        &[],
        "INSERT INTO orders VALUES (1, 'x', 5) ON CONFLICT (id) DO NOTHING",
        OK,
    ),
    (
        &[("order-1", 6)],
        "MERGE INTO orders USING (VALUES (1)) AS v (id) ON v.id = orders.id WHEN MATCHED THEN UPDATE SET state = 'x'",
        UNSHOWN,
    ),
    (
        &[("order-1", 6)],
        "MERGE INTO orders USING (VALUES (1)) AS v (id) ON v.id = orders.id WHEN MATCHED THEN DELETE",
        OK,
    ),
    // TRUNCATE, with its own trigger.
    (&[], "TRUNCATE stock", UNSHOWN),
    (&[("stock", 6)], "TRUNCATE stock", OK),
    (&[("order-1", 6)], "TRUNCATE orders", UNSHOWN),
    (&[("order-", 6)], "TRUNCATE orders", UNSHOWN),
    // A token that was taken back was not shown.
    (
        &[],
        "SAVEPOINT s; SELECT fence.admit('order-1', 6); ROLLBACK TO s; DELETE FROM orders WHERE id = 1",
        UNSHOWN,
    ),
    (
        &[],
        "SAVEPOINT s; SELECT fence.admit('order-1', 6); RELEASE s; DELETE FROM orders WHERE id = 1",
        OK,
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_write_passes_only_with_a_token_of_its_transaction() {
    let database = fenced().await;
    let client = database.client().await;
    client.run(TABLES).await;
    let merges = client.major_version().await >= 15;
    if !merges {
        println!("left out: MERGE, which this version has not");
    }
    let cases = || {
        let known = |write: &str| merges || !write.starts_with("MERGE");
        CASES.iter().filter(move |(_, write, _)| known(write))
    };
    for level in LEVELS {
        let set = format!(
            "SET default_transaction_isolation = '{}'",
            level.to_lowercase()
        );
        client.run(&set).await;
        for (admitted, write, expected) in cases() {
            let answer = case(&client, admitted, write).await;
            assert_eq!(answer, *expected, "{level}: {admitted:?} {write}");
        }
    }
    // Forgotten tokens are bugs, and not corruptions that were stopped.
    let stale = cases().filter(|(_, _, state)| *state == STALE).count();
    assert_eq!(rejected(&client).await, 3 * i64::try_from(stale).unwrap());
}
