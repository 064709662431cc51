//! Every statement of the store finds its row by the key, whatever the
//! planner believes of the table.
//!
//! A statement that was planned on an empty table keeps its plan for as long
//! as its connection lives. Therefore the sessions here have the server's own
//! settings, stay open while the table grows from nothing to 200,000 rows, and
//! run each statement often enough for a generic plan. The plans are those of
//! the executions themselves (`auto_explain`), and so cover the statements
//! inside the functions too.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    future::poll_fn,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use fencepost_support::{
    Server, calls,
    postgres::{Client, Database, fresh_database},
};
use serde_json::Value;
use tokio_postgres::{AsyncMessage, NoTls, SimpleQueryMessage};

use crate::settings;

/// Executions after which a session has settled for its plan.
const SETTLED: usize = 7;

/// A plan as it was executed.
struct Plan {
    /// The function and its line, for a statement inside a function.
    place: Option<(String, u32)>,
    query: String,
    plan: Value,
}

impl Plan {
    /// From a notice of `auto_explain`.
    fn parse(message: &str, context: &str) -> Option<Self> {
        let (_, json) = message.split_once("plan:\n")?;
        let json: Value = serde_json::from_str(json).unwrap();
        let place = context.lines().find_map(|line| {
            let (function, rest) = line.strip_prefix("PL/pgSQL function ")?.split_once('(')?;
            let line = rest.split_once(" line ")?.1.split(' ').next()?;
            Some((function.to_owned(), line.parse().unwrap()))
        });
        Some(Self {
            place,
            query: json["Query Text"].as_str().unwrap().to_owned(),
            plan: json["Plan"].clone(),
        })
    }

    /// What is wrong with it, if anything: a node that reads the lock table
    /// from one end to the other.
    fn fault(&self) -> Option<String> {
        let in_leap = matches!(&self.place, Some((name, _)) if name.starts_with("fencepost.leap_"));
        if in_leap && self.query.contains("max(") {
            // The largest token of all has no index, and a leap is rare.
            return None;
        }
        let of_many = matches!(&self.place, Some((name, _)) if name.contains("_all_v"));
        walk(&self.plan)
            // Rows are locked in the order in which they were asked for.
            .or_else(|| of_many.then(|| out_of_order(&self.plan)).flatten())
            .map(|node| format!("{node} in {:?}: {}", self.place, self.query))
    }
}

fn out_of_order(node: &Value) -> Option<String> {
    let kind = node["Node Type"].as_str().unwrap();
    if kind.contains("Sort") || kind.contains("Hash") || kind.contains("Merge") {
        return Some(kind.to_owned());
    }
    let below = node.get("Plans").and_then(Value::as_array);
    below.into_iter().flatten().find_map(out_of_order)
}

fn walk(node: &Value) -> Option<String> {
    let kind = node["Node Type"].as_str().unwrap();
    if node["Relation Name"] == "locks" {
        let by_key = match kind {
            "Index Scan" | "Index Only Scan" => node.get("Index Cond").is_some(),
            "Seq Scan" | "Bitmap Heap Scan" => false,
            // It has its own row from the nodes below, which are judged too.
            "ModifyTable" => true,
            "Tid Scan" => true,
            other => panic!("what does a {other} of locks read?"),
        };
        if !by_key {
            return Some(format!("{kind} without a condition on the key"));
        }
    }
    let below = node.get("Plans").and_then(Value::as_array);
    below.into_iter().flatten().find_map(walk)
}

/// A session with the server's settings whose plans are watched.
struct Session {
    client: tokio_postgres::Client,
    plans: Arc<Mutex<Vec<Plan>>>,
}

impl Session {
    async fn open(url: &str, settings: &[(String, String)]) -> Self {
        let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        let plans = Arc::<Mutex<Vec<Plan>>>::default();
        let kept = Arc::clone(&plans);
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notice(notice) = message {
                    let context = notice.where_().unwrap_or_default();
                    kept.lock()
                        .unwrap()
                        .extend(Plan::parse(notice.message(), context));
                }
            }
        });
        for (name, value) in settings {
            let set = format!("SELECT set_config('{name}', '{value}', false)");
            client.simple_query(&set).await.unwrap();
        }
        for (name, sql) in statements() {
            let prepare = format!("PREPARE \"{name}\" AS {sql}");
            client.batch_execute(&prepare).await.unwrap();
        }
        let watch = "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0;
                     SET auto_explain.log_nested_statements = on; SET auto_explain.log_format = json;
                     SET client_min_messages = log";
        client.batch_execute(watch).await.unwrap();
        Self { client, plans }
    }

    /// Executes a statement; returns the column `column` of its last row.
    async fn run(&self, name: &str, arguments: &str, column: &str) -> String {
        let execute = match arguments {
            "" => format!("EXECUTE \"{name}\""),
            arguments => format!("EXECUTE \"{name}\"({arguments})"),
        };
        let answer = self.client.simple_query(&execute).await.unwrap();
        let row = answer.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let value = row.and_then(|row| row.get(column));
        value.unwrap_or("null").to_owned()
    }

    /// Runs every statement, in every state of a row that leads to another
    /// statement inside a function.
    async fn all_statements(&self, n: usize) {
        let name = format!("plan/{n:03}");
        let uuid = "00000000-0000-4000-8000-000000000001";
        let by = async |statement: &str, owner: &str, id: &str| {
            let arguments = format!("'{name}', '{owner}', '{id}', '{uuid}', 60000, '{{}}'");
            self.run(statement, &arguments, "outcome").await
        };
        let acquire = async |owner: &str, id: &str| by("acquire", owner, id).await;
        let get = format!("'{name}'");
        let token = async || self.run("get", &get, "fencing_token").await;

        self.run("check", "", "version").await;
        assert_eq!(self.run("strangers", "", "format").await, "null");
        self.run("position", "", "token").await;
        self.run("leap", "0, false", "leapt").await;
        let holds = self.run("probe", "", "identity_holds").await;
        assert_eq!(holds, "t", "a leap that was not needed changes nothing");

        assert_eq!(token().await, "null");
        assert_eq!(acquire("a", "r").await, "granted");
        assert_eq!(acquire("a", "r").await, "replayed");
        assert_eq!(acquire("b", "").await, "held");
        let renew = format!("'{name}', 'a', {}, null", token().await);
        assert_eq!(self.run("renew", &renew, "outcome").await, "renewed");
        let renew = format!("'{{{name}}}', '{{a}}', '{{{}}}', '{{null}}'", token().await);
        assert_eq!(self.run("old renew", &renew, "outcome").await, "renewed");
        let missing = "'{nobody}', '{a}', '{1}', '{null}'";
        assert_eq!(self.run("old renew", missing, "outcome").await, "not_found");
        let missing = "'nobody', 'a', 1, null";
        assert_eq!(self.run("renew", missing, "outcome").await, "not_found");
        assert_eq!(acquire("a", "r").await, "spent");
        assert_eq!(acquire("a", "").await, "granted");
        let release = format!("'{name}', 'a', {}", token().await);
        assert_eq!(self.run("release", &release, "outcome").await, "released");
        assert_eq!(acquire("a", "").await, "granted");
        let release = format!("'{name}', 'a', {}", token().await);
        let released = self.run("old release", &release, "outcome").await;
        assert_eq!(released, "released");
        assert_eq!(acquire("b", "").await, "granted");
        assert_eq!(by("old acquire", "b", "o").await, "granted");
        assert_eq!(by("old acquire", "b", "o").await, "replayed");
        self.statements_of_many(&name, uuid).await;
        let orphan = format!("'{{{name}}}', '{{{uuid}}}'");
        assert_eq!(self.run("give_back", &orphan, "given_back").await, "t");
        assert_ne!(
            self.run("purge", "'plan', 500, 0, 'infinity'", "purged")
                .await,
            "0"
        );
        self.run("purge", "'', 500, 600000, 'infinity'", "purged")
            .await;
        self.run("census", "'', 1000", "live").await;
    }

    /// Those of a round, on a row that is held by `b`, and on one that is not there.
    async fn statements_of_many(&self, name: &str, uuid: &str) {
        let names = format!("'{{{name},{name}+}}'");
        let acquire = async |statement: &str, owners: &str| {
            let arguments = format!(
                "{names}, '{owners}', '{{\"\",\"\"}}', '{{{uuid},{uuid}}}', '{{60000,60000}}',
                 ARRAY['{{}}', '{{}}']::jsonb[]"
            );
            self.run(statement, &arguments, "outcome").await
        };
        assert_eq!(acquire("acquire_all", "{c,c}").await, "held");
        assert_eq!(acquire("old acquire_all", "{b,c}").await, "granted");
        assert_eq!(acquire("acquire_all", "{b,c}").await, "superseded");
        let token = async || self.run("get", &format!("'{name}'"), "fencing_token").await;
        let got = self.run("get_all", &names, "owner").await;
        assert!(["b", "c"].contains(&got.as_str()), "{got}");
        let leases = format!("{names}, '{{b,c}}', '{{{},1}}'", token().await);
        let renew = format!("{leases}, '{{null,null}}'");
        assert_eq!(self.run("renew_all", &renew, "outcome").await, "superseded");
        assert_eq!(
            self.run("release_all", &leases, "outcome").await,
            "superseded"
        );
        let released = self.run("old release_all", &leases, "outcome").await;
        assert_eq!(released, "superseded");
        // As before, with the attempt that is given back.
        let again = format!("'{name}', 'b', '', '{uuid}', 60000, '{{}}'");
        assert_eq!(self.run("acquire", &again, "outcome").await, "granted");
    }

    /// The plans since the last look.
    fn take(&self) -> Vec<Plan> {
        std::mem::take(&mut self.plans.lock().unwrap())
    }
}

/// What servers of earlier versions send, and run side by side with ours.
const OLD: [(&str, &str); 5] = [
    (
        "old acquire",
        "SELECT outcome FROM fencepost.acquire_v1($1, $2, $3, $4, $5, $6)",
    ),
    (
        "old acquire_all",
        "SELECT resource, outcome FROM fencepost.acquire_all_v1($1, $2, $3, $4, $5, $6)",
    ),
    (
        "old renew",
        "SELECT outcome FROM fencepost.renew_v1($1, $2, $3, $4, true)",
    ),
    (
        "old release",
        "SELECT outcome FROM fencepost.release_v1($1, $2, $3)",
    ),
    (
        "old release_all",
        "SELECT resource, outcome FROM fencepost.release_all_v1($1, $2, $3)",
    ),
];

/// Name and text of every statement of the store.
pub(crate) fn statements() -> BTreeMap<String, String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("server/src/store/sql");
    let entry = |path: &Path| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    let files = fs::read_dir(directory).unwrap();
    let old = OLD.map(|(name, sql)| (name.to_owned(), sql.to_owned()));
    files
        .map(|file| entry(&file.unwrap().path()))
        .chain(old)
        .collect()
}

/// How often a text speaks of the lock table, outside of comments.
fn mentions(sql: &str) -> usize {
    let code = sql.lines().map(|line| line.split("--").next().unwrap());
    code.map(|line| line.matches("fencepost.locks").count())
        .sum()
}

/// What was executed so far, to see that nothing was left out.
#[derive(Default)]
struct Seen {
    texts: BTreeSet<String>,
    places: BTreeMap<(String, u32), usize>,
}

impl Seen {
    fn judge(&mut self, state: &str, plans: Vec<Plan>) {
        assert!(!plans.is_empty(), "{state}: no plan was seen");
        for plan in plans {
            if let Some(fault) = plan.fault() {
                panic!("{state}: {fault}\n{:#}", plan.plan);
            }
            let mentions = mentions(&plan.query);
            match plan.place {
                Some(place) => self.places.insert(place, mentions).map_or((), drop),
                None => drop(self.texts.insert(plan.query)),
            }
        }
    }

    /// Every file, and every mention of the lock table in every function.
    async fn assert_complete(&self, client: &Client) {
        for (name, sql) in statements() {
            let seen = self.texts.iter().any(|text| text.contains(sql.trim()));
            assert!(seen, "{name}.sql was not run: give it a case here");
        }
        let functions = client
            .query(
                "SELECT 'fencepost.' || proname, prosrc FROM pg_proc
                  WHERE pronamespace = 'fencepost'::regnamespace",
                &[],
            )
            .await
            .unwrap();
        for function in functions {
            let (name, source): (String, String) = (function.get(0), function.get(1));
            let ran = self.places.iter().filter(|((of, _), _)| *of == name);
            let ran: usize = ran.map(|(_, mentions)| mentions).sum();
            assert_eq!(ran, mentions(&source), "statements of {name} that were run");
        }
    }
}

/// A database with the schema, and what the server sets on its sessions.
async fn prepared() -> (Database, Client, Vec<(String, String)>) {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let client = database.client().await;
    settings::record(&client).await;
    calls::granted(
        &mut server.client().await,
        "settings",
        "a",
        Duration::from_secs(9),
    )
    .await;
    let settings = settings::of_the_server(&client).await;
    assert!(settings.contains(&("enable_seqscan".to_owned(), "off".to_owned())));
    settings::end(&client).await;
    client.run("TRUNCATE fencepost.locks").await;
    // Nobody analyzes behind the test's back.
    client
        .run("ALTER TABLE fencepost.locks SET (autovacuum_enabled = off)")
        .await;
    (database, client, settings)
}

/// Live leases up to this many.
async fn fill(client: &Client, count: u32) {
    client
        .run(&format!(
            "INSERT INTO fencepost.locks
             SELECT 'fill/' || lpad(n::text, 9, '0'), 'owner ' || n, false, n + 1, n, 60000, now(),
                    now() + interval '1 day', false, '', gen_random_uuid(), 1, '{{}}'
               FROM generate_series(1, {count}) AS n
                 ON CONFLICT DO NOTHING"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_the_lock_table() {
    let (database, client, settings) = prepared().await;
    let states: [(&str, u32, &str); 6] = [
        ("empty, never analyzed", 0, ""),
        ("empty, analyzed", 0, "VACUUM ANALYZE fencepost.locks"),
        ("150 rows, analyzed when empty", 150, ""),
        ("150 rows, analyzed", 150, "ANALYZE fencepost.locks"),
        ("200,000 rows, analyzed when 150", 200_000, ""),
        ("200,000 rows, analyzed", 200_000, "ANALYZE fencepost.locks"),
    ];
    let mut sessions: Vec<Session> = Vec::new();
    let mut seen = Seen::default();
    for (state, rows, prepare) in states {
        fill(&client, rows).await;
        client.run(prepare).await;
        for session in &sessions {
            session.all_statements(0).await;
            seen.judge(state, session.take());
        }
        let session = Session::open(&database.url(), &settings).await;
        for n in 0..SETTLED {
            session.all_statements(n).await;
        }
        session.run("leap", "0, true", "leapt").await;
        seen.judge(state, session.take());
        sessions.push(session);
    }
    seen.assert_complete(&client).await;
}

#[tokio::test]
async fn a_scan_of_the_lock_table_would_be_seen() {
    let (database, client, settings) = prepared().await;
    fill(&client, 150).await;
    let session = Session::open(&database.url(), &settings).await;
    for scan in [
        "SELECT owner FROM fencepost.locks WHERE released",
        "SELECT owner FROM fencepost.locks ORDER BY resource",
        "UPDATE fencepost.locks SET claims = 2 WHERE owner = 'nobody'",
        "DO $$ BEGIN PERFORM FROM fencepost.locks WHERE owner = 'nobody' FOR UPDATE; END $$",
    ] {
        session.client.batch_execute(scan).await.unwrap();
        let plans = session.take();
        assert!(plans.iter().any(|plan| plan.fault().is_some()), "{scan}");
    }
}
