//! The verdict on a history, for people.

use std::{
    collections::BTreeMap,
    env, fmt,
    fs::{self, File},
    io::{self, BufWriter},
    path::{Path, PathBuf},
};

use crate::{
    Violation, check,
    history::{History, Outcome},
};

/// So many violations are shown.
const SHOWN: usize = 5;

/// How often each kind of call had each outcome.
#[derive(Clone, Debug, Default)]
pub struct Summary(BTreeMap<(&'static str, String), usize>);

impl Summary {
    /// Counts the calls of a history.
    #[must_use]
    pub fn of(history: &History) -> Self {
        let mut counts = BTreeMap::new();
        for op in &history.ops {
            let word = match &op.outcome {
                Outcome::Lock(_) | Outcome::Done => "ok",
                Outcome::Held { .. } => "refused",
                Outcome::No(reason) => reason,
                Outcome::Unknown(_) => "unknown",
            };
            *counts.entry((op.call.kind(), word.to_owned())).or_default() += 1;
        }
        Self(counts)
    }

    /// How often a kind of call had an outcome: `ok`, `refused`, `unknown`, or a
    /// reason of the contract.
    #[must_use]
    pub fn count(&self, kind: &'static str, outcome: &str) -> usize {
        let key = (kind, outcome.to_owned());
        self.0.get(&key).copied().unwrap_or_default()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = "";
        for ((kind, outcome), count) in &self.0 {
            let separator = match last {
                "" => "",
                same if same == *kind => ", ",
                _ => "\n",
            };
            let name = if last == *kind { "" } else { kind };
            let gap = if name.is_empty() { "" } else { ": " };
            write!(f, "{separator}{name}{gap}{count} {outcome}")?;
            last = kind;
        }
        Ok(())
    }
}

/// A history that contradicts an invariant.
#[derive(Debug)]
pub struct Contradiction {
    /// In which ways.
    pub violations: Vec<Violation>,
    /// The random numbers of the run.
    pub seed: u64,
    /// Where it was saved.
    pub saved: io::Result<PathBuf>,
}

impl Contradiction {
    /// How many violations there are of each invariant.
    #[must_use]
    pub fn by_invariant(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for violation in &self.violations {
            *counts.entry(violation.invariant).or_default() += 1;
        }
        counts
    }
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}: {} violations",
            self.seed,
            self.violations.len()
        )?;
        match &self.saved {
            Ok(path) => write!(f, ", saved as {}", path.display())?,
            Err(error) => write!(f, ", not saved: {error}")?,
        }
        let shown = self.violations.iter().take(SHOWN);
        shown
            .into_iter()
            .try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

impl std::error::Error for Contradiction {}

/// Checks a history, and saves it in `directory` when it is contradictory.
///
/// # Errors
///
/// When it is.
pub fn verdict(history: &History, directory: &Path) -> Result<Summary, Contradiction> {
    let violations = check(history);
    if violations.is_empty() {
        return Ok(Summary::of(history));
    }
    let seed = history.limits.seed;
    let saved = save(history, directory);
    Err(Contradiction {
        violations,
        seed,
        saved,
    })
}

/// Saves a history under its seed.
///
/// # Errors
///
/// When there is no room.
pub fn save(history: &History, directory: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let path = directory.join(format!("{}.jsonl", history.limits.seed));
    history.save(BufWriter::new(File::create(&path)?))?;
    Ok(path)
}

/// `model` in the directory that this executable was built into.
#[must_use]
pub fn default_directory() -> PathBuf {
    let this = env::current_exe().unwrap_or_default();
    let profile = this
        .ancestors()
        .skip(1)
        .find(|above| !above.ends_with("deps"));
    let target = profile.and_then(Path::parent);
    target.unwrap_or(Path::new("target")).join("model")
}
