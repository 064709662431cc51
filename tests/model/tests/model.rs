//! A short run on a healthy system.

use std::time::Duration;

use fencepost_model::{Load, Options, default_directory, verdict};
use fencepost_support::{Server, postgres::fresh_database};

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_system_contradicts_no_invariant() {
    let (locks, register) = (fresh_database().await, fresh_database().await);
    let url = locks.url();
    let start = || Server::start(&url);
    let (a, b, c) = tokio::join!(start(), start(), start());
    let servers = [a, b, c];
    let endpoints = servers.each_ref().map(Server::url);
    let mut options = Options::new(rand::random(), endpoints.into());
    options.register = Some(register.url());
    let load = Load::start(options).await.unwrap();
    tokio::time::sleep(Duration::from_secs(8)).await;
    let history = load.stop().await.unwrap();
    let summary = verdict(&history, &default_directory()).unwrap_or_else(|error| panic!("{error}"));

    // It was no idle run.
    for kind in ["Acquire", "Renew", "Release", "KeepAlive", "Get", "Write"] {
        let count = summary.count(kind, "ok");
        assert!(count > 10, "{count} times {kind}:\n{summary}");
    }
    for (kind, outcome) in [
        ("Acquire", "refused"),
        ("Acquire", "unknown"),
        ("Write", "FP409"),
    ] {
        let count = summary.count(kind, outcome);
        assert!(count > 0, "{kind} was never {outcome}:\n{summary}");
    }
}
