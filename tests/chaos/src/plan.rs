//! What an episode's seed says.

use std::time::Duration;

use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};

use crate::{
    faults::{KINDS, Kind},
    world::Setup,
};

/// An episode to be.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) setup: Setup,
    pub(crate) rounds: Vec<Vec<Planned>>,
    /// For whatever else is drawn.
    pub(crate) rng: StdRng,
}

/// A fault to be.
pub(crate) struct Planned {
    pub(crate) kind: &'static Kind,
    /// When it begins, within its round.
    pub(crate) after: Duration,
    pub(crate) time: Duration,
    pub(crate) rng: StdRng,
}

impl Plan {
    /// Successive seeds take the setups that this machine can have in turn. What can
    /// be had in one setup alone comes first there; the rest comes in any order. None
    /// when nothing of what is wanted can be had.
    pub(crate) fn of(seed: u64, rounds: usize, only: &[String]) -> Option<Self> {
        let wanted = |kind: &&Kind| only.is_empty() || only.iter().any(|name| name == kind.name);
        let setups: Vec<Setup> = Setup::ALL
            .into_iter()
            .filter(|setup| setup.missing().is_none())
            .filter(|setup| KINDS.iter().filter(wanted).any(|kind| kind.fits(*setup)))
            .collect();
        let turn = seed.checked_rem(setups.len() as u64)?;
        let setup = setups[usize::try_from(turn).unwrap_or(0)];
        let mut rng = StdRng::seed_from_u64(seed);
        let mut deck: Vec<&'static Kind> = KINDS
            .iter()
            .filter(wanted)
            .filter(|kind| kind.fits(setup))
            .collect();
        deck.shuffle(&mut rng);
        deck.sort_by_key(|kind| kind.only.is_empty());
        let special = deck.iter().filter(|kind| !kind.only.is_empty()).count();
        let rounds = (0..rounds).map(|n| {
            let first = deck[n % deck.len()];
            let second = deck[rng.random_range(0..deck.len())];
            // Those that only this setup has come alone as well as with another.
            let two = first.goes_with(second) && (n >= special || rng.random_bool(0.3));
            let two = two && rng.random_bool(0.6);
            let kinds = if two {
                vec![first, second]
            } else {
                vec![first]
            };
            let planned = |kind| Planned {
                kind,
                after: Duration::from_millis(rng.random_range(0..1500)),
                time: Duration::from_millis(rng.random_range(500..4500)),
                rng: StdRng::seed_from_u64(rng.random()),
            };
            kinds.into_iter().map(planned).collect()
        });
        Some(Self {
            seed,
            setup,
            rounds: rounds.collect(),
            rng: StdRng::seed_from_u64(seed ^ 0x5eed),
        })
    }
}
