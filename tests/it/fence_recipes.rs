//! The recipes of the README's chapter "Fencing your data", as they stand there.

use fencepost_support::postgres::{Client, fresh_database};

use crate::{
    fence_world::{KIT, LEVELS, admit, blocked, fenced, highest, pid, rejected, state},
    programs::{bare, cli, run},
};

const README: &str = include_str!("../../README.md");

/// The chapter's blocks of SQL, in their order.
fn blocks() -> Vec<&'static str> {
    let (_, chapter) = README.split_once("\n## Fencing your data\n").unwrap();
    let (chapter, _) = chapter.split_once("\n## ").unwrap();
    let blocks = chapter.split("```sql\n").skip(1);
    blocks
        .map(|block| block.split_once("```").unwrap().0)
        .collect()
}

/// With values for the placeholders.
fn with(sql: &str, id: i32, state: &str, token: i64) -> String {
    sql.replace("$id", &id.to_string())
        .replace("$state", &format!("'{state}'"))
        .replace("$token", &token.to_string())
}

/// The statements for one table: show, show by inserting, update, delete.
fn plain() -> [String; 4] {
    let block = blocks()[1];
    let lines = block.lines().filter(|line| !line.starts_with("--"));
    let sql = lines.collect::<Vec<_>>().join("\n");
    let statements = sql.split(';').map(|part| part.trim().to_owned());
    let statements: Vec<String> = statements.filter(|part| !part.is_empty()).collect();
    statements.try_into().unwrap()
}

async fn rows(client: &Client, sql: &str, id: i32, state: &str, token: i64) -> u64 {
    let sql = with(sql, id, state, token);
    client.execute(&sql, &[]).await.unwrap()
}

async fn orders(client: &Client) {
    client
        .run("CREATE TABLE orders (id int PRIMARY KEY, state text); INSERT INTO orders VALUES (1, 'new')")
        .await;
    client.run(blocks()[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_sql_refuses_an_older_token_by_zero_rows() {
    let database = fresh_database().await;
    let client = database.client().await;
    orders(&client).await;
    let [show, insert, update, delete] = &plain();
    for sql in [show, insert] {
        assert_eq!(rows(&client, sql, 1, "", 5).await, 1, "{sql}");
    }
    let kept: String = client.value("SELECT state FROM orders").await;
    assert_eq!(kept, "new");
    for sql in [update, show, insert] {
        assert_eq!(rows(&client, sql, 1, "five", 5).await, 1, "{sql}");
    }
    for sql in [show, insert, update, delete] {
        assert_eq!(rows(&client, sql, 1, "late", 4).await, 0, "{sql}");
    }
    assert_eq!(rows(&client, insert, 2, "", 5).await, 1);
    assert_eq!(rows(&client, insert, 2, "", 4).await, 0);
    assert_eq!(rows(&client, update, 2, "first", 5).await, 1);
    assert_eq!(rows(&client, show, 2, "", 6).await, 1);
    assert_eq!(rows(&client, update, 2, "late", 5).await, 0);
    let states: String = client
        .value("SELECT string_agg(state, ' ' ORDER BY id) FROM orders")
        .await;
    assert_eq!(states, "five first");
    // As the chapter says, a deleted row has forgotten its token.
    assert_eq!(rows(&client, delete, 1, "", 5).await, 1);
    assert_eq!(rows(&client, insert, 1, "", 4).await, 1);
}

/// An older write that waits for a newer one is judged by what that one left.
#[tokio::test(flavor = "multi_thread")]
async fn plain_sql_judges_after_the_wait() {
    let database = fresh_database().await;
    let (a, b, observer) = (
        database.client().await,
        database.client().await,
        database.client().await,
    );
    orders(&a).await;
    let waiting = pid(&b).await;
    for level in LEVELS {
        for sql in plain() {
            a.run("DELETE FROM orders; INSERT INTO orders VALUES (1, 'new', 4)")
                .await;
            a.run("BEGIN").await;
            assert_eq!(rows(&a, &plain()[0], 1, "", 5).await, 1);
            b.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
            let late = with(&sql, 1, "late", 4);
            let (answer, ()) = tokio::join!(b.execute(&late, &[]), async {
                blocked(&observer, waiting).await;
                a.run("COMMIT").await;
            });
            match answer {
                Ok(rows) => assert_eq!((rows, level), (0, "READ COMMITTED"), "{sql}"),
                Err(error) => {
                    assert_eq!(state::<()>(Err(error)), "40001");
                    assert_ne!(level, "READ COMMITTED", "{sql}");
                }
            }
            b.run("ROLLBACK").await;
        }
    }
}

/// A team that follows the chapter from its top to its end.
#[tokio::test(flavor = "multi_thread")]
async fn the_chapter_works_as_written() {
    let database = fresh_database().await;
    let client = database.client().await;
    orders(&client).await;
    client
        .run(
            "CREATE TABLE reports (id int PRIMARY KEY, state text);
             CREATE TABLE report_lines (report_id int, line text);
             INSERT INTO reports VALUES (1, 'new');
             CREATE ROLE writer; CREATE ROLE watcher; CREATE ROLE operator;
             GRANT ALL ON reports, report_lines TO writer",
        )
        .await;
    let mut command = bare(cli());
    command
        .env("FENCEPOST_FENCE_DATABASE_URL", database.url())
        .args(["fence", "install"]);
    assert_eq!(run(command).await.code, Some(0));

    let blocks = blocks();
    let [_, _, grants, limit, guard, transactions, mend] = &blocks[..] else {
        panic!("{} blocks of SQL", blocks.len());
    };
    client.run(grants).await;
    client.run(limit).await;
    client.run(guard).await;
    let writer = database.client().await;
    writer.run("SET ROLE writer").await;
    writer.run(&with(transactions, 1, "seven", 7)).await;
    let late = with(transactions, 1, "late", 6);
    assert_eq!(state(writer.batch_execute(&late).await), "FP409");
    writer.run("ROLLBACK").await;
    // The next holder, which forgets the token in one statement.
    let bare = with(transactions, 1, "bare", 8).replacen(", fencing_token = 8", "", 1);
    assert_eq!(state(writer.batch_execute(&bare).await), "FP428");
    writer.run("ROLLBACK").await;
    assert_eq!(
        state(writer.batch_execute("TRUNCATE reports").await),
        "42501"
    );
    // Somebody shows, and writes, a token that nobody was given.
    writer.run(&with(transactions, 1, "bogus", 1 << 52)).await;
    let present = with(transactions, 1, "eight", 8);
    assert_eq!(state(writer.batch_execute(&present).await), "FP409");
    writer.run("ROLLBACK").await;
    client.run(&with(mend, 1, "", 8)).await;
    writer.run(&present).await;
    writer.run("BEGIN").await;
    admit(&writer, "nightly-report", 8).await.unwrap();
    writer.run("DELETE FROM reports; COMMIT").await;

    for (role, may_reset) in [("watcher", "42501"), ("operator", "00000")] {
        client.run(&format!("SET ROLE {role}")).await;
        assert_eq!(highest(&client, "nightly-report").await, 8);
        assert_eq!(rejected(&client).await, 2);
        let reset = client.batch_execute("SELECT fence.reset('nightly-report', 8)");
        assert_eq!(state(reset.await), may_reset, "{role}");
    }
}

/// What the chapter warns of: an error that is caught leaves the transaction alive,
/// and only a guarded table refuses what follows.
#[tokio::test(flavor = "multi_thread")]
async fn a_swallowed_refusal_is_stopped_by_the_guard_alone() {
    let database = fenced().await;
    let client = database.client().await;
    client
        .run(
            "CREATE TABLE bare (id int);
             CREATE TABLE guarded (id int, fencing_token bigint);
             CREATE TRIGGER g AFTER INSERT ON guarded FOR EACH ROW EXECUTE FUNCTION fence.guard('r');
             SELECT fence.admit('r', 7)",
        )
        .await;
    for (write, expected) in [
        ("INSERT INTO bare VALUES (1)", "00000"),
        ("INSERT INTO guarded VALUES (1, 6)", "FP409"),
        ("INSERT INTO guarded VALUES (1, 7)", "FP428"),
    ] {
        client.run("BEGIN; SAVEPOINT each_statement").await;
        assert_eq!(state(admit(&client, "r", 6).await), "FP409");
        client.run("ROLLBACK TO each_statement").await;
        assert_eq!(state(client.batch_execute(write).await), expected);
        client.run("COMMIT").await;
    }
}

/// A time limit that strikes while an admit waits: neither admitted nor refused.
#[tokio::test(flavor = "multi_thread")]
async fn an_admit_that_runs_out_of_time_is_neither_admitted_nor_refused() {
    let database = fenced().await;
    let (a, b) = (database.client().await, database.client().await);
    a.run("BEGIN").await;
    admit(&a, "r", 5).await.unwrap();
    for (limit, expected) in [("lock_timeout", "55P03"), ("statement_timeout", "57014")] {
        b.run(&format!("SET {limit} = '100ms'")).await;
        for token in [4, 6] {
            assert_eq!(state(admit(&b, "r", token).await), expected, "{limit}");
        }
        b.run(&format!("RESET {limit}")).await;
    }
    a.run("COMMIT").await;
    assert_eq!(highest(&b, "r").await, 5);
    assert_eq!(rejected(&b).await, 0);
    assert_eq!(state(admit(&b, "r", 6).await), "00000");
}

/// Every function, SQLSTATE and flag that the chapter names is there.
#[tokio::test]
async fn the_chapter_names_what_there_is() {
    for name in ["fence.admit(", "fence.guard(", "fence.rejected_total()"] {
        assert!(README.contains(name) && KIT.contains(name), "{name}");
    }
    for code in ["FP409", "FP428", "22023", "40001", "55P03", "57014"] {
        assert!(README.contains(code) && KIT.contains(code), "{code}");
    }
}
