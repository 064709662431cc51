//! The server, broken on purpose, one rule at a time: the checker must notice.
//!
//! The rules are in the database's functions, so a mutant is other SQL, installed
//! after the migrations; the server is the one that ships. Each edit names the text
//! that it replaces, and fails when that is not there any longer.

use std::time::Duration;

use fencepost_support::postgres::Client;

use crate::{
    Violation,
    history::History,
    load::{Error, Options},
    world::{Scenario, World},
};

/// A broken rule.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Which.
    pub name: &'static str,
    /// What must happen for it to show.
    pub scenario: Scenario,
    /// The invariants that say what the rule is for: one of them must notice. What else
    /// does is listed, and does not count.
    pub caught_by: &'static [&'static str],
    /// Function, text, other text.
    edits: &'static [(&'static str, &'static str, &'static str)],
}

/// Calls do not go in rounds: each is judged by the function for a single one.
const SINGLY: (&str, &str, &str) = (
    "acquire_all_v2",
    "WHERE i.postmaster_start = pg_postmaster_start_time()",
    "WHERE false AND i.postmaster_start = pg_postmaster_start_time()",
);

/// All of them; first the rules as they are, in each scenario.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "none",
        scenario: Scenario::Plain,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        name: "none, crowds",
        scenario: Scenario::Crowds,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        name: "none, drops",
        scenario: Scenario::Drops,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        name: "none, rows locked",
        scenario: Scenario::RowLocks,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        name: "none, a failover",
        scenario: Scenario::Failover,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        name: "none, two failovers",
        scenario: Scenario::TwoFailovers,
        caught_by: &[],
        edits: &[],
    },
    Mutant {
        // Drawn before the row's lock was waited for, by a statement that does not lock
        // what it saw first. The table's own check would stop it.
        name: "token from EXCLUDED",
        scenario: Scenario::Crowds,
        caught_by: &["tokens", "gets", "takeable", "kept", "stale"],
        edits: &[
            SINGLY,
            (
                "acquire_v2",
                "fencing_token = nextval('fencepost.fencing_tokens'),\n               prev_token = l.fencing_token",
                "fencing_token = EXCLUDED.fencing_token,\n               prev_token = 0",
            ),
            (
                "acquire_v2",
                "\n           FOR UPDATE;\n\n        INSERT",
                ";\n\n        INSERT",
            ),
            (
                "acquire_v2",
                "WHERE l.fencing_token = ended.fencing_token\n           AND NOT (",
                "WHERE NOT (",
            ),
        ],
    },
    Mutant {
        name: "delete on release",
        scenario: Scenario::Known,
        caught_by: &["replays"],
        edits: &[
            (
                "release_v2",
                "UPDATE fencepost.locks AS l SET released = true, expires_at = t WHERE",
                "DELETE FROM fencepost.locks AS l WHERE",
            ),
            (
                "release_all_v2",
                "UPDATE fencepost.locks AS l\n           SET released = true, expires_at = least(l.expires_at, clock_timestamp())\n         WHERE",
                "DELETE FROM fencepost.locks AS l\n         WHERE",
            ),
        ],
    },
    Mutant {
        // As old as the statement, which may have waited.
        name: "now() for the clock",
        scenario: Scenario::RowLocks,
        caught_by: &["ended", "answers", "exclusion", "kept"],
        edits: &[
            ("acquire_v2", "clock_timestamp()", "now()"),
            ("acquire_all_v2", "clock_timestamp()", "now()"),
            ("renew_v1", "clock_timestamp()", "now()"),
            ("renew_all_v1", "clock_timestamp()", "now()"),
            ("release_v2", "clock_timestamp()", "now()"),
            ("release_all_v2", "clock_timestamp()", "now()"),
        ],
    },
    Mutant {
        name: "a clock read per column",
        scenario: Scenario::Plain,
        caught_by: &["answers"],
        edits: &[
            (
                "acquire_v2",
                "SELECT c.t, c.t + make_interval",
                "SELECT clock_timestamp(), clock_timestamp() + make_interval",
            ),
            (
                "acquire_all_v2",
                "f.t, f.t + make_interval",
                "clock_timestamp(), clock_timestamp() + make_interval",
            ),
        ],
    },
    Mutant {
        // Judges, and then waits for the lock.
        name: "plain UPDATE for Renew",
        scenario: Scenario::RowLocks,
        caught_by: &["ended", "exclusion", "stale", "kept", "tokens"],
        edits: &[
            (
                "renew_v1",
                "             WHERE l.resource = p_resources[n]\n               FOR UPDATE;",
                "             WHERE l.resource = p_resources[n];",
            ),
            (
                "renew_all_v1",
                "FROM judged AS j;",
                "FROM judged AS j WHERE false;",
            ),
            ("renew_all_v1", "WHERE j.outcome = 'renewed'", "WHERE false"),
        ],
    },
    Mutant {
        // Nobody compares the identity; the leap, where one comes, is left out.
        name: "guard off",
        scenario: Scenario::Failover,
        caught_by: &["tokens"],
        edits: &[
            (
                "acquire_v2",
                "IF seen.identity_holds IS NOT TRUE THEN",
                "IF false THEN",
            ),
            (
                "acquire_v2",
                "IF granted.fencing_token < seen.first_token THEN",
                "IF false THEN",
            ),
            (
                "acquire_all_v2",
                "WHERE i.postmaster_start = pg_postmaster_start_time()\n           AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens')",
                "",
            ),
            (
                "acquire_all_v2",
                "WHEN g.fencing_token < i.first_token THEN",
                "WHEN false THEN",
            ),
            (
                "leap_v1",
                "to_token := CASE WHEN clock_behind",
                "to_token := CASE WHEN true THEN from_token + 1 WHEN clock_behind",
            ),
        ],
    },
    Mutant {
        name: "relative leap",
        scenario: Scenario::TwoFailovers,
        caught_by: &["tokens"],
        edits: &[(
            "leap_v1",
            "clock_behind := now_token <= past_token;",
            "clock_behind := true;",
        )],
    },
    Mutant {
        // Shows where an owner often has a newer lease than the one that it gives back.
        name: "token ignored on release",
        scenario: Scenario::Crowds,
        caught_by: &["stale", "exclusion", "kept"],
        edits: &[
            (
                "release_v2",
                "WHEN p_token < held.fencing_token                         THEN 'superseded'",
                "",
            ),
            (
                "release_all_v2",
                "WHEN j.asked_token < j.fencing_token  THEN 'superseded'",
                "",
            ),
        ],
    },
    Mutant {
        // Whoever else was handed the lease loses it. A locked row keeps the first try
        // under way until its retry is there.
        name: "give-back by token",
        scenario: Scenario::Drops,
        caught_by: &["exclusion", "kept", "losses"],
        edits: &[("give_back_v1", "AND held.claims = 1 AND", "AND")],
    },
];

impl Mutant {
    /// Whether nothing is broken.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.edits.is_empty()
    }

    /// Whether an invariant that must notice it has.
    #[must_use]
    pub fn is_caught(&self, violations: &[Violation]) -> bool {
        let mut named = violations.iter().map(|violation| violation.invariant);
        named.any(|name| self.caught_by.contains(&name))
    }

    /// Installs it.
    async fn install(&self, admin: &Client) {
        for (function, from, to) in self.edits {
            let definition = "SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p
                               WHERE p.pronamespace = 'fencepost'::regnamespace AND p.proname = $1";
            let row = admin.query_one(definition, &[function]).await;
            let text: String = row.expect("the function is there").get(0);
            assert!(
                text.contains(from),
                "{}: {function} has no {from:?}",
                self.name
            );
            admin.run(&text.replace(from, to)).await;
        }
    }

    /// Runs it with this seed, and returns what was recorded.
    ///
    /// # Errors
    ///
    /// When the run itself fails.
    pub async fn run(&self, seed: u64, time: Duration) -> Result<History, Error> {
        let mut world = World::start().await;
        self.install(&world.admin().await).await;
        let mut options = Options::new(seed, Vec::new());
        // Nothing is slow here but on purpose.
        options.limits.slack = Duration::from_millis(200);
        world.run(options, self.scenario, time).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::INVARIANTS;

    #[test]
    fn each_names_the_invariants_that_must_notice_it() {
        let there = |name: &&str| INVARIANTS.iter().any(|invariant| invariant.name == *name);
        for mutant in MUTANTS {
            assert_eq!(mutant.is_sound(), mutant.caught_by.is_empty(), "{mutant:?}");
            assert!(mutant.caught_by.iter().all(there), "{mutant:?}");
            // An internal error says that something broke, not what.
            assert!(!mutant.caught_by.contains(&"reasons"), "{mutant:?}");
        }
    }

    #[test]
    fn another_invariant_does_not_count() {
        let mutant = MUTANTS.iter().find(|mutant| mutant.name == "guard off");
        let violation = |invariant| Violation {
            invariant,
            what: String::new(),
            ops: Vec::new(),
        };
        let is_caught = |by: &[&'static str]| {
            let violations: Vec<_> = by.iter().map(|name| violation(*name)).collect();
            mutant.is_some_and(|mutant| mutant.is_caught(&violations))
        };
        assert!(is_caught(&["reasons", "tokens"]));
        assert!(!is_caught(&["reasons", "answers"]));
        assert!(!is_caught(&[]));
    }
}
