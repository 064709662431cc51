//! The invariants: each a pure function of what a history proves, in a file of
//! its own.
//!
//! Each returns all that contradicts it. What a single one assumes is said in its
//! file; what "certain" and "over" mean, in [`leases`](crate::leases).

use std::fmt;

use crate::{
    history::{History, Op},
    leases::Facts,
};

pub mod answers;
pub mod ended;
pub mod exclusion;
pub mod gets;
pub mod holders;
pub mod kept;
pub mod losses;
pub mod reasons;
pub mod register;
pub mod replays;
pub mod stale;
pub mod takeable;
pub mod tokens;

#[cfg(test)]
mod hand;

/// A named invariant.
pub struct Invariant {
    /// What must hold, in a word.
    pub name: &'static str,
    /// Says what contradicts it.
    pub check: fn(&Facts<'_>) -> Vec<Violation>,
}

/// All of them.
pub const INVARIANTS: &[Invariant] = &[
    Invariant {
        name: "exclusion",
        check: exclusion::check,
    },
    Invariant {
        name: "tokens",
        check: tokens::check,
    },
    Invariant {
        name: "stale",
        check: stale::check,
    },
    Invariant {
        name: "ended",
        check: ended::check,
    },
    Invariant {
        name: "takeable",
        check: takeable::check,
    },
    Invariant {
        name: "holders",
        check: holders::check,
    },
    Invariant {
        name: "kept",
        check: kept::check,
    },
    Invariant {
        name: "losses",
        check: losses::check,
    },
    Invariant {
        name: "gets",
        check: gets::check,
    },
    Invariant {
        name: "replays",
        check: replays::check,
    },
    Invariant {
        name: "answers",
        check: answers::check,
    },
    Invariant {
        name: "reasons",
        check: reasons::check,
    },
    Invariant {
        name: "register",
        check: register::check,
    },
];

/// A contradiction, and the calls that show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Of which invariant.
    pub invariant: &'static str,
    /// What is wrong.
    pub what: String,
    /// The calls.
    pub ops: Vec<Op>,
}

impl Violation {
    fn new(what: impl Into<String>, ops: &[&Op]) -> Self {
        Self {
            invariant: "",
            what: what.into(),
            ops: ops.iter().map(|&op| op.clone()).collect(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)?;
        self.ops.iter().try_for_each(|op| write!(f, "\n    {op}"))
    }
}

/// All that contradicts the invariants.
#[must_use]
pub fn check(history: &History) -> Vec<Violation> {
    let facts = Facts::of(history);
    let of = |invariant: &Invariant| {
        let mut violations = (invariant.check)(&facts);
        for violation in &mut violations {
            violation.invariant = invariant.name;
        }
        violations
    };
    INVARIANTS.iter().flat_map(of).collect()
}
