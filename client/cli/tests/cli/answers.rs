//! What is printed, in both forms.

use std::time::Duration;

use serde_json::json;

use crate::{
    Run, run,
    stub::{Stub, TOKEN},
};

/// `remaining` is what the stub said less the time of the call.
fn assert_nearly(printed: &str, said: Duration) {
    let seconds: f64 = printed.strip_suffix('s').unwrap().parse().unwrap();
    let said = said.as_secs_f64();
    assert!(seconds < said && seconds > said - 5.0, "{printed}");
}

#[tokio::test]
async fn granted_as_text() {
    let (_, server) = Stub::start().await;
    let run = run(server, "acquire nightly --owner me --ttl 1m").await;
    let keys: Vec<_> = run
        .stdout
        .lines()
        .filter_map(|line| Some(line.split_once(": ")?.0))
        .collect();
    assert_eq!(
        keys,
        [
            "acquired",
            "resource",
            "owner",
            "fencing_token",
            "acquired_at",
            "expires_at",
            "remaining",
            "ttl",
            "labels.host"
        ]
    );
    assert_eq!(run.text("acquired"), "true");
    assert_eq!(run.text("resource"), "nightly");
    assert_eq!(run.text("owner"), "me");
    assert_eq!(run.text("fencing_token"), TOKEN.to_string());
    assert_eq!(run.text("acquired_at"), "2026-11-29T14:36:24.123456Z");
    assert_eq!(run.text("ttl"), "60s");
    assert_nearly(run.text("remaining"), Duration::from_secs(60));
    // What a holder says of itself may not play with the terminal.
    assert_eq!(run.text("labels.host"), "web1\\n\\u{1b}[31m");
}

#[tokio::test]
async fn granted_as_json() {
    let (_, server) = Stub::start().await;
    let mut answer = run(server, "acquire nightly --owner me --output json")
        .await
        .json();
    let remaining = answer["lock"]["remaining"].take();
    assert_nearly(remaining.as_str().unwrap(), Duration::from_secs(30));
    assert_eq!(
        answer,
        json!({
            "acquired": true,
            "lock": {
                "resource": "nightly",
                "owner": "me",
                "fencing_token": TOKEN,
                "acquired_at": "2026-11-29T14:36:24.123456Z",
                "expires_at": "2026-11-29T14:36:54.123456Z",
                "remaining": null,
                "ttl": "30s",
                "labels": { "host": "web1\n\u{1b}[31m" },
            },
        })
    );
}

#[tokio::test]
async fn refused() {
    let (_, server) = Stub::start().await;
    let text = run(server, "acquire held").await;
    assert_eq!(text.text("acquired"), "false");
    assert_eq!(text.text("holder.owner"), "worker-b");
    assert_nearly(text.text("holder.remaining"), Duration::from_secs(30));
    assert_eq!(text.text("holder.labels.host"), "web1\\n\\u{1b}[31m");
    assert!(!text.stdout.contains("token"), "{text:?}");

    let json = run(server, "acquire held --output json").await.json();
    assert_eq!(json["acquired"], false);
    assert_eq!(json["holder"]["owner"], "worker-b");
    assert_eq!(json["lock"], json!(null));
}

#[tokio::test]
async fn renewed_looked_at_and_released() {
    let (_, server) = Stub::start().await;
    let is_lease = |run: &Run| assert_eq!(run.text("fencing_token"), TOKEN.to_string());
    is_lease(&run(server, "renew r --owner me --token 7").await);
    is_lease(&run(server, "get r").await);
    for command in [
        "renew r --owner me --token 7 --output json",
        "get r --output json",
    ] {
        let answer = run(server, command).await.json();
        assert_eq!(answer["lock"]["fencing_token"], TOKEN);
    }
    let release = "release r --owner me --token 7";
    assert_eq!(run(server, release).await.stdout, "released: true\n");
    let json = run(server, &format!("{release} --output json"))
        .await
        .json();
    assert_eq!(json, json!({}));
}
