//! One cluster: made, started, stopped, killed, removed.

use std::{
    fs::OpenOptions,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use rustix::process::Signal;

use super::{binaries::program, client::Client};
use crate::{
    leash::End,
    process::Process,
    system::{self, PrivateDirectory, children_of, free_address, is_alive, run},
    wait::eventually,
};

/// Settings of every cluster. The address is on the command line, so that a
/// copy of a data directory can run elsewhere.
const SETTINGS: &[(&str, &str)] = &[
    ("fsync", "on"),
    ("synchronous_commit", "on"),
    ("full_page_writes", "on"),
    ("max_connections", "300"),
    ("shared_buffers", "64MB"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    ("log_line_prefix", "%m [%p] %a "),
    // Standbys that fall behind while a test holds them still find their WAL.
    ("wal_keep_size", "256MB"),
    ("wal_receiver_status_interval", "1"),
];

/// How a cluster is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Sessions are ended, a checkpoint is written.
    Fast,
    /// All processes leave at once; the next start recovers.
    Immediate,
}

/// A private cluster. Dropping it stops it and removes its files.
#[derive(Debug)]
pub struct Postgres {
    // Dropped first: nobody writes to the directory that is dropped next.
    pub(super) process: Option<Process>,
    pub(super) directory: PrivateDirectory,
    pub(super) address: SocketAddr,
    environment: Vec<(String, String)>,
}

/// How a cluster differs from the usual one.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    settings: Vec<(String, String)>,
    environment: Vec<(String, String)>,
}

impl Builder {
    /// Adds a line to `postgresql.conf`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds a variable to the environment of the server, for a fake clock.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Keeps all WAL, so that a copy can [recover](Postgres::recover_to) to any point.
    pub fn archiving(self) -> Self {
        self.setting("archive_mode", "on").setting(
            "archive_command",
            "mkdir -p archive && cp %p archive/%f.part && mv archive/%f.part archive/%f",
        )
    }

    /// Makes the cluster and starts it.
    pub async fn start(self) -> Postgres {
        let mut postgres = Postgres::stopped();
        postgres.environment = self.environment;
        let mut initdb = program("initdb");
        initdb
            .args(["--username=postgres", "--auth=trust", "--encoding=UTF8"])
            .args(["--locale=C", "--no-sync", "--no-instructions", "--pgdata"])
            .arg(postgres.data());
        run(initdb).await;
        for (name, value) in SETTINGS {
            postgres.append_setting(name, value);
        }
        for (name, value) in &self.settings {
            postgres.append_setting(name, value);
        }
        postgres.start_again().await;
        postgres
    }
}

impl Postgres {
    /// A cluster with settings of its own.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Makes a cluster with the usual settings and starts it.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// A cluster that is not started, its data directory yet to be made.
    pub(super) fn stopped() -> Self {
        Self {
            directory: system::private_directory(),
            address: free_address(),
            environment: Vec::new(),
            process: None,
        }
    }

    /// Adds a variable to its environment at the next start, for a fake clock.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Its TCP address; the same for as long as this value lives.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The directory of its Unix socket.
    pub fn socket_directory(&self) -> &Path {
        &self.directory
    }

    /// The URL of the database `postgres`.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The URL of a database.
    pub fn url_of(&self, database: &str) -> String {
        Self::url_via(self.address, database)
    }

    /// The URL of a database through something that listens at `address`.
    pub fn url_via(address: SocketAddr, database: &str) -> String {
        format!("postgres://postgres@{address}/{database}")
    }

    /// A connection of the superuser to the database `postgres`.
    pub async fn admin(&self) -> Client {
        Client::connect(&self.url())
            .await
            .unwrap_or_else(|error| panic!("no connection: {error:?}\n{}", self.log_tail()))
    }

    /// Changes a setting with `ALTER SYSTEM`, and reloads.
    pub async fn configure(&self, name: &str, value: &str) {
        let admin = self.admin().await;
        admin
            .run(&format!("ALTER SYSTEM SET {name} = '{value}'"))
            .await;
        admin.run("SELECT pg_reload_conf()").await;
        let show = format!(
            "SELECT count(*) FROM pg_file_settings WHERE name = '{name}' AND error IS NULL"
        );
        assert!(
            admin.value::<i64>(&show).await > 0,
            "{name} is not a setting"
        );
    }

    /// Writes a line to `postgresql.conf`, for the next start.
    ///
    /// A setting of [`Postgres::configure`] outranks it.
    pub fn append_setting(&self, name: &str, value: &str) {
        self.append("postgresql.conf", name, value);
    }

    pub(super) fn append(&self, file: &str, name: &str, value: &str) {
        let mut file = OpenOptions::new()
            .append(true)
            .open(self.data().join(file))
            .expect("a data directory has its configuration files");
        let value = value.replace('\'', "''");
        writeln!(file, "{name} = '{value}'").expect("room on the disk");
    }

    /// The process id of the postmaster.
    pub fn pid(&self) -> u32 {
        self.running().pid()
    }

    /// Whether the postmaster runs.
    pub fn is_running(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|process| process.exit_status().is_none())
    }

    /// Starts a stopped cluster, on the address it had, and waits until it
    /// answers.
    pub async fn start_again(&mut self) {
        assert!(!self.is_running(), "it runs already");
        let mut command = program("postgres");
        command
            .arg("-D")
            .arg(self.data())
            .arg("-k")
            .arg(&*self.directory)
            .args(["-h", "127.0.0.1", "-p", &self.address.port().to_string()])
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        self.process = None;
        let process = Process::start("postgres", &mut command, End::QuitProcess);
        let process = self.process.insert(process);
        let url = Self::url_via(self.address, "postgres");
        eventually("postgres answers", async || {
            if let Some(status) = process.exit_status() {
                panic!("postgres ended at its start: {status}\n{}", process.tail());
            }
            Client::connect(&url).await.ok()
        })
        .await;
    }

    /// Stops the cluster and waits for its end.
    pub async fn stop(&mut self, how: Stop) {
        self.running().signal(match how {
            Stop::Fast => Signal::INT,
            Stop::Immediate => Signal::QUIT,
        });
        self.running().wait_exit().await;
        self.process = None;
    }

    /// Stops and starts it.
    pub async fn restart(&mut self, how: Stop) {
        self.stop(how).await;
        self.start_again().await;
    }

    /// Kills the postmaster and all its children with `SIGKILL`, as a machine
    /// that loses its processes, and waits until they are gone.
    pub async fn kill9(&mut self) {
        let pids = self.pids();
        // The postmaster goes first, so that it cannot begin anew.
        for pid in &pids {
            system::signal(*pid, Signal::KILL);
        }
        self.running().wait_exit().await;
        eventually("every process of the cluster has gone", async || {
            pids.iter().all(|pid| !is_alive(*pid)).then_some(())
        })
        .await;
        self.process = None;
    }

    /// Freezes every process of the cluster (`SIGSTOP`). Connections stay
    /// open and nothing answers.
    pub fn freeze(&self) {
        self.pids()
            .into_iter()
            .for_each(|pid| system::signal(pid, Signal::STOP));
    }

    /// Whether all of them stand still.
    pub fn is_frozen(&self) -> bool {
        self.pids().into_iter().all(system::is_frozen)
    }

    /// Ends [`Postgres::freeze`].
    pub fn thaw(&self) {
        self.pids()
            .into_iter()
            .rev()
            .for_each(|pid| system::signal(pid, Signal::CONT));
    }

    /// What the cluster logged since it was last started.
    pub fn log(&self) -> Vec<String> {
        self.running().log().lines()
    }

    pub(super) fn running(&self) -> &Process {
        self.process.as_ref().expect("the cluster is started")
    }

    fn pids(&self) -> Vec<u32> {
        let postmaster = self.pid();
        let mut pids = vec![postmaster];
        pids.extend(children_of(postmaster));
        pids
    }

    pub(super) fn log_tail(&self) -> String {
        self.process.as_ref().map(Process::tail).unwrap_or_default()
    }
}
