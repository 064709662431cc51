//! A short run with a few kinds of faults.

use std::time::Duration;

use fencepost_chaos::{Options, run};
use fencepost_model::default_directory;

#[tokio::test(flavor = "multi_thread")]
async fn a_few_faults_contradict_nothing() {
    let kinds = [
        "replica-kill",
        "client-answers-lost",
        "postgres-immediate",
        "terminate-storm",
    ];
    let report = run(&Options {
        seed: 40,
        time: Duration::ZERO,
        only: kinds.map(str::to_owned).into(),
        rounds: kinds.len(),
        directory: default_directory(),
        older: None,
    })
    .await;
    assert!(report.is_good(), "{report}");
    for kind in kinds {
        assert!(report.count(kind) > 0, "no {kind}\n{report}");
    }
    assert!(report.operations() > 1000, "{report}");
}
