//! Makes the cluster with its database, whole or not at all.

use std::{
    fs::{self, File},
    io,
    path::Path,
    time::Duration,
};

use uuid::Uuid;

use super::{
    PrivatePostgresError,
    error::io_error,
    places::private_dir,
    programs::{self, Programs},
};

/// What a cluster's directory is called until it is whole.
pub(super) const NEW_CLUSTER_PREFIX: &str = "postgres.new-";

/// Run once, in single-user mode, on the cluster that is being made.
///
/// In the cluster's own settings rather than on the command line, so that they
/// also hold when somebody starts it by hand.
const SET_UP: &str = "\
ALTER SYSTEM SET listen_addresses = ''
ALTER SYSTEM SET unix_socket_permissions = '0700'
ALTER SYSTEM SET max_connections = 100
CREATE DATABASE fencepost
";

/// `initdb` and what follows it: seconds on a laptop, more on a slow disk.
const CREATE_LIMIT: Duration = Duration::from_secs(180);

/// Which major version wrote the cluster; `None` when there is no cluster yet.
pub(super) fn version_of(cluster: &Path) -> Result<Option<String>, PrivatePostgresError> {
    let path = cluster.join("PG_VERSION");
    match fs::read_to_string(&path) {
        Ok(version) => Ok(Some(version.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !cluster.exists() => Ok(None),
        Err(error) => Err(io_error("read", &path)(error)),
    }
}

/// Makes the cluster with its database, whole or not at all.
pub(super) async fn create(
    programs: &Programs,
    data_dir: &Path,
    cluster: &Path,
) -> Result<(), PrivatePostgresError> {
    let new = data_dir.join(format!("{NEW_CLUSTER_PREFIX}{}", Uuid::new_v4()));
    private_dir(&new, programs.run_as())?;

    let mut initdb = programs.command("initdb");
    initdb.args(["--encoding=UTF8", "--locale=C", "--data-checksums"]);
    initdb.args(["--auth=trust", "--username=fencepost", "-D"]);
    initdb.arg(&new);
    programs::run("initdb", initdb, "", CREATE_LIMIT).await?;

    let mut single = programs.command("postgres");
    single.arg("--single").arg("-D").arg(&new);
    // Without it a failed statement is printed, and the exit code is 0.
    single.args(["-c", "exit_on_error=true", "postgres"]);
    programs::run("postgres", single, SET_UP, CREATE_LIMIT).await?;

    fs::rename(&new, cluster).map_err(io_error("create", cluster))?;
    // Else a power cut could take the directory entry back.
    File::open(data_dir)
        .and_then(|directory| directory.sync_all())
        .map_err(io_error("sync", data_dir))
}

/// Removes what killed servers left of clusters they were making. A failure
/// costs some megabytes, no more.
pub(super) fn remove_leftovers(data_dir: &Path) {
    let leftovers = fs::read_dir(data_dir).into_iter().flatten().flatten();
    for entry in leftovers {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(NEW_CLUSTER_PREFIX)
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "left a half-made cluster");
        }
    }
}
