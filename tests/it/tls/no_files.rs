//! What stands in the place of a file and is none: nobody waits for it, and none
//! of it ends up in memory.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use fencepost_client::Client;
use fencepost_support::{Server, eventually, tls::HOUR};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{
    CONFIGURATION, database,
    reload::{EXPIRES, told},
    stage::{NAMES, Stage, options},
};
use crate::{
    health::get,
    programs::{bare, cli, expect_no_start, run},
};

/// Puts something there that is no file to be read.
type Put = fn(&Path);

/// Each, and what is told of it.
const HERE: [(Put, &str); 4] = [
    (pipe, "is not a regular file"),
    (huge, "is larger than 1 MiB"),
    (endless, "is not a regular file"),
    (directory, "is not a regular file"),
];

/// Who opens it waits for a writer, who never comes.
fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Takes no room on the disk.
fn huge(path: &Path) {
    fs::File::create(path).unwrap().set_len(3 << 29).unwrap();
}

fn endless(path: &Path) {
    symlink("/dev/zero", path).unwrap();
}

fn directory(path: &Path) {
    fs::create_dir(path).unwrap();
}

/// In KiB, when it was at its highest.
fn memory(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap().trim_end_matches("kB").trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_goes_on_and_takes_the_good_ones_that_come_next() {
    let stage = Stage::new(false).await;
    let before = memory(&stage.server);
    // A file can be renamed over each of these but a directory.
    for (n, (make, what)) in (1_u32..).zip(&HERE[..3]) {
        let at_first = stage.metric(EXPIRES).await;
        fs::remove_file(stage.folder.path("server.crt")).unwrap();
        make(&stage.folder.path("server.crt"));
        told(&stage, &format!("--tls-cert {what}")).await;
        eventually("it counts", async || {
            (stage.reload_failures().await == f64::from(n)).then_some(())
        })
        .await;
        stage.client(stage.trust()).get("a").await.unwrap();
        assert_eq!(stage.metric(EXPIRES).await, at_first);

        let next = stage.authority.issue("server", &NAMES, (n + 1) * HOUR);
        stage.folder.write_both("server", &next);
        eventually("the good ones are used", async || {
            (stage.metric(EXPIRES).await > at_first).then_some(())
        })
        .await;
        stage.client(stage.trust()).get("a").await.unwrap();
    }
    let more = memory(&stage.server) - before;
    assert!(more < 256 << 10, "{more} KiB");
    assert!(!stage.has_logged(stage.folder.path("server.crt").to_str().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_server_and_no_client_starts_with_one() {
    let stage = Stage::new(false).await;
    for (n, (make, what)) in HERE.iter().enumerate() {
        let place = stage.folder.path(&format!("none-{n}"));
        make(&place);
        let place = place.to_str().unwrap();
        let with_tls = Server::builder("postgres://u@127.0.0.1:1/locks")
            .flag("--tls-cert", place)
            .flag("--tls-key", &stage.folder.name("server.key"));
        let line = expect_no_start(with_tls, CONFIGURATION).await;
        assert!(line.contains(&format!("--tls-cert {what}")), "{line}");
        let url = format!("postgres://u@127.0.0.1:1/l?sslmode=verify-full&sslrootcert={place}");
        let line = expect_no_start(Server::builder(&url), CONFIGURATION).await;
        assert!(line.contains(&format!("sslrootcert {what}")), "{line}");
        assert!(!line.contains(place), "{line}");

        let mut command = bare(cli());
        command.args(["get", "a", "--tls-ca", place, "--endpoint", &stage.url()]);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(CONFIGURATION), "{}", ended.said());
        assert!(ended.stderr.contains(what), "{}", ended.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_connects_with_the_roots_before() {
    let stage = Stage::new(false).await;
    // It has read them, and made no connection yet.
    let client = stage.client(stage.trust());
    fs::remove_file(stage.folder.path("ca.crt")).unwrap();
    pipe(&stage.folder.path("ca.crt"));
    client.get("a").await.unwrap();
}

/// The connections to the database are made with what its files hold, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_in_place_of_the_databases_roots_keeps_nobody() {
    let stage = database::Stage::new("127.0.0.1").await;
    let roots = stage.file("ca.crt");
    let url = stage.url(&format!("sslmode=verify-full&sslrootcert={roots}"));
    let server = Server::builder(&url)
        .flag("--drain-delay", "100ms")
        .flag("--drain-timeout", "5s")
        .ready()
        .await;
    let client = Client::connect_lazy(server.url()).unwrap();
    let guard = client.acquire("held", options()).await.unwrap();

    fs::remove_file(&roots).unwrap();
    pipe(roots.as_ref());
    stage.end_connections().await;
    for _ in 0..20 {
        let asked = Instant::now();
        assert_eq!(get(server.http(), "/livez").await.0, 200);
        assert!(asked.elapsed() < Duration::from_secs(1));
    }
    server.wait_ready().await;
    let next = eventually("locks are taken", async || {
        client.acquire("next", options()).await.ok()
    });
    next.await.release().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
    server
        .wait_for_log("the pipe is told", |line| {
            line["error"] == "sslrootcert is not a regular file"
        })
        .await;

    let asked = Instant::now();
    server.sigterm();
    assert!(server.wait_exit().await.success());
    assert!(asked.elapsed() < Duration::from_secs(6));
}
