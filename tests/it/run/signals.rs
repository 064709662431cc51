//! Signals that come to `fencepost` are the command's.

use fencepost_support::calls::{granted, refused};
use rustix::process::Signal;

use super::stage::{Run, WAITING, fresh, python};
use crate::world::{LONG, client, shared};

const ALL: [(&str, Signal); 6] = [
    ("TERM", Signal::TERM),
    ("INT", Signal::INT),
    ("HUP", Signal::HUP),
    ("QUIT", Signal::QUIT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
];

/// It gets the very signal, and the lock is given back when it has ended and not
/// before. Its children are told as well.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_gets_each_signal_and_has_the_time_it_needs() {
    const HANDLES: &str = "
        trap \"echo parent got $0; sleep 0.3; echo parent ends; exit 40\" $0
        (trap \"echo child got $0; exit\" $0; echo ready; while :; do sleep 0.02; done)
        while :; do sleep 0.02; done";
    for (name, signal) in ALL {
        let (mut client, resource) = (client().await, fresh("forwarded"));
        let command = ["/bin/sh", "-c", HANDLES, name];
        let run = Run::start(&shared().await.server.url(), &resource, &[], &command);
        run.says("ready").await;
        run.signal(signal);
        run.says(&format!("parent got {name}")).await;
        run.says(&format!("child got {name}")).await;
        if !run.has_said("parent ends") {
            let holder = refused(&mut client, &resource, "another", LONG).await;
            // Or it had ended in between, and this says nothing.
            assert!(!holder.owner.is_empty());
        }
        run.ends(40).await;
        assert!(run.has_said("parent ends"), "{}", run.process.tail());
        granted(&mut client, &resource, "another", LONG).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_dies_from_a_signal_is_told_by_the_exit_code() {
    for (_, signal) in ALL {
        let (mut client, resource) = (client().await, fresh("died"));
        let command = [python(), "-ISc", WAITING];
        let run = Run::start(&shared().await.server.url(), &resource, &[], &command);
        run.says("ready").await;
        run.signal(signal);
        run.ends(128 + signal.as_raw()).await;
        granted(&mut client, &resource, "another", LONG).await;
    }
}

/// What was ignored when it was started stays ignored, for the command as well.
#[tokio::test(flavor = "multi_thread")]
async fn what_nohup_ignores_stays_ignored() {
    const TELLS: &str = "
        trap 'echo got USR1' USR1
        grep SigIgn /proc/self/status; echo ready
        while :; do sleep 0.02; done";
    let resource = fresh("nohup");
    let run = Run::through(
        "exec nohup \"$@\"",
        &shared().await.server.url(),
        &resource,
        &[],
        &["/bin/sh", "-c", TELLS],
    );
    run.says("ready").await;
    let hup = run.process.log().wait_for(|line| {
        let mask = line.strip_prefix("SigIgn:")?.trim();
        Some(u64::from_str_radix(mask, 16).unwrap() & 1)
    });
    assert_eq!(hup.await, Some(1), "{}", run.process.tail());
    // They are handed on in this order.
    run.signal(Signal::HUP);
    run.signal(Signal::USR1);
    run.says("got USR1").await;
    assert_eq!(run.process.exit_status(), None);
    run.signal(Signal::TERM);
    run.ends(143).await;
}

/// The keys of a terminal and whoever signals a whole group reach a group that
/// the command is not in.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_has_a_process_group_of_its_own() {
    let resource = fresh("group");
    // The fifth word of its state, after the name.
    let command = [
        "/bin/sh",
        "-c",
        "echo $$ is in $(cut -d ' ' -f 5 /proc/$$/stat)",
    ];
    let run = Run::start(&shared().await.server.url(), &resource, &[], &command);
    run.ends(0).await;
    let lines = run.process.log().lines();
    let (pid, group) = lines[0].split_once(" is in ").unwrap();
    assert_eq!(pid, group);
    assert_ne!(pid, run.process.pid().to_string());
}
