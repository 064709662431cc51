//! Goes through every state of a world, and tells how it came to a bad one.

use std::collections::{BTreeMap, BTreeSet};

use stateright::{Checker, Expectation, HasDiscoveries, Model, Path};

use crate::{
    World,
    model::Action,
    state::{State, Step},
};

/// What was found.
#[derive(Debug)]
pub struct Findings {
    /// How many different states there are, or were seen until the search was over.
    pub states: usize,
    /// For each property that is broken, how: one step a line.
    pub broken: BTreeMap<&'static str, String>,
    /// What should happen in some state, and did.
    pub happened: BTreeSet<&'static str>,
}

impl World {
    /// Visits every state that can be reached.
    pub fn explore(self) -> Findings {
        self.search(HasDiscoveries::All)
    }

    /// Visits states, the nearest first, until `property` is found broken.
    pub fn explore_until(self, property: &'static str) -> Findings {
        self.search(HasDiscoveries::AnyOf(BTreeSet::from([property])))
    }

    fn search(self, until: HasDiscoveries) -> Findings {
        let checker = self.checker().finish_when(until).spawn_bfs().join();
        let mut findings = Findings {
            states: checker.unique_state_count(),
            broken: BTreeMap::new(),
            happened: BTreeSet::new(),
        };
        for (name, path) in checker.discoveries() {
            let property = checker.model().property(name);
            if property.expectation == Expectation::Always {
                let is_broken = |s: &State| !(property.condition)(checker.model(), s);
                findings.broken.insert(name, tell(path, is_broken));
            } else {
                findings.happened.insert(name);
            }
        }
        findings
    }
}

/// The way to the first state that is broken.
fn tell(path: Path<State, Action>, is_broken: impl Fn(&State) -> bool) -> String {
    let steps = path.into_vec();
    let mut lines = String::new();
    for pair in steps.windows(2) {
        let [(before, Some(action)), (after, _)] = pair else {
            break;
        };
        lines.push_str(&line(before, action, after));
        lines.push('\n');
        if is_broken(after) {
            break;
        }
    }
    lines
}

fn line(before: &State, action: &Action, after: &State) -> String {
    match *action {
        Action::Begin { who, request } => {
            let owner = if request % 2 == 0 { 'A' } else { 'B' };
            format!("replica {who}: owner {owner} asks with request {request}")
        }
        Action::Go { who } => {
            let (from, to) = (&before.replicas[who].step, &after.replicas[who].step);
            format!("replica {who}: {from:?} -> {to:?}")
        }
        Action::Answer { who } => match before.replicas[who].step {
            Step::Decided { grant, .. } => {
                let grants = &after.ghost.grants;
                format!("replica {who}: answers with token {}", grants[grant].token)
            }
            _ => String::new(),
        },
        Action::Leave { who } => format!("replica {who}: the caller has gone"),
        Action::GiveBack { who } => format!("replica {who}: gives the lease back"),
        Action::Write { grant } => {
            let token = before.ghost.grants[grant].token;
            format!("a holder's write with token {token} is admitted: grant {grant}")
        }
        Action::Keep { n } => format!("past {n}, a {:?}, is as the database", before.pasts[n].kind),
        Action::Promote { n, clock_ahead } => {
            format!("past {n} is promoted, its clock ahead by {clock_ahead}")
        }
        Action::Restore { n } => format!("past {n}: its tables are restored"),
        Action::EndDump => format!("the dump's end sets the sequence to {}", after.live.last),
        _ => format!("{action:?}"),
    }
}
