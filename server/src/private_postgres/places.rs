//! Where things are, and whose they are: the data directory, the directory of
//! the socket, and the user that Postgres runs as.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, lchown},
    path::{Path, PathBuf},
};

use rustix::process::{getegid, geteuid};

use super::{PrivatePostgresError, error::io_error};

/// Names the socket file; nothing listens on TCP.
pub(super) const PORT: u16 = 5432;

/// The longest path of a Unix socket that fits everywhere: `sun_path` has 108
/// bytes on Linux, 104 on macOS and the BSDs.
const MAX_SOCKET_PATH: usize = 100;

/// The data directory when none is named: `/var/lib/fencepost` for root, else
/// `$XDG_STATE_HOME/fencepost`, else `$HOME/.local/state/fencepost`.
///
/// Empty and relative values count as unset, as the XDG specification wants.
/// `None` when nothing is left.
pub(crate) fn default_data_dir(
    is_root: bool,
    xdg_state_home: Option<OsString>,
    home: Option<OsString>,
) -> Option<PathBuf> {
    if is_root {
        return Some(PathBuf::from("/var/lib/fencepost"));
    }
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    xdg_state_home
        .and_then(absolute)
        .or_else(|| Some(home.and_then(absolute)?.join(".local/state")))
        .map(|state| state.join("fencepost"))
}

/// The user that Postgres runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunAs {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Whether that is another user than our own, which only root can choose.
    pub(super) drop_root: bool,
}

impl RunAs {
    /// `postgres` or else `nobody` for root, else ourselves.
    pub(super) fn choose(is_root: bool) -> Result<Self, PrivatePostgresError> {
        if !is_root {
            return Ok(Self {
                uid: geteuid().as_raw(),
                gid: getegid().as_raw(),
                drop_root: false,
            });
        }
        let path = Path::new("/etc/passwd");
        let passwd = fs::read_to_string(path).map_err(io_error("read", path))?;
        let (uid, gid) = ["postgres", "nobody"]
            .iter()
            .find_map(|user| ids_of(user, &passwd))
            .ok_or(PrivatePostgresError::NoUnprivilegedUser)?;
        Ok(Self {
            uid,
            gid,
            drop_root: true,
        })
    }
}

/// User and group id of `user` in the text of `/etc/passwd`.
pub(super) fn ids_of(user: &str, passwd: &str) -> Option<(u32, u32)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(user) {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some((uid, gid))
    })
}

/// Makes sure that the directory exists, that Postgres can reach what is in
/// it, and that its path survives the shell through which `pg_ctl` starts
/// Postgres. Returns the path without symbolic links.
pub(super) fn checked_data_dir(
    data_dir: &Path,
    run_as: &RunAs,
) -> Result<PathBuf, PrivatePostgresError> {
    DirBuilder::new()
        .recursive(true)
        .mode(if run_as.drop_root { 0o711 } else { 0o700 })
        .create(data_dir)
        .map_err(io_error("create", data_dir))?;
    let data_dir = fs::canonicalize(data_dir).map_err(io_error("find", data_dir))?;

    let usable = data_dir.to_str().is_some_and(|path| {
        !path.contains(|c: char| c.is_control() || matches!(c, '"' | '\'' | '$' | '`' | '\\'))
    });
    if !usable {
        return Err(PrivatePostgresError::UnusablePath { data_dir });
    }
    if run_as.drop_root {
        // Root's own directory, through which another user has to pass. What
        // lies in it is 0700 and that user's, so this opens nothing.
        let metadata = fs::metadata(&data_dir).map_err(io_error("read", &data_dir))?;
        let mode = metadata.mode();
        if metadata.uid() == 0 && mode & 0o011 != 0o011 {
            fs::set_permissions(&data_dir, Permissions::from_mode((mode & 0o7777) | 0o011))
                .map_err(io_error("open to PostgreSQL", &data_dir))?;
        }
    }
    Ok(data_dir)
}

/// The directory of the Unix socket, made if need be: in the data directory
/// when that makes a short and plain path, else in `/tmp`.
pub(super) fn socket_dir(data_dir: &Path, run_as: &RunAs) -> Result<PathBuf, PrivatePostgresError> {
    let path = socket_path(data_dir, run_as.uid);
    private_dir(&path, run_as)?;
    Ok(path)
}

/// Plain, because Postgres takes a list of directories and a shell hands it on.
pub(super) fn socket_path(data_dir: &Path, uid: u32) -> PathBuf {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"/._-+@".contains(&c);
    let inside = data_dir.join("run");
    let bytes = inside.as_os_str().as_encoded_bytes();
    let socket_length = bytes.len() + format!("/.s.PGSQL.{PORT}").len();
    if socket_length <= MAX_SOCKET_PATH && bytes.iter().copied().all(plain) {
        return inside;
    }
    let hash = fnv1a(data_dir.as_os_str().as_encoded_bytes());
    PathBuf::from(format!("/tmp/fencepost-{uid}-{hash:016x}"))
}

/// FNV-1a: the same in every build, which std's hasher does not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Makes sure that `path` is a directory that only Postgres's user can enter.
///
/// In `/tmp` anybody may have made it first. It is looked at after it was made
/// and never repaired: what is not ours is refused.
pub(super) fn private_dir(path: &Path, run_as: &RunAs) -> Result<(), PrivatePostgresError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) if run_as.drop_root => {
            lchown(path, Some(run_as.uid), Some(run_as.gid))
                .map_err(io_error("hand to PostgreSQL", path))?;
        }
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io_error("create", path)(error)),
    }
    let metadata = fs::symlink_metadata(path).map_err(io_error("read", path))?;
    if metadata.is_dir() && metadata.uid() == run_as.uid && metadata.mode() & 0o077 == 0 {
        Ok(())
    } else {
        Err(PrivatePostgresError::NotPrivate {
            path: path.to_owned(),
            uid: run_as.uid,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::{super::tests::TestDir, *};

    #[test]
    fn paths_that_a_shell_would_change_are_refused() {
        let dir = TestDir::new();
        let run_as = RunAs::choose(false).unwrap();
        for name in ["$HOME", "a\"b", "a`id`", "a\nb", "a\\b", "a'b"] {
            let error = checked_data_dir(&dir.0.join(name), &run_as).unwrap_err();
            assert!(matches!(error, PrivatePostgresError::UnusablePath { .. }));
        }
    }

    #[test]
    fn a_directory_that_others_can_enter_is_not_private() {
        let dir = TestDir::new();
        let run_as = RunAs::choose(false).unwrap();
        let path = dir.0.join("run");
        private_dir(&path, &run_as).unwrap();
        private_dir(&path, &run_as).unwrap();
        let somebody_else = RunAs {
            uid: run_as.uid + 1,
            ..run_as
        };
        assert!(private_dir(&path, &somebody_else).is_err());
        let link = dir.0.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(private_dir(&link, &run_as).is_err());
        fs::set_permissions(&path, Permissions::from_mode(0o750)).unwrap();
        assert!(private_dir(&path, &run_as).is_err());
    }

    #[test]
    fn default_data_dirs() {
        let dir = |root, xdg: &str, home: &str| {
            default_data_dir(root, Some(xdg.into()), Some(home.into()))
                .map(|path| path.display().to_string())
        };
        assert_eq!(dir(true, "/x", "/h").unwrap(), "/var/lib/fencepost");
        assert_eq!(dir(false, "/x", "/h").unwrap(), "/x/fencepost");
        let at_home = "/h/.local/state/fencepost";
        assert_eq!(dir(false, "", "/h").unwrap(), at_home);
        assert_eq!(dir(false, "relative", "/h").unwrap(), at_home);
        assert_eq!(dir(false, "", ""), None);
        assert_eq!(default_data_dir(false, None, None), None);
    }

    #[test]
    fn users_of_passwd() {
        let passwd =
            "root:x:0:0::/:/bin/sh\nnobody:*:-2:-2::/:\npostgres:x:101:104:a,b:/v:/bin/bash\n";
        assert_eq!(ids_of("postgres", passwd), Some((101, 104)));
        assert_eq!(ids_of("postgre", passwd), None);
        assert_eq!(ids_of("nobody", passwd), None);
    }

    #[test]
    fn socket_paths() {
        let path = |data_dir: &str| socket_path(Path::new(data_dir), 7).display().to_string();
        assert_eq!(path("/var/lib/fencepost"), "/var/lib/fencepost/run");
        assert!(path("/a,b").starts_with("/tmp/fencepost-7-"));
        assert_ne!(path("/a,b"), path("/a,c"));
        // "/run" and "/.s.PGSQL.5432" take 18 of the 100 bytes.
        let longest = format!("/{}", "x".repeat(81));
        assert_eq!(path(&longest), format!("{longest}/run"));
        assert!(path(&format!("{longest}x")).starts_with("/tmp/"));
    }
}
