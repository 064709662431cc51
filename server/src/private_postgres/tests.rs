//! The whole thing, with the real Postgres of this machine.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may panic, and is no server"
)]

use std::{
    env, io,
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    process::{Child, Command},
};

use rustix::process::{Signal, kill_process};
use uuid::Uuid;

use super::*;

const HELPER_DIR: &str = "FENCEPOST_TEST_DATA_DIR";

/// A data directory that ends with its test, and its Postgres with it.
pub(super) struct TestDir(pub(super) PathBuf);

impl TestDir {
    pub(super) fn new() -> Self {
        Self::named("fp-")
    }

    fn named(prefix: &str) -> Self {
        let path = env::temp_dir().join(format!("{prefix}{}", Uuid::new_v4().simple()));
        fs::create_dir(&path).unwrap();
        // As tempdirs come; Postgres's user could not pass it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }

    fn cluster(&self) -> PathBuf {
        self.0.join("postgres")
    }

    fn pid(&self) -> rustix::process::Pid {
        let text = fs::read_to_string(self.cluster().join("postmaster.pid")).unwrap();
        postmaster::parse(&text).unwrap().0
    }

    async fn until_ready(&self) {
        let ready = || matches!(postmaster::find(&self.cluster()), Ok(Some(p)) if p.ready);
        until(ready).await;
    }

    fn has_half_made_cluster(&self) -> bool {
        fs::read_dir(&self.0).unwrap().flatten().any(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with(cluster::NEW_CLUSTER_PREFIX)
        })
    }

    /// A server in a process of its own: this test binary, told to run
    /// [`helper`] alone.
    fn helper(&self) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "private_postgres::tests::helper", "--nocapture"]);
        command.env(HELPER_DIR, &self.0);
        command
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let pid_file = self.cluster().join("postmaster.pid");
        if pid_file.exists() {
            let _ = kill_process(self.pid(), Signal::QUIT);
        }
        for _ in 0..100 {
            if !pid_file.exists() {
                break;
            }
            std::thread::sleep(POLL);
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

async fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + START_LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long");
        sleep(Duration::from_millis(20)).await;
    }
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

async fn show(postgres: &PrivatePostgres, setting: &str) -> String {
    let (client, connection) = tokio_postgres::connect(&postgres.url(), tokio_postgres::NoTls)
        .await
        .unwrap();
    let task = tokio::spawn(connection);
    let row = client
        .query_one(&format!("SHOW {setting}"), &[])
        .await
        .unwrap();
    drop(client);
    task.await.unwrap().unwrap();
    row.get(0)
}

/// Everything a data directory goes through, without a kill.
async fn life(data_dir: &Path) {
    let first = PrivatePostgres::start(data_dir).await.unwrap();
    for (setting, value) in [
        ("listen_addresses", ""),
        ("unix_socket_permissions", "0700"),
        ("max_connections", "100"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("data_checksums", "on"),
        ("server_encoding", "UTF8"),
        ("lc_collate", "C"),
    ] {
        assert_eq!(show(&first, setting).await, value, "{setting}");
    }

    let second = PrivatePostgres::start(data_dir).await.unwrap_err();
    assert!(
        matches!(second, PrivatePostgresError::InUse { .. }),
        "{second}"
    );

    let pid = || fs::read_to_string(data_dir.join("postgres/postmaster.pid")).unwrap();
    let before = pid();
    drop(first);
    let third = PrivatePostgres::start(data_dir).await.unwrap();
    assert_eq!(pid(), before, "the running postmaster is taken over");

    third.stop().await.unwrap();
    assert!(!data_dir.join("postgres/postmaster.pid").exists());
    let fourth = PrivatePostgres::start(data_dir).await.unwrap();
    assert_eq!(show(&fourth, "port").await, "5432");
    fourth.stop().await.unwrap();
}

/// Other tests run it in a process of its own; without them it has nothing to do.
#[tokio::test]
async fn helper() {
    let Some(data_dir) = env::var_os(HELPER_DIR) else {
        return;
    };
    if env::var_os("FENCEPOST_TEST_LIFE").is_some() {
        return life(Path::new(&data_dir)).await;
    }
    let _postgres = PrivatePostgres::start(Path::new(&data_dir)).await.unwrap();
    std::future::pending().await
}

#[tokio::test]
async fn lives_as_the_user_of_the_test() {
    let dir = TestDir::new();
    life(&dir.0).await;
}

#[tokio::test]
async fn lives_as_a_plain_user() {
    if !geteuid().is_root() {
        return; // The test above was it.
    }
    let dir = TestDir::new();
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let (uid, gid) = places::ids_of("nobody", &passwd).unwrap();
    chown(&dir.0, Some(uid), Some(gid)).unwrap();
    let mut helper = dir.helper();
    helper.env("FENCEPOST_TEST_LIFE", "1").uid(uid).gid(gid);
    match helper.current_dir("/").output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        // The test binary lies where that user may not go.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn survives_a_kill_of_its_server() {
    let dir = TestDir::new();
    let server = dir.helper().spawn().unwrap();
    dir.until_ready().await;
    let postmaster = dir.pid();
    kill(server);

    let next = PrivatePostgres::start(&dir.0).await.unwrap();
    assert_eq!(dir.pid(), postmaster);
    next.stop().await.unwrap();
}

#[tokio::test]
async fn a_kill_while_the_cluster_is_made_leaves_nothing_half_made() {
    let dir = TestDir::new();
    let server = dir.helper().spawn().unwrap();
    until(|| dir.has_half_made_cluster()).await;
    kill(server);
    assert!(!dir.cluster().exists());

    let next = PrivatePostgres::start(&dir.0).await.unwrap();
    assert_eq!(show(&next, "port").await, "5432");
    next.stop().await.unwrap();
    // An initdb that was still at work may have left a little once more.
    cluster::remove_leftovers(&dir.0);
    assert!(!dir.has_half_made_cluster());
}

#[tokio::test]
async fn recovers_from_a_crash_whose_pid_went_to_somebody_else() {
    let dir = TestDir::new();
    let first = PrivatePostgres::start(&dir.0).await.unwrap();
    let pid_file = dir.cluster().join("postmaster.pid");
    let text = fs::read_to_string(&pid_file).unwrap();
    let stale = text.replacen(&dir.pid().to_string(), &std::process::id().to_string(), 1);
    first.stop().await.unwrap();
    fs::write(&pid_file, stale).unwrap();

    let next = PrivatePostgres::start(&dir.0).await.unwrap();
    assert_eq!(show(&next, "port").await, "5432");
    next.stop().await.unwrap();
}

#[tokio::test]
async fn says_which_setting_postgres_refused() {
    let dir = TestDir::new();
    PrivatePostgres::start(&dir.0)
        .await
        .unwrap()
        .stop()
        .await
        .unwrap();
    let settings = dir.cluster().join("postgresql.auto.conf");
    let good = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, format!("{good}nonsense = 1\n")).unwrap();
    let error = PrivatePostgres::start(&dir.0).await.unwrap_err();
    assert!(error.to_string().starts_with("pg_ctl failed: "), "{error}");
    assert!(error.to_string().contains("FATAL"), "{error}");
}

#[tokio::test]
async fn a_deep_directory_has_its_socket_in_tmp() {
    let dir = TestDir::named(&format!("fp {}", "x".repeat(100)));
    let postgres = PrivatePostgres::start(&dir.0).await.unwrap();
    assert!(postgres.url().starts_with("host='/tmp/fencepost-"));
    assert_eq!(show(&postgres, "port").await, "5432");
    let socket_dir = postgres.socket_dir.clone();
    postgres.stop().await.unwrap();
    fs::remove_dir(socket_dir).unwrap();
}

#[tokio::test]
async fn a_cluster_of_a_version_that_is_not_installed() {
    let dir = TestDir::new();
    fs::create_dir(dir.cluster()).unwrap();
    fs::write(dir.cluster().join("PG_VERSION"), "9.6\n").unwrap();
    let error = PrivatePostgres::start(&dir.0).await.unwrap_err();
    assert!(
        matches!(&error, PrivatePostgresError::VersionNotInstalled { version, .. } if version == "9.6"),
        "{error}"
    );
}
