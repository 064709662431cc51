//! The audit log: who acquired, released and lost what, once for each.

use fencepost_support::{
    Server,
    calls::{self, granted, refused, release, request_with_id, send},
    postgres::fresh_database,
    row_lock::RowLock,
    server::Builder,
};
use serde_json::Value;

use crate::{
    metrics::wait_for,
    world::{LONG, SHORT, expired},
};

fn audited(url: &str) -> Builder {
    Server::builder(url).switch("--audit-log")
}

/// Whether a line is of the audit log, and of this resource.
fn is_of(line: &Value, resource: &str) -> bool {
    line["target"] == "audit" && line["resource"] == resource
}

/// Waits for an event of a resource that has these fields, and returns it.
async fn told(server: &Server, resource: &str, event: &str, field: &str, value: &Value) -> Value {
    let what = format!("{event} of {resource} with {field} = {value}");
    server
        .wait_for_log(&what, |line| {
            is_of(line, resource) && line["event"] == event && line[field] == *value
        })
        .await
}

/// What was told of a resource, as `event owner outcome`.
fn story(server: &Server, resource: &str) -> Vec<String> {
    let lines = server.logs();
    let lines = lines
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let word = |line: &Value, field: &str| line[field].as_str().unwrap_or_default().to_owned();
    lines
        .filter(|line| is_of(line, resource))
        .map(|line| {
            let outcome = word(&line, "outcome") + &word(&line, "reason");
            let words = [word(&line, "event"), word(&line, "owner"), outcome];
            words.join(" ").trim().to_owned()
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_outcome_is_told_once() {
    let database = fresh_database().await;
    let server = audited(&database.url()).ready().await;
    let mut client = server.client().await;

    let mut ask = request_with_id("a", "first", LONG, "id");
    let odd = "\"},\n{\u{1b}[31m\u{2028}";
    ask.labels.insert("odd".to_owned(), odd.to_owned());
    let lock = calls::grant_in(send(&mut client, ask.clone()).await);
    calls::grant_in(send(&mut client, ask.clone()).await);
    refused(&mut client, "a", "second", LONG).await;
    let token = lock.fencing_token;
    release(&mut client, "a", "second", token)
        .await
        .unwrap_err();
    release(&mut client, "a", "first", token).await.unwrap();
    release(&mut client, "a", "first", token).await.unwrap_err();
    send(&mut client, ask).await.unwrap_err();
    let second = granted(&mut client, "a", "second", LONG).await;
    let third = granted(&mut client, "a", "second", LONG).await;

    let last = third.fencing_token.into();
    told(&server, "a", "acquired", "fencing_token", &last).await;
    assert_eq!(
        story(&server, "a"),
        [
            "acquired first granted",
            "acquired first replayed",
            "released first",
            "acquired second granted",
            "lost second TOKEN_SUPERSEDED",
            "acquired second granted",
        ]
    );

    let line = told(&server, "a", "acquired", "outcome", &"granted".into()).await;
    assert_eq!(line["fencing_token"], token);
    let millis = u64::try_from(LONG.as_millis()).unwrap();
    assert_eq!(line["ttl_ms"], millis);
    let labels: Value = serde_json::from_str(line["labels"].as_str().unwrap()).unwrap();
    assert_eq!(labels["odd"], odd);
    let peer = line["peer"].as_str().unwrap();
    assert!(peer.starts_with("127.0.0.1:"), "{peer}");
    assert!(line["subject"].is_null(), "{line}");
    let line = told(&server, "a", "lost", "owner", &"second".into()).await;
    assert_eq!(line["fencing_token"], second.fencing_token);
    assert_eq!(line["next_fencing_token"], third.fencing_token);
    let line = told(&server, "a", "released", "owner", &"first".into()).await;
    assert!(line["held_ms"].as_u64().unwrap() < 60_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_tells_whose_lease_had_expired() {
    let database = fresh_database().await;
    let server = audited(&database.url()).ready().await;
    let mut client = server.client().await;
    // Alone, and by a round whose row somebody else has locked.
    for name in ["round", "alone"] {
        let lost = expired(&mut client, name, "sleeper").await;
        let row = match name {
            "alone" => Some(RowLock::hold(&database.url(), name).await),
            _ => None,
        };
        let taking = tokio::spawn({
            let mut client = client.clone();
            async move { granted(&mut client, name, "next", LONG).await }
        });
        if let Some(row) = row {
            row.wait_for_waiters(1).await;
            row.rollback().await;
        }
        let new = taking.await.unwrap();
        let line = told(&server, name, "lost", "owner", &"sleeper".into()).await;
        assert_eq!(line["reason"], "LOCK_EXPIRED");
        assert_eq!(line["fencing_token"], lost.fencing_token);
        assert_eq!(line["next_owner"], "next");
        assert_eq!(line["next_fencing_token"], new.fencing_token);
        told(&server, name, "acquired", "outcome", &"taken_over".into()).await;
        let story = story(&server, name);
        assert_eq!(story.len(), 3, "{story:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_client_has_gone_is_told_all_the_same() {
    let database = fresh_database().await;
    let server = audited(&database.url()).ready().await;
    let mut client = server.client().await;
    let before = granted(&mut client, "a", "before", SHORT).await;
    release(&mut client, "a", "before", before.fencing_token)
        .await
        .unwrap();
    let row = RowLock::hold(&database.url(), "a").await;
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { calls::acquire(&mut client, "a", "gone", LONG).await }
    });
    row.wait_for_waiters(1).await;
    call.abort();
    // Heard of by the server.
    let cancelled = &[("method", "Acquire"), ("code", "CANCELLED")];
    wait_for(&server, "fencepost_rpcs_total", cancelled, 1.0).await;
    row.rollback().await;
    let back = told(&server, "a", "given_back", "owner", &"gone".into()).await;
    let line = told(&server, "a", "acquired", "owner", &"gone".into()).await;
    assert!(line["fencing_token"].as_i64().unwrap() > before.fencing_token);
    assert_eq!(line["fencing_token"], back["fencing_token"]);
    assert!(line["peer"].is_string(), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_flag_nothing_is_told() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--log", "trace,audit=trace")
        .ready()
        .await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "owner", LONG).await;
    release(&mut client, "a", "owner", lock.fencing_token)
        .await
        .unwrap();
    let audit = |line: &String| line.contains(r#""target":"audit""#);
    assert_eq!(server.logs().iter().filter(|line| audit(line)).count(), 0);
}
