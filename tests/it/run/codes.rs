//! Exit codes: the command's as they are, and ours beside them.

use std::fs;

use fencepost_support::{
    calls::granted,
    system::{free_address, private_directory},
};

use super::stage::{Run, UNSHARE, fresh, may_unshare, plain};
use crate::{
    programs::{bare, cli, run},
    world::{LONG, client, shared},
};

async fn code(flags: &[&str], command: &[&str]) -> Option<i32> {
    let endpoint = shared().await.server.url();
    run(plain(&endpoint, &fresh("code"), flags, command))
        .await
        .code
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_exit_code_is_kept() {
    for number in [0, 1, 2, 42, 64, 75, 76, 125, 126, 127, 128, 255] {
        let script = format!("exit {number}");
        for flags in [&[][..], &["--own-exit-codes", "200"]] {
            let ended = code(flags, &["/bin/sh", "-c", &script]).await;
            assert_eq!(ended, Some(number));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_signal_that_has_ended_the_command_is_told() {
    for (name, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11)] {
        let script = format!("ulimit -c 0; kill -s {name} $$");
        let ended = code(&[], &["/bin/sh", "-c", &script]).await;
        assert_eq!(ended, Some(128 + number), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_be_run_is_told_and_holds_nothing() {
    let directory = private_directory();
    let file = directory.join("not-executable");
    fs::write(&file, "").unwrap();
    let file = file.display().to_string();
    let (mut client, endpoint) = (client().await, shared().await.server.url());
    for (command, number) in [
        (&*file, 126),
        ("/nowhere/at/all", 127),
        ("no-such-one", 127),
    ] {
        let resource = fresh("cannot");
        for flags in [&[][..], &["--own-exit-codes", "200"]] {
            let ended = run(plain(&endpoint, &resource, flags, &[command])).await;
            assert_eq!(ended.code, Some(number), "{}", ended.said());
            let said = format!("fencepost: cannot run {command}: ");
            assert!(ended.stderr.starts_with(&said), "{}", ended.stderr);
        }
        granted(&mut client, &resource, "another", LONG).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_own_codes_differ_and_can_be_moved() {
    let mut client = client().await;
    let held = fresh("held");
    granted(&mut client, &held, "another", LONG).await;
    let nobody = format!("http://{}", free_address());
    let there = shared().await.server.url();
    // Where, what, how, and with which code.
    let free = fresh("own");
    let cases = [
        (&*there, &*held, &["--wait", "0s"][..], 75),
        (&nobody, &free, &["--wait", "0s", "--timeout", "500ms"], 69),
        (&nobody, &free, &["--wait", "700ms"], 69),
        (&there, &free, &["--ttl", "1ms"], 64),
        ("ftp://a:1", &free, &[], 78),
    ];
    for (endpoint, resource, flags, number) in cases {
        for (own, moved) in [(&[][..], 0), (&["--own-exit-codes", "200"], 136)] {
            let flags = [flags, own].concat();
            let ended = run(plain(endpoint, resource, &flags, &["echo", "started"])).await;
            assert_eq!(ended.code, Some(number + moved), "{}", ended.said());
            assert!(!ended.said().contains("started"), "{}", ended.said());
            assert!(ended.stderr.starts_with("fencepost: "), "{}", ended.stderr);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_line_that_makes_no_sense_ends_with_64() {
    let bad = [
        &["run"][..],
        &["run", "a"],
        &["run", "a", "--"],
        &["run", "a", "--ttl", "soon", "--", "true"],
        &["run", "a", "--on-lost", "shrug", "--", "true"],
        &["run", "a", "--own-exit-codes", "250", "--", "true"],
    ];
    for words in bad {
        let mut command = bare(cli());
        command.args(words);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(64), "{words:?}: {}", ended.said());
    }
}

/// The machine lets us start nothing: here, since it does not tell what we are.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_for_a_command_that_never_started_is_given_back() {
    if !may_unshare().await {
        return;
    }
    let (mut client, resource) = (client().await, fresh("nothing-starts"));
    let hidden = format!(
        "exec {} sh -c 'mount -t tmpfs none /proc; exec \"$@\"' sh \"$@\"",
        UNSHARE.join(" ")
    );
    let endpoint = shared().await.server.url();
    let run = Run::through(&hidden, &endpoint, &resource, &[], &["echo", "started"]);
    run.ends(70).await;
    assert!(
        run.has_said("fencepost: cannot start: "),
        "{}",
        run.process.tail()
    );
    granted(&mut client, &resource, "another", LONG).await;
}
