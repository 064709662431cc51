//! The private Postgres: the database that `fencepostd` brings along when it
//! is given no database URL.
//!
//! It is made from the machine's own binaries, and lives in one directory:
//!
//! ```text
//! <data_dir>/fencepost.lock     held by flock while a server uses the directory
//! <data_dir>/postgres/          the cluster, 0700; server.log is Postgres's log
//! <data_dir>/postgres.new-…/    a cluster being made, or what a kill left of one
//! <data_dir>/run/               the Unix socket, 0700
//! ```
//!
//! *Making it* is all or nothing: `initdb`, settings and database go into
//! `postgres.new-…`, which is renamed when it is whole. The name is new each
//! time, so an `initdb` that outlived its server cannot write into the next
//! attempt.
//!
//! *Who may connect*: whoever may enter the 0700 directory of the socket,
//! which is the user that Postgres runs as, and root. There is no TCP listener.
//! That is why `trust` is safe here.
//!
//! *As root* every program of Postgres runs as `postgres`, or else `nobody`:
//! Postgres refuses root. The data directory itself stays root's.
//!
//! *Life*: `pg_ctl` gives the postmaster a process session of its own, so
//! neither ctrl-C nor a `kill -9` of the server reaches it. The flock ends with
//! the server, whatever way it goes; the next server on the directory finds the
//! postmaster running and takes it over.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    process::geteuid,
};
use tokio::time::{Instant, sleep};

mod cluster;
mod error;
mod places;
mod postmaster;
mod programs;
#[cfg(test)]
mod tests;

pub(crate) use error::PrivatePostgresError;
use error::io_error;
pub(crate) use places::default_data_dir;
use places::{RunAs, checked_data_dir, socket_dir};
use programs::Programs;

/// How long a start may take, recovery after a crash included.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a stop may take. What is still running then is left running: the
/// next start takes it over.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// How long a lock that is held is tried for.
const LOCK_LIMIT: Duration = Duration::from_millis(500);
/// What `pg_ctl` gets on top of its own limit to say how it went.
const GRACE: Duration = Duration::from_secs(5);
/// How often a postmaster that somebody else started or stops is looked at.
const POLL: Duration = Duration::from_millis(100);
/// How often the postmaster is looked at while the server serves.
const WATCH: Duration = Duration::from_secs(1);
/// At most this much of a log is read to find the line that matters.
const LOG_TAIL: u64 = 64 * 1024;

/// A running private Postgres, and the right to its data directory.
///
/// Dropped without [`stop`](Self::stop) it gives up the directory and leaves
/// Postgres running, as a kill does.
#[derive(Debug)]
pub(crate) struct PrivatePostgres {
    programs: Programs,
    cluster: PathBuf,
    socket_dir: PathBuf,
    /// Closing it releases the flock. Close-on-exec, as std opens every file:
    /// a postmaster that inherited it would hold the lock for ever.
    _lock: File,
}

impl PrivatePostgres {
    /// Takes `data_dir`, makes a cluster in it unless it has one, and starts
    /// Postgres unless it is running. Takes up to some minutes when the disk is
    /// slow or a crash is to be recovered from.
    ///
    /// # Errors
    ///
    /// All of [`PrivatePostgresError`]. Nothing half made is left behind that
    /// the next start would trip over.
    pub(crate) async fn start(data_dir: &Path) -> Result<Self, PrivatePostgresError> {
        let run_as = RunAs::choose(geteuid().is_root())?;
        let data_dir = checked_data_dir(data_dir, &run_as)?;
        let lock = lock(&data_dir).await?;
        cluster::remove_leftovers(&data_dir);

        let cluster = data_dir.join("postgres");
        let programs = Programs::find(&data_dir, cluster::version_of(&cluster)?, run_as).await?;
        if !cluster.exists() {
            cluster::create(&programs, &data_dir, &cluster).await?;
        }
        let socket_dir = start_or_join(&programs, &data_dir, &cluster).await?;
        Ok(Self {
            programs,
            cluster,
            socket_dir,
            _lock: lock,
        })
    }

    /// Where to connect, as a libpq keyword string.
    pub(crate) fn url(&self) -> String {
        // In quotes, because a path may contain a space. Paths with quotes or
        // backslashes were refused.
        format!(
            "host='{}' port={} user=fencepost dbname=fencepost",
            self.socket_dir.display(),
            places::PORT
        )
    }

    /// Ends when Postgres has ended by itself, or was killed.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let cluster = self.cluster.clone();
        async move {
            while !matches!(postmaster::find(&cluster), Ok(None)) {
                sleep(WATCH).await;
            }
        }
    }

    /// Stops Postgres, which disconnects every client, and gives up the data
    /// directory. Takes up to half a minute.
    ///
    /// # Errors
    ///
    /// [`Failed`](PrivatePostgresError::Failed),
    /// [`TimedOut`](PrivatePostgresError::TimedOut) or
    /// [`Io`](PrivatePostgresError::Io). Postgres may be running still, which
    /// does no harm: the next start takes it over.
    pub(crate) async fn stop(self) -> Result<(), PrivatePostgresError> {
        if postmaster::find(&self.cluster)?.is_none() {
            return Ok(());
        }
        let limit = STOP_LIMIT.as_secs().to_string();
        let mut command = self.programs.command("pg_ctl");
        command.args(["stop", "-m", "fast", "-w", "-t", &limit, "-D"]);
        command.arg(&self.cluster);
        programs::run("pg_ctl", command, "", STOP_LIMIT + GRACE).await
    }
}

/// Takes the data directory for this process.
///
/// Tried for a moment: a child that a server was starting when it was killed
/// holds the lock until its exec.
async fn lock(data_dir: &Path) -> Result<File, PrivatePostgresError> {
    let path = data_dir.join("fencepost.lock");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(io_error("open", &path))?;
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(POLL).await,
            Err(Errno::WOULDBLOCK) => {
                return Err(PrivatePostgresError::InUse {
                    data_dir: data_dir.to_owned(),
                });
            }
            Err(error) => return Err(io_error("lock", &path)(error.into())),
        }
    }
}

/// Starts Postgres, or waits until the one that runs already accepts
/// connections, and says where its socket is.
async fn start_or_join(
    programs: &Programs,
    data_dir: &Path,
    cluster: &Path,
) -> Result<PathBuf, PrivatePostgresError> {
    let deadline = Instant::now() + START_LIMIT;
    // What runs may be in the middle of a stop, and then has to be started.
    loop {
        match postmaster::find(cluster)? {
            Some(running) if running.ready => return Ok(running.socket_dir),
            _ if Instant::now() >= deadline => {
                return Err(PrivatePostgresError::TimedOut {
                    what: "the start of PostgreSQL",
                    limit: START_LIMIT,
                });
            }
            Some(_) => sleep(POLL).await,
            None => start_postmaster(programs, data_dir, cluster).await?,
        }
    }
}

async fn start_postmaster(
    programs: &Programs,
    data_dir: &Path,
    cluster: &Path,
) -> Result<(), PrivatePostgresError> {
    let socket_dir = socket_dir(data_dir, programs.run_as())?;
    let log = cluster.join("server.log");
    let old_log = fs::metadata(&log).map_or(0, |metadata| metadata.len());

    let mut command = programs.command("pg_ctl");
    let limit = START_LIMIT.as_secs().to_string();
    command.args(["start", "-w", "-t", &limit, "-D"]);
    command.arg(cluster).arg("-l").arg(&log);
    // On the command line, because the directory may have been moved.
    command.arg("-o");
    command.arg(format!("-k {} -p {}", socket_dir.display(), places::PORT));
    match programs::run("pg_ctl", command, "", START_LIMIT + GRACE).await {
        // pg_ctl says only that there is a log. The log says why.
        Err(PrivatePostgresError::Failed { program, detail }) => {
            let detail = log_since(&log, old_log)
                .as_deref()
                .and_then(programs::telling_line)
                .unwrap_or(detail);
            Err(PrivatePostgresError::Failed { program, detail })
        }
        outcome => outcome,
    }
}

/// What was written to the log from `start` on, at most its last part. `None`
/// when it cannot be read: it was only going to explain another failure.
fn log_since(path: &Path, start: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let end = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(start.max(end.saturating_sub(LOG_TAIL))))
        .ok()?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}
