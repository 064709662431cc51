//! The object store recipe, `client/fence/object_store.py`, as its own process
//! against a stub of a store with conditional writes.

use std::{path::Path, process::Command};

use tokio::{io::AsyncReadExt as _, net::TcpListener, task::JoinSet};

use crate::{
    object_stub::{FORBIDDEN, NOWHERE, ObjectStub, WEAK},
    programs::{Ended, run},
};

const KEY: &str = "/bucket/report";

fn recipe_itself() -> Command {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("client/fence/object_store.py");
    let mut command = Command::new("python3");
    command.arg(recipe);
    command
}

fn recipe_command(store: &ObjectStub, token: i64, arguments: &[&str]) -> Command {
    let mut command = recipe_itself();
    command
        .args([store.url(KEY), token.to_string()])
        .args(arguments);
    command
}

async fn recipe(store: &ObjectStub, token: i64, arguments: &[&str]) -> Ended {
    run(recipe_command(store, token, arguments)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_claims_writes_and_is_followed() {
    let store = ObjectStub::start().await;
    for (token, arguments, code, body) in [
        (9, &["claim"][..], 0, ""),
        (9, &["append", "nine"], 0, "nine\n"),
        (9, &["append", "again"], 0, "nine\nagain\n"),
        // Above 9 as a number, below it as text.
        (10, &["claim"], 0, "nine\nagain\n"),
        (9, &["append", "late"], 76, "nine\nagain\n"),
        (10, &["append", "ten"], 0, "nine\nagain\nten\n"),
        (0, &["append", "zero"], 64, "nine\nagain\nten\n"),
    ] {
        let ended = recipe(&store, token, arguments).await;
        assert_eq!(
            ended.code,
            Some(code),
            "{token} {arguments:?}: {}",
            ended.stderr
        );
        assert_eq!(store.object(KEY).body, body, "{token} {arguments:?}");
    }
    assert_eq!(store.object(KEY).token, 10);
}

/// The race that the condition is for: the old holder has read, and found its own
/// token; then the new one writes; then the old one writes.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_between_read_and_write_is_not_overwritten() {
    let store = ObjectStub::start().await;
    // Also when the object was not there at the read.
    for exists in [false, true] {
        if exists {
            store.put(KEY, "old", 5);
        }
        store.put_after_next_get("new", 7);
        let late = recipe(&store, 5, &["append", "late"]).await;
        assert_eq!(late.code, Some(76), "{}", late.said());
        assert_eq!(store.object(KEY).body, "new");
        assert_eq!(store.object(KEY).token, 7);
        assert_eq!(store.refused(), 1 + u32::from(exists));
    }
}

/// A claim changes nothing but the token, and a store's ETag may be made from the
/// content alone: the old holder, which has read, must not write all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_unchanged_content_shuts_out_who_has_read() {
    let store = ObjectStub::start().await;
    store.put(KEY, "as it is", 5);
    store.put_after_next_get("as it is", 7);
    let late = recipe(&store, 5, &["append", "late"]).await;
    assert_eq!(late.code, Some(76), "{}", late.said());
    assert_eq!(store.object(KEY).body, "as it is");
    assert_eq!(store.object(KEY).token, 7);
}

/// One who comes between with the same or an older token is no reason to stop: the
/// write is made again, on what is there by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_by_an_older_holder_is_not_lost() {
    let store = ObjectStub::start().await;
    store.put(KEY, "old\n", 5);
    store.put_after_next_get("old\nolder\n", 6);
    let ended = recipe(&store, 7, &["append", "mine"]).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(store.object(KEY).body, "old\nolder\nmine\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_never_goes_back_and_loses_no_line() {
    let store = ObjectStub::start().await;
    let tokens: Vec<i64> = (0..16).map(|n| 1 + (n * 7) % 5).collect();
    let lines: Vec<String> = tokens
        .iter()
        .enumerate()
        .map(|(n, token)| format!("{token} {n}"))
        .collect();
    let store = &store;
    let mut writing = JoinSet::new();
    for (token, line) in tokens.into_iter().zip(lines) {
        let command = recipe_command(store, token, &["append", &line]);
        writing.spawn(async move { (run(command).await, line) });
    }
    let mut acknowledged = Vec::new();
    for (ended, line) in writing.join_all().await {
        match ended.code {
            Some(0) => acknowledged.push(line),
            Some(76) => {}
            other => panic!("{other:?}: {}", ended.stderr),
        }
    }
    let body = store.object(KEY).body;
    let mut written: Vec<&str> = body.lines().collect();
    let token = |line: &&str| line.split_once(' ').unwrap().0.parse::<i64>().unwrap();
    assert!(written.is_sorted_by_key(token), "{body}");
    written.sort_unstable();
    acknowledged.sort_unstable();
    assert_eq!(written, acknowledged);
    assert!(body.lines().any(|line| token(&line) == 5), "{body}");
}

/// One line on stderr says why, and no trace of the program's insides.
#[tokio::test(flavor = "multi_thread")]
async fn what_goes_wrong_is_told_in_one_line() {
    let store = ObjectStub::start().await;
    let [there, forbidden, weak, nowhere] =
        [KEY, FORBIDDEN, WEAK, NOWHERE].map(|key| store.url(key));
    for (arguments, code, says) in [
        (&[][..], 64, "required"),
        (&["ftp://host/key", "5", "claim"], 64, "http(s)://"),
        (&["http://host", "5", "claim"], 64, "http(s)://"),
        (&["http://host:port/key", "5", "claim"], 64, "port"),
        (&[&there, "5", "delete"], 64, "delete"),
        (&[&there, "five", "claim"], 64, "1 to 2^53 - 1"),
        (&[&there, "9007199254740992", "claim"], 64, "1 to 2^53 - 1"),
        (&[&there, "5", "append"], 64, "TEXT"),
        (&["http://127.0.0.1:1/key", "5", "claim"], 69, "refused"),
        (&[&forbidden, "5", "claim"], 69, "403"),
        // To go on would be to try for ever.
        (&[&weak, "5", "claim"], 69, "ETag"),
        (&[&nowhere, "5", "claim"], 69, "404"),
    ] {
        let mut command = recipe_itself();
        command.args(arguments);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(code), "{arguments:?} {}", ended.stderr);
        assert_eq!(ended.stdout, "", "{arguments:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert!(ended.stderr.contains(says), "{says}: {}", ended.stderr);
    }
    let mut command = recipe_itself();
    command.arg("--help");
    let help = run(command).await;
    assert_eq!(help.code, Some(0), "{}", help.stderr);
    for word in ["URL", "TOKEN", "claim", "append", "76"] {
        assert!(help.stdout.contains(word), "{word}: {}", help.stdout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_spoken_to_an_https_url() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut command = recipe_itself();
    command.args([
        &format!("https://{}/key", listener.local_addr().unwrap()),
        "5",
        "claim",
    ]);
    let (ended, first) = tokio::join!(run(command), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_u8().await.unwrap()
    });
    // A record of TLS's handshake.
    assert_eq!(first, 22);
    assert_eq!(ended.code, Some(69), "{}", ended.said());
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
}
