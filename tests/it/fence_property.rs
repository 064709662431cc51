//! Many writers with tokens at random, on several resources and all isolation
//! levels: a fenced register never goes back, and loses no acknowledged write.

use std::collections::BTreeMap;

use fencepost_support::postgres::Client;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::fence_world::{LEVELS, admit, fenced, highest, state};

const WRITERS: u64 = 12;
const WRITES: i64 = 50;
const RESOURCES: usize = 3;

/// A register per resource, and each write that it has had. The key finds two
/// writers that read the same value.
const TABLES: &str = "
CREATE TABLE register (resource text PRIMARY KEY, value bigint NOT NULL, token bigint NOT NULL);
CREATE TABLE history (resource text, value bigint, token bigint, PRIMARY KEY (resource, value));
INSERT INTO register VALUES ('r0', 0, 0), ('r1', 0, 0), ('r2', 0, 0)";

/// How one transaction ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Committed(i64),
    RolledBack,
    Refused,
}

/// Shows a token, reads, writes what follows, and commits or not.
async fn attempt(
    client: &Client,
    level: &str,
    resource: &str,
    token: i64,
    commit: bool,
) -> Result<End, tokio_postgres::Error> {
    client.run(&format!("BEGIN ISOLATION LEVEL {level}")).await;
    admit(client, resource, token).await?;
    let read = "SELECT value, token FROM register WHERE resource = $1";
    let row = client.query_one(read, &[&resource]).await?;
    let (value, before): (i64, i64) = (row.get(0), row.get(1));
    assert!(before <= token, "{resource}: {token} follows {before}");
    // Not `value + 1` in SQL, which would mend what was read too early.
    let value = value + 1;
    for write in [
        "UPDATE register SET value = $2, token = $3 WHERE resource = $1",
        "INSERT INTO history VALUES ($1, $2, $3)",
    ] {
        client.execute(write, &[&resource, &value, &token]).await?;
    }
    if !commit {
        client.run("ROLLBACK").await;
        return Ok(End::RolledBack);
    }
    client.batch_execute("COMMIT").await?;
    Ok(End::Committed(value))
}

async fn write(client: &Client, level: &str, resource: &str, token: i64, commit: bool) -> End {
    loop {
        match attempt(client, level, resource, token, commit).await {
            Ok(end) => return end,
            Err(error) => {
                client.run("ROLLBACK").await;
                match state::<()>(Err(error)).as_str() {
                    "40001" => {}
                    "FP409" => {
                        let highest = highest(client, resource).await;
                        assert!(highest > token, "{token} was refused after {highest}");
                        return End::Refused;
                    }
                    other => panic!("{resource}, {token}, {level}: {other}"),
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_register_never_goes_back_and_loses_no_write() {
    let seed: u64 = rand::rng().random();
    println!("seed: {seed}");
    let database = fenced().await;
    let observer = database.client().await;
    observer.run(TABLES).await;

    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let client = database.client().await;
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(writer));
        writers.push(tokio::spawn(async move {
            let mut acknowledged = Vec::new();
            let mut refused = 0;
            for n in 1..=WRITES {
                let resource = format!("r{}", rng.random_range(0..RESOURCES));
                // Rising with time, so that all three happen: older, equal, newer.
                let token = n + rng.random_range(0..6);
                let level = LEVELS[rng.random_range(0..LEVELS.len())];
                let commit = rng.random_bool(0.8);
                match write(&client, level, &resource, token, commit).await {
                    End::Committed(value) => acknowledged.push((resource, value, token)),
                    End::RolledBack => {}
                    End::Refused => refused += 1,
                }
            }
            (acknowledged, refused)
        }));
    }
    let mut acknowledged: BTreeMap<String, Vec<(i64, i64)>> = BTreeMap::new();
    let mut refusals = 0;
    for writer in writers {
        let (writes, refused) = writer.await.unwrap();
        refusals += refused;
        for (resource, value, token) in writes {
            acknowledged
                .entry(resource)
                .or_default()
                .push((value, token));
        }
    }
    assert!(refusals > 20, "only {refusals} refusals");
    assert_eq!(acknowledged.len(), RESOURCES);

    for (resource, mut told) in acknowledged {
        told.sort_unstable();
        let sql = "SELECT value, token FROM history WHERE resource = $1 ORDER BY value";
        let rows = observer.query(sql, &[&resource]).await.unwrap();
        let history: Vec<(i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert_eq!(
            history, told,
            "{resource}: what was told is what was written"
        );
        assert!(
            history
                .iter()
                .map(|(value, _)| *value)
                .eq(1..=i64::try_from(history.len()).unwrap()),
            "{resource}: a write was lost"
        );
        assert!(
            history.is_sorted_by_key(|(_, token)| *token),
            "{resource} went back: {history:?}"
        );
        let last = history.last().copied();
        let sql = "SELECT value, token FROM register WHERE resource = $1";
        let row = observer.query_one(sql, &[&resource]).await.unwrap();
        assert_eq!(Some((row.get(0), row.get(1))), last, "{resource}");
        assert_eq!(
            Some(highest(&observer, &resource).await),
            last.map(|(_, token)| token)
        );
    }
}
