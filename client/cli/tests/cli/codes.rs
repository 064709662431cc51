//! Exit codes: each of the table, and each way to it.

use crate::{fencepost, finish, run, stub::Stub};

const LEASE: &str = "--owner me --token 7";

#[tokio::test]
async fn done() {
    let (_, server) = Stub::start().await;
    for command in [
        "acquire free".to_owned(),
        format!("renew r {LEASE}"),
        format!("release r {LEASE}"),
        "get r".to_owned(),
    ] {
        let run = run(server, &command).await;
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{command}");
    }
}

#[tokio::test]
async fn get_of_a_free_name_is_1() {
    let (_, server) = Stub::start().await;
    let text = run(server, "get not-found").await;
    assert_eq!((text.code, text.stdout.as_str()), (1, ""));
    assert_eq!(text.stderr, "fencepost: not-found is free\n");
    let json = run(server, "get not-found --output json").await;
    assert_eq!((json.code, json.stdout.as_str()), (1, "{\"lock\":null}\n"));
}

#[tokio::test]
async fn wrong_usage_is_64() {
    for arguments in [
        "",
        "nonsense",
        "acquire",
        "acquire r --ttl 30",
        "acquire r --ttl -1s",
        "acquire r --label novalue",
        "acquire r --label =v",
        "renew r --owner me",
        "renew r --token 7",
        "renew r --owner me --token 0",
        "renew r --owner me --token x",
        "release r --owner me --token 9223372036854775808",
        "get r --output yaml",
        "get r --timeout soon",
    ] {
        let run = finish(fencepost(arguments)).await;
        assert_eq!((run.code, run.stdout.as_str()), (64, ""), "{arguments}");
        assert!(!run.stderr.is_empty());
    }
}

#[tokio::test]
async fn help_and_version_are_0() {
    for arguments in ["--help", "--version", "help", "acquire --help"] {
        let run = finish(fencepost(arguments)).await;
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{arguments}");
        assert!(!run.stdout.is_empty());
    }
}

#[tokio::test]
async fn a_value_that_the_server_refuses_is_64() {
    let (_, server) = Stub::start().await;
    let run = run(server, "acquire invalid").await;
    assert_eq!(run.code, 64);
    assert_eq!(
        run.stderr,
        "fencepost: invalid request: ttl: out of range\n"
    );
}

#[tokio::test]
async fn a_server_that_is_away_is_69() {
    let (_, server) = Stub::start().await;
    let nobody = "get r --timeout 300ms --endpoint http://127.0.0.1:1";
    let refused = finish(fencepost(nobody)).await;
    assert_eq!(refused.code, 69);
    assert!(
        refused.stderr.contains("Connection refused"),
        "{}",
        refused.stderr
    );
    for resource in ["down", "overloaded", "hangs", "proxy"] {
        let run = run(server, &format!("acquire {resource} --timeout 300ms")).await;
        assert_eq!((run.code, run.stdout.as_str()), (69, ""), "{resource}");
        assert_eq!(run.stderr.lines().count(), 1);
    }
}

/// Its database is away: that says more than that another one is not there.
#[tokio::test]
async fn what_one_server_says_is_told_whatever_the_others_do() {
    let (_, server) = Stub::start().await;
    let (there, nobody) = (format!("http://{server}"), "http://127.0.0.1:1".to_owned());
    for endpoints in [[&*there, &nobody].join(","), [&*nobody, &there].join(",")] {
        for command in [
            "get down".to_owned(),
            "acquire down".to_owned(),
            format!("keepalive down --ttl 1s {LEASE}"),
            "run down --wait 2s -- true".to_owned(),
        ] {
            let mut command = fencepost(&format!("--timeout 500ms {command}"));
            command.env("FENCEPOST_ENDPOINT", &endpoints);
            let run = finish(command).await;
            assert_eq!(run.code, 69, "{endpoints} {run:?}");
            for line in run.stderr.lines() {
                assert!(line.contains("Unavailable: constant"), "{run:?}");
            }
        }
        // Nobody has said anything: what is known of whom.
        let mut command = fencepost("get hangs --timeout 300ms");
        command.env("FENCEPOST_ENDPOINT", &endpoints);
        let run = finish(command).await;
        assert_eq!(run.code, 69, "{endpoints} {run:?}");
        let told = "no connection to http://127.0.0.1:1/: Connection refused";
        assert!(run.stderr.contains(told), "{run:?}");
    }
}

#[tokio::test]
async fn a_bug_is_70() {
    let (_, server) = Stub::start().await;
    for resource in ["bug", "nonsense"] {
        let run = run(server, &format!("acquire {resource}")).await;
        assert_eq!((run.code, run.stdout.as_str()), (70, ""), "{resource}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_answer_that_cannot_be_printed_is_not_a_success() {
    let (_, server) = Stub::start().await;
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = fencepost("acquire free");
    command.env("FENCEPOST_ENDPOINT", format!("http://{server}"));
    let status = command.stdout(full).status().await.unwrap();
    assert_eq!(status.code(), Some(70));
}

#[tokio::test]
async fn not_acquired_is_75() {
    let (_, server) = Stub::start().await;
    for format in ["text", "json"] {
        let run = run(server, &format!("acquire held --output {format}")).await;
        assert_eq!(run.code, 75);
        assert!(run.stdout.contains("worker-b"));
        assert!(
            run.stderr.starts_with("fencepost: not acquired: worker-b "),
            "{}",
            run.stderr
        );
    }
}

#[tokio::test]
async fn lost_or_not_yours_is_76() {
    let (_, server) = Stub::start().await;
    for resource in ["not-found", "expired", "not-owner", "superseded", "unknown"] {
        for command in ["renew", "release"] {
            let run = run(server, &format!("{command} {resource} {LEASE}")).await;
            assert_eq!((run.code, run.stdout.as_str()), (76, ""), "{resource}");
            assert_eq!(run.stderr.lines().count(), 1);
        }
    }
    assert_eq!(run(server, "acquire spent").await.code, 76);
}

#[tokio::test]
async fn wrong_configuration_is_78() {
    let (_, server) = Stub::start().await;
    for endpoint in [
        "",
        "127.0.0.1:50051",
        "ftp://a:1",
        "http://u:secret@a:1",
        "http://a:1,",
        "http://127.0.0.1:notaport",
        "https://127.0.0.1:70000",
        "http://127.0.0.1:0",
        "http://:50051",
        "http://::1:50051",
    ] {
        let mut command = fencepost("get r");
        command.env("FENCEPOST_ENDPOINT", endpoint);
        let run = finish(command).await;
        assert_eq!((run.code, run.stdout.as_str()), (78, ""), "{endpoint}");
        assert!(run.stderr.starts_with("fencepost: endpoint "));
        assert!(run.stderr.contains(" of --endpoint: "), "{}", run.stderr);
        assert!(!run.stderr.contains("secret"), "{}", run.stderr);
    }
    assert_eq!(run(server, "acquire no-such-service").await.code, 78);
}
