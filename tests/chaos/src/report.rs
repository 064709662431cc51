//! What a run found, for people and as JSON.

use std::{collections::BTreeMap, fmt, fs, io, path::Path, time::Duration};

use fencepost_support::clock;
use serde::Serialize;

use crate::{
    disk::Disk,
    episode::{Episode, Round},
    world::Setup,
};

/// What a run found.
#[derive(Debug, Serialize)]
pub struct Report {
    seed: u64,
    seconds: u64,
    operations: usize,
    faults: BTreeMap<&'static str, Figures>,
    violations: usize,
    not_measured: Vec<String>,
    episodes: Vec<Episode>,
}

/// Of a kind of fault, alone or with another.
#[derive(Debug, Default, Serialize)]
struct Figures {
    count: usize,
    /// Until every replica served again.
    median_ms: u128,
    max_ms: u128,
}

impl Report {
    pub(crate) fn new(seed: u64) -> Self {
        let mut not_measured = vec![
            "an older version of the server beside this one: there is none yet; \
             migrate runs this version's migrations under load"
                .to_owned(),
        ];
        if clock::library().is_none() {
            not_measured.push("clock steps: faketime is not installed".to_owned());
        }
        if Disk::roomy().is_none() {
            not_measured.push("a full disk: there is no C compiler".to_owned());
        }
        Self {
            seed,
            seconds: 0,
            operations: 0,
            faults: BTreeMap::new(),
            violations: 0,
            not_measured,
            episodes: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, episode: Episode) {
        self.operations += episode.operations;
        self.violations += episode.violations.len();
        self.episodes.push(episode);
    }

    pub(crate) fn finish(&mut self, took: Duration) {
        self.seconds = took.as_secs();
        let mut times: BTreeMap<&'static str, Vec<Option<u128>>> = BTreeMap::new();
        for round in self.rounds() {
            for name in &round.faults {
                times.entry(name).or_default().push(round.recovery_ms);
            }
        }
        for (name, times) in times {
            let mut known: Vec<u128> = times.iter().copied().flatten().collect();
            known.sort_unstable();
            let figures = Figures {
                count: times.len(),
                median_ms: known.get(known.len() / 2).copied().unwrap_or_default(),
                max_ms: known.last().copied().unwrap_or_default(),
            };
            self.faults.insert(name, figures);
        }
    }

    /// What was wrong; 0 is good.
    #[must_use]
    pub fn violations(&self) -> usize {
        self.violations
    }

    /// How many calls were made.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// How often a kind of fault happened.
    #[must_use]
    pub fn count(&self, kind: &str) -> usize {
        self.faults.get(kind).map_or(0, |figures| figures.count)
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    ///
    /// When there is no room.
    pub fn save(&self, to: &Path) -> io::Result<()> {
        if let Some(directory) = to.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(to, serde_json::to_vec_pretty(self)?)
    }

    fn rounds(&self) -> impl Iterator<Item = &Round> {
        self.episodes.iter().flat_map(|episode| &episode.rounds)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| fault | times | median back, ms | longest, ms |")?;
        writeln!(f, "|---|---|---|---|")?;
        for (name, figures) in &self.faults {
            let Figures {
                count,
                median_ms,
                max_ms,
            } = figures;
            writeln!(f, "| {name} | {count} | {median_ms} | {max_ms} |")?;
        }
        let mut setups: BTreeMap<Setup, Vec<u64>> = BTreeMap::new();
        for episode in &self.episodes {
            setups.entry(episode.setup).or_default().push(episode.seed);
        }
        writeln!(f)?;
        for (setup, seeds) in setups {
            writeln!(f, "{setup:?}: seeds {seeds:?}")?;
        }
        for missing in &self.not_measured {
            writeln!(f, "not measured: {missing}")?;
        }
        for episode in self
            .episodes
            .iter()
            .filter(|episode| !episode.violations.is_empty())
        {
            writeln!(f, "seed {}:", episode.seed)?;
            for violation in &episode.violations {
                writeln!(f, "  {violation}")?;
            }
        }
        write!(
            f,
            "{} operations, {} rounds of faults in {} s, {} violations",
            self.operations,
            self.rounds().count(),
            self.seconds,
            self.violations
        )
    }
}
