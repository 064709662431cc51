//! Who could have had a lease, known or not.

use super::Resource;
use crate::history::{Op, Time};

/// Whether an owner could have a lease at some moment of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Could {
    /// It could.
    Hold,
    /// It never asked for one before the call was answered.
    NotYet,
    /// All that it may have had were over by then.
    NoMore(Time),
}

impl Resource<'_> {
    /// Whether an owner may have had leases that nobody was told of.
    #[must_use]
    pub fn may_hide(&self, owner: &str) -> bool {
        self.hidden.contains_key(owner)
    }

    /// Whether an owner could have a lease, known or not, while the call was under way.
    #[must_use]
    pub fn could_hold(&self, owner: &str, op: &Op) -> Could {
        let known = self.calls_of(owner).iter().filter_map(|op| op.granted());
        let known = known.map(|shown| &self.leases[&shown.token]);
        let known = known.map(|lease| (lease.asked, lease.over));
        let hidden = self.hidden.get(owner).into_iter().flatten();
        let hidden = hidden.map(|hidden| (hidden.asked, hidden.over));
        let begun = known
            .chain(hidden)
            .filter(|(asked, _)| *asked <= op.answered);
        match begun.map(|(_, over)| over).max() {
            None => Could::NotYet,
            Some(over) if over < op.sent => Could::NoMore(over),
            Some(_) => Could::Hold,
        }
    }
}
