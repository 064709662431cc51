//! What a run found, for people and as JSON.

use std::{collections::BTreeMap, fmt, fs, io, path::Path, time::Duration};

use serde::Serialize;

use crate::{
    Options,
    episode::{Episode, Fault, Round},
    faults::KINDS,
    world::Setup,
};

/// What a run found.
#[derive(Debug, Serialize)]
pub struct Report {
    seed: u64,
    seconds: u64,
    operations: usize,
    faults: BTreeMap<&'static str, Figures>,
    /// Until every replica served again, of all rounds.
    longest_ms: u128,
    violations: usize,
    not_run: Vec<String>,
    episodes: Vec<Episode>,
    /// How the same faults are had once more.
    #[serde(skip)]
    again: String,
}

/// Of a kind of fault, alone or with another.
#[derive(Debug, Default, Serialize)]
struct Figures {
    count: usize,
    without_effect: usize,
    /// Until every replica served again.
    median_ms: u128,
    max_ms: u128,
}

impl Report {
    pub(crate) fn new(options: &Options) -> Self {
        let Options { rounds, only, .. } = options;
        let mut again = format!("--minutes 0 --rounds {rounds}");
        if !only.is_empty() {
            again += &format!(" --only {}", only.join(","));
        }
        let wanted = |name: &&str| only.is_empty() || only.iter().any(|only| only == name);
        let missing = Setup::ALL
            .into_iter()
            .filter_map(|setup| Some((setup, setup.missing()?)));
        let lost = missing.flat_map(|(setup, why)| {
            let own = KINDS.iter().filter(move |kind| kind.only == [setup]);
            let names = own.map(|kind| kind.name).filter(wanted);
            names.map(move |name| format!("{name}: {why}"))
        });
        let mut not_run: Vec<String> = lost.collect();
        match &options.older {
            Some(older) => again += &format!(" --older {}", older.display()),
            None => not_run.push("an older version of the server: none given".to_owned()),
        }
        Self {
            seed: options.seed,
            seconds: 0,
            operations: 0,
            faults: BTreeMap::new(),
            longest_ms: 0,
            violations: 0,
            not_run,
            episodes: Vec::new(),
            again,
        }
    }

    pub(crate) fn add(&mut self, episode: Episode) {
        self.operations += episode.operations;
        self.violations += episode.violations.len();
        self.episodes.push(episode);
    }

    pub(crate) fn finish(&mut self, took: Duration) {
        self.seconds = took.as_secs();
        let mut happened: BTreeMap<&'static str, Vec<(&Fault, &Round)>> = BTreeMap::new();
        for round in self.rounds() {
            for fault in &round.faults {
                happened.entry(fault.name).or_default().push((fault, round));
            }
        }
        let figures = happened.into_iter().map(|(name, of)| {
            let times = of.iter().filter_map(|(_, round)| round.recovery_ms);
            let mut times: Vec<u128> = times.collect();
            times.sort_unstable();
            let unseen = of.iter().filter(|(fault, _)| fault.effect.is_none());
            let figures = Figures {
                count: of.len(),
                without_effect: unseen.count(),
                median_ms: times.get(times.len() / 2).copied().unwrap_or_default(),
                max_ms: times.last().copied().unwrap_or_default(),
            };
            (name, figures)
        });
        let figures: BTreeMap<_, _> = figures.collect();
        let times = self.rounds().filter_map(|round| round.recovery_ms);
        self.longest_ms = times.max().unwrap_or_default();
        self.faults = figures;
    }

    /// Whether something happened, nothing was wrong, and of each kind of fault that
    /// happened an effect was seen at least once.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.violations == 0 && !self.faults.is_empty() && self.never_seen().next().is_none()
    }

    /// How many calls were made.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// How often a kind of fault happened, and had an effect.
    #[must_use]
    pub fn count(&self, kind: &str) -> usize {
        let figures = self.faults.get(kind);
        figures.map_or(0, |figures| figures.count - figures.without_effect)
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

    /// The kinds that never had an effect, though they happened.
    fn never_seen(&self) -> impl Iterator<Item = &'static str> {
        let unseen = |(_, figures): &(_, &Figures)| figures.count == figures.without_effect;
        self.faults.iter().filter(unseen).map(|(name, _)| *name)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| fault | with effect | without | median back, ms | longest, ms |"
        )?;
        writeln!(f, "|---|---|---|---|---|")?;
        for (name, figures) in &self.faults {
            let Figures {
                count,
                without_effect,
                median_ms,
                max_ms,
            } = figures;
            let seen = count - without_effect;
            writeln!(
                f,
                "| {name} | {seen} | {without_effect} | {median_ms} | {max_ms} |"
            )?;
        }
        let mut setups: BTreeMap<Setup, Vec<u64>> = BTreeMap::new();
        for episode in &self.episodes {
            setups.entry(episode.setup).or_default().push(episode.seed);
        }
        writeln!(f)?;
        for (setup, seeds) in setups {
            writeln!(f, "{setup:?}: seeds {seeds:?}")?;
        }
        for missing in &self.not_run {
            writeln!(f, "not run: {missing}")?;
        }
        for name in self.never_seen() {
            writeln!(f, "never had an effect: {name}")?;
        }
        let bad = |episode: &&Episode| !episode.violations.is_empty();
        for episode in self.episodes.iter().filter(bad) {
            writeln!(f, "seed {}:", episode.seed)?;
            for violation in &episode.violations {
                writeln!(f, "  {violation}")?;
            }
            if let Some(history) = &episode.history {
                let history = history.display();
                writeln!(f, "  its history: fencepost-model check {history}")?;
            }
            let (seed, again) = (episode.seed, &self.again);
            writeln!(f, "  once more: fencepost-chaos --seed {seed} {again}")?;
        }
        let happened: usize = self.faults.values().map(|figures| figures.count).sum();
        let without: usize = self.faults.values().map(|of| of.without_effect).sum();
        write!(
            f,
            "{} operations, {happened} faults of {} kinds ({without} without effect) in {} rounds and {} s; \
             all replicas served again {} ms after the faults' end at the latest; {} violations",
            self.operations,
            self.faults.len(),
            self.rounds().count(),
            self.seconds,
            self.longest_ms,
            self.violations
        )
    }
}
