//! What the operating system knows: free ports, private directories, the
//! processes of a parent, the account that may run Postgres.

use std::{
    env, fs,
    net::{SocketAddr, TcpListener},
    ops::Deref,
    os::unix::{
        fs::{DirBuilderExt as _, chown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use rand::Rng as _;
use rustix::process::{Pid, Signal};

use crate::leash::Leash;

/// A loopback address that nobody listens on.
///
/// It lies below the range that the kernel gives to outgoing connections, so
/// that whoever uses it can stop listening and come back later.
pub fn free_address() -> SocketAddr {
    let mut rng = rand::rng();
    (0..1000)
        .map(|_| SocketAddr::from(([127, 0, 0, 1], rng.random_range(15_000..32_000))))
        .find(|address| TcpListener::bind(address).is_ok())
        .expect("a free port on loopback")
}

/// The account for programs that refuse to run as root; none when this
/// process is not root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    uid: u32,
    gid: u32,
}

impl Account {
    /// The account `postgres`, else `nobody`, when this process is root.
    pub fn unprivileged() -> Option<Self> {
        if !rustix::process::getuid().is_root() {
            return None;
        }
        let passwd = fs::read_to_string("/etc/passwd").expect("a readable /etc/passwd");
        let account = ["postgres", "nobody"]
            .iter()
            .find_map(|name| Self::find(&passwd, name));
        Some(account.expect("an account named postgres or nobody"))
    }

    fn find(passwd: &str, name: &str) -> Option<Self> {
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            match fields[..] {
                [found, _, uid, gid, ..] if found == name => Some(Self {
                    uid: uid.parse().ok()?,
                    gid: gid.parse().ok()?,
                }),
                _ => None,
            }
        })
    }
}

/// Makes `command` run as an account that is not root.
pub fn drop_root(command: &mut Command) -> &mut Command {
    if let Some(account) = Account::unprivileged() {
        command.uid(account.uid).gid(account.gid);
    }
    command
}

/// A directory of a test's own, owned by the account that [`drop_root`]
/// changes to. Dropping it removes it.
#[derive(Debug)]
pub struct PrivateDirectory {
    path: PathBuf,
    // After the drop, so that it is removed by one or the other.
    _leash: Leash,
}

/// Makes a private directory with a short path.
pub fn private_directory() -> PrivateDirectory {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut base = env::temp_dir();
    if base.as_os_str().len() > 40 {
        // A Unix socket's path has room for some 100 bytes.
        base = PathBuf::from("/tmp");
    }
    let process = std::process::id();
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("fencepost-test-{process}-{n}"));
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => {
                let _leash = Leash::of_directory(&path);
                give_away(&path);
                return PrivateDirectory { path, _leash };
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => panic!("cannot make {}: {error}", path.display()),
        }
    }
}

impl Deref for PrivateDirectory {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for PrivateDirectory {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        // What cannot be removed is not worth a second panic.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Gives a file to the account that [`drop_root`] changes to.
pub fn give_away(path: &Path) {
    if let Some(account) = Account::unprivileged() {
        chown(path, Some(account.uid), Some(account.gid)).expect("root can change an owner");
    }
}

/// A program on the path, or where Debian keeps those of administrators, which is
/// not on a plain user's.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let on_path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&on_path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")])
        .map(|directory| directory.join(name))
        .find(|program| program.exists())
}

/// Runs a command to its end without blocking the runtime, and panics with
/// what it wrote when it fails. Returns its standard output.
pub async fn run(mut command: Command) -> Vec<u8> {
    let shown = format!("{command:?}");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .expect("the thread ran")
        .unwrap_or_else(|error| panic!("cannot run {shown}: {error}"));
    assert!(
        output.status.success(),
        "{shown}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// Sends a signal to one process; one that has gone is no error.
pub fn signal(pid: u32, signal: Signal) {
    // Failure means that the process has ended, which is for the caller to see.
    let _ = rustix::process::kill_process(as_pid(pid), signal);
}

/// For calls that take one.
pub fn as_pid(pid: u32) -> Pid {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .expect("a process id")
}

/// The processes whose parent is `parent`.
pub fn children_of(parent: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| stat(*pid).is_some_and(|stat| stat.parent == parent && stat.state != 'Z'))
        .collect()
}

/// Whether a process exists and still runs; a zombie does not.
pub fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| stat.state != 'Z')
}

/// Whether a process stands still after `SIGSTOP`.
pub fn is_frozen(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| stat.state == 'T')
}

/// The processor time that a process has used so far, user and system.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    stat(pid).map(|stat| stat.cpu)
}

/// What a process has in memory now, in KiB.
pub fn resident_memory(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

struct Stat {
    state: char,
    parent: u32,
    cpu: Duration,
}

/// Reads `/proc/<pid>/stat`; the name in it may hold spaces and parentheses.
fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        // Linux counts in hundredths of a second on every platform.
        cpu: Duration::from_millis(ticks * 10),
    })
}

/// `CLOCK_BOOTTIME`, in ms: one clock for all processes of the machine.
pub fn boottime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}
