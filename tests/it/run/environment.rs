//! What the command knows of its lock.

use fencepost_support::calls::{expect_error, get, granted};

use super::stage::{Run, fresh};
use crate::{
    programs::cli,
    world::{LONG, client, shared},
};

#[tokio::test(flavor = "multi_thread")]
async fn the_command_finds_its_lock_in_its_environment() {
    const TELLS: &str = r#"
        trap 'exit 0' USR1
        echo "lock $FENCEPOST_RESOURCE $FENCEPOST_OWNER $FENCEPOST_TOKEN"
        while :; do sleep 0.02; done"#;
    let (mut client, resource) = (client().await, fresh("environment"));
    let endpoint = shared().await.server.url();
    let flags = ["--label", "build=7"];
    let run = Run::start(&endpoint, &resource, &flags, &["/bin/sh", "-c", TELLS]);
    run.says("lock ").await;
    let lock = get(&mut client, &resource).await.unwrap();
    let line = format!("lock {resource} {} {}", lock.owner, lock.fencing_token);
    assert!(run.has_said(&line), "not {line}: {}", run.process.tail());
    assert_eq!(lock.labels["build"], "7");
    run.signal(rustix::process::Signal::USR1);
    run.ends(0).await;

    // A name of the caller's own.
    let flags = ["--owner", "me"];
    let run = Run::start(&endpoint, &resource, &flags, &["/bin/sh", "-c", TELLS]);
    run.says(&format!("lock {resource} me ")).await;
    run.signal(rustix::process::Signal::USR1);
    run.ends(0).await;
}

/// The owner in its environment is its parent's: it must not become its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_within_a_run_is_refused_its_parents_lock() {
    const NESTS: &str = r#"
        "$0" --endpoint "$1" run "$FENCEPOST_RESOURCE" --wait 0s -- echo inside
        echo "refused with $?"
        "$0" --endpoint "$1" get "$FENCEPOST_RESOURCE" --output json
        "$0" --endpoint "$1" run "$FENCEPOST_RESOURCE-other" --wait 0s -- echo elsewhere
        exit 6"#;
    let (mut client, resource) = (client().await, fresh("nested"));
    let endpoint = shared().await.server.url();
    let program = cli().display().to_string();
    let command = ["/bin/sh", "-c", NESTS, &program, &endpoint];
    let run = Run::start(&endpoint, &resource, &["--owner", "outer"], &command);
    run.ends(6).await;
    assert!(run.has_said("refused with 75"), "{}", run.process.tail());
    assert!(run.has_said(r#""owner":"outer""#), "{}", run.process.tail());
    assert!(!run.has_said("inside"), "{}", run.process.tail());
    assert!(run.has_said("elsewhere"), "{}", run.process.tail());
    expect_error(
        get(&mut client, &resource).await,
        tonic::Code::NotFound,
        "LOCK_NOT_FOUND",
    );
    granted(&mut client, &resource, "b", LONG).await;
}
