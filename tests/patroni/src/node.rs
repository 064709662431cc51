//! One node: a Patroni, and the Postgres that it starts.

use std::{collections::BTreeMap, fs, net::SocketAddr, path::Path};

use fencepost_support::{
    eventually,
    leash::{End, Leash, Sweep},
    process::Process,
    system::{self, PrivateDirectory, children_of, free_address, is_alive},
};
use rustix::process::Signal;

use crate::programs::program;

/// What users fill in themselves.
const TEMPLATE: &str = include_str!("../../../deploy/patroni/patroni.yml");

/// How a node came back after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WayBack {
    /// It was never away.
    Stayed,
    Followed,
    Rewound,
    Copied,
    /// Its Patroni overwrote the leader's key, and the new leader had to go.
    LedAgain,
}

impl WayBack {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stayed => "stayed",
            Self::Followed => "followed",
            Self::Rewound => "rewound",
            Self::Copied => "copied",
            Self::LedAgain => "led again",
        }
    }
}

/// A node. Dropping it ends its processes and removes its files.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: &'static str,
    patroni: Option<Process>,
    /// What the Patronis before this one logged.
    earlier: Vec<String>,
    /// Patroni lets go of its Postgres, so that it outlives a Patroni that dies.
    _sweep: Sweep,
    directory: PrivateDirectory,
    frozen: Vec<u32>,
    /// How much of the log is old.
    mark: usize,
    pub(crate) postgres: SocketAddr,
    pub(crate) rest: SocketAddr,
}

impl Node {
    /// A node that is not started; `names` are those of the template that all share.
    pub(crate) fn new(name: &'static str, names: &BTreeMap<&str, String>) -> Self {
        let directory = system::private_directory();
        let node = Self {
            name,
            patroni: None,
            earlier: Vec::new(),
            frozen: Vec::new(),
            mark: 0,
            _sweep: Leash::of_those_in(&directory),
            postgres: free_address(),
            rest: free_address(),
            directory,
        };
        let mut names = names.clone();
        names.insert("NODE", name.to_owned());
        names.insert("POSTGRES", node.postgres.to_string());
        names.insert("REST", node.rest.to_string());
        names.insert("DIRECTORY", node.directory.display().to_string());
        write(&node.configuration(), &fill(TEMPLATE, &names));
        node
    }

    fn configuration(&self) -> std::path::PathBuf {
        self.directory.join("patroni.yml")
    }

    /// Starts its Patroni, which starts the rest.
    pub(crate) fn start(&mut self) {
        let mut command = program("patroni");
        command
            .arg(self.configuration())
            // By this everything that it starts is found again.
            .current_dir(&*self.directory)
            .env("LC_ALL", "C");
        self.mark = self.log().len();
        self.patroni = Some(Process::start("patroni", &mut command, End::KillGroup));
    }

    /// Kills Patroni and every process of Postgres, as a machine that loses power,
    /// and waits until they are gone.
    pub(crate) async fn kill9(&mut self) {
        // Patroni first, so that it cannot start Postgres again.
        let pids = self.processes();
        for pid in &pids {
            system::signal(*pid, Signal::KILL);
        }
        let patroni = self.patroni.take().expect("the node runs");
        patroni.wait_exit().await;
        self.earlier.extend(patroni.log().lines());
        eventually("every process of the node has gone", async || {
            pids.iter().all(|pid| !is_alive(*pid)).then_some(())
        })
        .await;
    }

    /// Freezes Patroni and every process of Postgres, as a machine that is paused.
    pub(crate) fn freeze(&mut self) {
        self.frozen = self.processes();
        for pid in &self.frozen {
            system::signal(*pid, Signal::STOP);
        }
        self.mark = self.log().len();
    }

    /// Ends it. Postgres goes on before Patroni knows what has passed meanwhile.
    pub(crate) fn thaw(&mut self) {
        for pid in self.frozen.drain(..).rev() {
            system::signal(pid, Signal::CONT);
        }
    }

    pub(crate) fn is_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// Patroni, the postmaster, and its children.
    fn processes(&self) -> Vec<u32> {
        let patroni = self.patroni.as_ref().expect("the node runs");
        let postmaster = self.postmaster().expect("Postgres runs");
        let mut pids = vec![patroni.pid(), postmaster];
        pids.extend(children_of(postmaster));
        pids
    }

    /// Whether it was started, and is neither killed nor frozen.
    pub(crate) fn runs(&self) -> bool {
        self.patroni.is_some() && !self.is_frozen()
    }

    /// How it came back since it was last started or frozen, as a standby.
    pub(crate) fn way_back(&self) -> WayBack {
        let lines = self.log();
        let said = |words: &str| lines[self.mark..].iter().any(|line| line.contains(words));
        if said("trying to bootstrap from leader") {
            WayBack::Copied
        } else if said("running pg_rewind") {
            WayBack::Rewound
        } else {
            WayBack::Followed
        }
    }

    /// What Patroni and its Postgres logged.
    pub(crate) fn log(&self) -> Vec<String> {
        let mut lines = self.earlier.clone();
        lines.extend(self.patroni.iter().flat_map(|p| p.log().lines()));
        lines
    }

    /// Panics when its Patroni has ended by itself.
    pub(crate) fn assert_runs(&self) {
        if let Some(patroni) = &self.patroni
            && let Some(status) = patroni.exit_status()
        {
            panic!("{} ended: {status}\n{}", self.name, patroni.tail());
        }
    }

    /// A file in the data directory says it, in its first line.
    fn postmaster(&self) -> Option<u32> {
        let file = fs::read_to_string(self.directory.join("data/postmaster.pid")).ok()?;
        file.lines().next()?.trim().parse().ok()
    }
}

/// Fills the names in braces; panics when one is not known.
pub(crate) fn fill(template: &str, names: &BTreeMap<&str, String>) -> String {
    let mut filled = template.to_owned();
    for (name, value) in names {
        filled = filled.replace(&format!("${{{name}}}"), value);
    }
    assert!(!filled.contains("${"), "a name is not filled in:\n{filled}");
    filled
}

/// Writes a file for the account that the programs run as.
pub(crate) fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("room on the disk");
    system::give_away(path);
}
