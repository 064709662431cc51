//! Finds the programs of Postgres, and runs them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use super::{PrivatePostgresError, places::RunAs};

/// The oldest version that is used: from here on a start notices, by the shared
/// memory of the cluster, that it still has processes.
pub(super) const MIN_MAJOR: u32 = 15;

/// How long a program may take to print its version.
const VERSION_LIMIT: Duration = Duration::from_secs(10);

/// Where packages put Postgres: a directory, and what the entries in it begin
/// with that hold a version each. A path without entries is the directory
/// itself.
const PLACES: &[(&str, Option<&str>)] = &[
    ("/usr/lib/postgresql", Some("")), // Debian
    ("/usr", Some("pgsql-")),          // RPM of postgresql.org
    ("/usr/bin", None),
    ("/usr/local/pgsql/bin", None),
    ("/opt/homebrew/opt", Some("postgresql")),
    ("/usr/local/opt", Some("postgresql")),
];

/// The programs of one version of Postgres, and the user to run them as.
#[derive(Debug)]
pub(super) struct Programs {
    bin: PathBuf,
    run_as: RunAs,
}

impl Programs {
    /// The programs for a cluster of the given version; without a cluster, the
    /// highest version in the first place that has one.
    pub(super) async fn find(
        data_dir: &Path,
        version: Option<String>,
        run_as: RunAs,
    ) -> Result<Self, PrivatePostgresError> {
        #[expect(clippy::disallowed_methods, reason = "PATH is no setting of ours")]
        let path = env::var_os("PATH").unwrap_or_default();
        let mut installed_any = false;
        for bin in candidates(PLACES, env::split_paths(&path)) {
            let Some(major) = major_of(&bin).await.filter(|major| *major >= MIN_MAJOR) else {
                continue;
            };
            installed_any = true;
            let fits = |wanted: &String| *wanted == major.to_string();
            if version.as_ref().is_none_or(fits) {
                return Ok(Self { bin, run_as });
            }
        }
        match version {
            Some(version) if installed_any => Err(PrivatePostgresError::VersionNotInstalled {
                data_dir: data_dir.to_owned(),
                version,
            }),
            _ => Err(PrivatePostgresError::NotInstalled),
        }
    }

    /// The user they run as.
    pub(super) fn run_as(&self) -> &RunAs {
        &self.run_as
    }

    /// One of the programs, with nothing of our environment: a `PGPORT` or
    /// `PGDATA` of the operator's would be obeyed, and our own secrets are
    /// nothing for Postgres.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.env_clear().env("PATH", "/usr/bin:/bin");
        command.env("LC_ALL", "C");
        // Ours may be a place that Postgres's user cannot enter.
        command.current_dir("/");
        if self.run_as.drop_root {
            // As root, std drops the supplementary groups along with it.
            command.uid(self.run_as.uid).gid(self.run_as.gid);
        }
        command
    }
}

/// Directories that may hold Postgres, the best first.
pub(super) fn candidates(
    places: &[(&str, Option<&str>)],
    path: impl Iterator<Item = PathBuf>,
) -> Vec<PathBuf> {
    let packaged = places.iter().flat_map(|(directory, prefix)| match prefix {
        None => vec![PathBuf::from(directory)],
        Some(prefix) => versions_in(Path::new(directory), prefix),
    });
    let needed = ["initdb", "pg_ctl", "postgres"];
    packaged
        .chain(path)
        .filter(|bin| bin.is_absolute() && needed.iter().all(|name| bin.join(name).is_file()))
        .collect()
}

/// `<directory>/<prefix>*/bin`, the highest version first.
fn versions_in(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?.trim_start_matches('@');
            let major = version.parse().unwrap_or(0);
            Some((major, entry.path().join("bin")))
        })
        .collect();
    versions.sort_by(|left, right| right.cmp(left));
    versions.into_iter().map(|(_, bin)| bin).collect()
}

/// The major version of the programs in `bin`, if they run at all.
async fn major_of(bin: &Path) -> Option<u32> {
    let mut command = Command::new(bin.join("postgres"));
    command.arg("--version");
    let output = output(command, "", VERSION_LIMIT).await?.ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// From `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`.
pub(super) fn parse_version(text: &str) -> Option<u32> {
    let version = text.split_once("(PostgreSQL) ")?.1;
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// Runs a program to its end, with `input` on its standard input.
///
/// Killed when the time is up, or when the caller gives up. Not so the
/// postmaster that `pg_ctl` has started, which is no longer its child.
pub(super) async fn run(
    program: &'static str,
    command: Command,
    input: &str,
    limit: Duration,
) -> Result<(), PrivatePostgresError> {
    let failed = |detail| Err(PrivatePostgresError::Failed { program, detail });
    match output(command, input, limit).await {
        None => Err(PrivatePostgresError::TimedOut {
            what: program,
            limit,
        }),
        Some(Err(error)) => failed(error.to_string()),
        Some(Ok(output)) if output.status.success() => Ok(()),
        Some(Ok(output)) => {
            let text = String::from_utf8_lossy(&output.stderr);
            failed(telling_line(&text).unwrap_or_else(|| output.status.to_string()))
        }
    }
}

/// `None` when the time is up.
async fn output(
    mut command: Command,
    input: &str,
    limit: Duration,
) -> Option<std::io::Result<Output>> {
    command.kill_on_drop(true);
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let work = async {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that ends without reading says why on its stderr.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    timeout(limit, work).await.ok()
}

/// The line that says what went wrong: the last that calls itself an error, or
/// else the last.
pub(super) fn telling_line(text: &str) -> Option<String> {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines()
        .rfind(|line| {
            ["FATAL:", "PANIC:", "error:"]
                .iter()
                .any(|word| line.contains(word))
        })
        .or_else(|| lines().next_back())
        .map(str::to_owned)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::{super::tests::TestDir, *};

    #[test]
    fn the_newest_version_of_the_first_place() {
        let dir = TestDir::new();
        for bin in [
            "debian/9/bin",
            "debian/15/bin",
            "brew/postgresql@16/bin",
            "path",
        ] {
            let bin = dir.0.join(bin);
            fs::create_dir_all(&bin).unwrap();
            for program in ["initdb", "pg_ctl", "postgres"] {
                fs::write(bin.join(program), "").unwrap();
            }
        }
        fs::create_dir_all(dir.0.join("debian/17/bin")).unwrap(); // A client alone.
        let place = |name| dir.0.join(name).into_os_string().into_string().unwrap();
        let (debian, brew) = (place("debian"), place("brew"));
        let places = [
            (debian.as_str(), Some("")),
            (brew.as_str(), Some("postgresql")),
            ("/does/not/exist", None),
        ];
        let found = candidates(&places, ["path", "relative"].iter().map(|p| dir.0.join(p)));
        let expected = [
            "debian/15/bin",
            "debian/9/bin",
            "brew/postgresql@16/bin",
            "path",
        ];
        assert_eq!(found, expected.map(|bin| dir.0.join(bin)));
    }

    #[test]
    fn versions() {
        let parse = parse_version;
        assert_eq!(
            parse("postgres (PostgreSQL) 15.18 (Debian 15.18-0)\n"),
            Some(15)
        );
        assert_eq!(parse("postgres (PostgreSQL) 18beta1\n"), Some(18));
        assert_eq!(parse("postgres (PostgreSQL) 9.6.24\n"), Some(9));
        assert_eq!(parse("no such thing"), None);
    }

    #[test]
    fn the_line_that_matters() {
        let line = |text| telling_line(text).unwrap_or_default();
        assert_eq!(
            line("LOG:  a\nFATAL:  no room\nLOG:  database system is shut down\n"),
            "FATAL:  no room"
        );
        assert_eq!(line("one\ntwo\n\n"), "two");
        assert_eq!(line("\n"), "");
    }
}
