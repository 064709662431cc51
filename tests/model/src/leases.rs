//! What a history proves of each lease.
//!
//! A call takes effect at one moment between `sent` and `answered`; one without
//! an answer at any moment from `sent` on, but not after it has
//! [settled](History::settled), or never. From that follow, for each lease that
//! somebody was shown, four moments on the clock of the run:
//!
//! | moment | it is |
//! |---|---|
//! | `asked` | the first sending of its Acquire: it did not live before |
//! | `told` | the first answer that granted it: it has lived from then on at the latest |
//! | `until` | it has lived **without a break** from `told` until here, at least |
//! | `over` | it does not live any more from here on |
//!
//! `until` is the largest `sent + remaining` of all answers that show the lease
//! (a renewal proves that it had not ended before), but not later than the
//! sending of anything that may end it early: its Release, and an Acquire of the
//! same owner with another request id, whatever came of these. Answers that a
//! failover may have forgotten prove nothing.
//!
//! `over` is the largest `answered + ttl` of all answers that granted or renewed
//! it, and `settled + ttl` of all calls without an answer that may have, and one `slack`;
//! or, when it is earlier, the answer to its Release, to a call that heard that it is
//! lost, or to any call that was shown a newer token: these end it at once. A clock that
//! was set back moves it; ends that a failover may have undone do not count.
//!
//! An Acquire without an answer may have left a lease that nobody was told of:
//! [`Resource::could_hold`] counts it in. So it does every Acquire of the client
//! library, which may have sent several requests, every one that took longer than its
//! TTL, and every one that was refused while something was at fault: the server gives
//! back a grant that is over when it learns of it, or whose token is not above all that
//! it knows of, and asks anew.

mod could;
mod over;

use std::collections::BTreeMap;

use crate::history::{Call, History, Op, Outcome, Shown, Time, What};

pub use could::Could;
use over::set_back;

/// A history, sorted by resource and lease.
#[derive(Debug)]
pub struct Facts<'a> {
    /// What they follow from.
    pub history: &'a History,
    /// By name.
    pub resources: BTreeMap<&'a str, Resource<'a>>,
}

/// All about one resource.
#[derive(Debug, Default)]
pub struct Resource<'a> {
    /// Its calls, in the order of their answers. Writes are not among them.
    pub ops: Vec<&'a Op>,
    /// Its leases that somebody was shown, by token.
    pub leases: BTreeMap<i64, Lease<'a>>,
    /// The leases that somebody was told of, in the order of `told`.
    told: Vec<i64>,
    /// Those of them with a larger token than all before.
    newest_told: Vec<i64>,
    /// Those of them that certainly lived at some time.
    certain: Vec<i64>,
    /// The answers that showed a larger token than all before, in their order.
    newest: Vec<&'a Op>,
    newest_durable: Vec<&'a Op>,
    by_owner: BTreeMap<&'a str, Vec<&'a Op>>,
    hidden: BTreeMap<&'a str, Vec<Hidden>>,
}

/// A lease that somebody was shown.
#[derive(Debug)]
pub struct Lease<'a> {
    /// Its token.
    pub token: i64,
    /// Its holder, as the first answer said.
    pub owner: &'a str,
    /// The request id that it was granted to, when its Acquire was answered.
    pub request_id: Option<&'a str>,
    /// The answers that show it, in their order.
    pub answers: Vec<&'a Op>,
    /// It did not live before.
    pub asked: Time,
    /// It has lived from here on; never, when nobody was told of the grant.
    pub told: Time,
    /// It has lived until here, at least.
    pub until: Time,
    /// It does not live from here on.
    pub over: Time,
    /// What may have ended it early, and when: a call of its owner, or a clock.
    cuts: Vec<(Time, Option<&'a Op>)>,
}

/// A lease that there may be, and nobody was told of.
#[derive(Debug)]
struct Hidden {
    asked: Time,
    over: Time,
}

impl<'a> Facts<'a> {
    /// Reads a history.
    #[must_use]
    pub fn of(history: &'a History) -> Self {
        let mut resources = BTreeMap::<&str, Resource<'_>>::new();
        for op in &history.ops {
            if matches!(op.call, Call::Write { .. }) {
                continue;
            }
            let resource = resources.entry(&op.resource).or_default();
            resource.ops.push(op);
            resource.by_owner.entry(&op.owner).or_default().push(op);
        }
        for resource in resources.values_mut() {
            resource.ops.sort_by_key(|op| op.answered);
            resource.read(history);
        }
        Self { history, resources }
    }

    /// The lease of this token, on the resource of this call.
    #[must_use]
    pub fn lease(&self, op: &Op, token: i64) -> Option<&Lease<'a>> {
        self.resources.get(&*op.resource)?.leases.get(&token)
    }

    /// All calls but writes, each with its resource.
    pub fn ops(&self) -> impl Iterator<Item = (&Resource<'a>, &'a Op)> {
        let with = |resource| move |op: &&'a Op| (resource, *op);
        self.resources
            .values()
            .flat_map(move |resource| resource.ops.iter().map(with(resource)))
    }
}

impl<'a> Resource<'a> {
    fn read(&mut self, history: &'a History) {
        for op in &self.ops {
            if let Some(shown) = op.shown() {
                let lease = self
                    .leases
                    .entry(shown.token)
                    .or_insert_with(|| Lease::new(shown));
                lease.answers.push(op);
            }
            if let Call::Acquire { ttl, .. } = &op.call
                && (op.is_unknown()
                    || op.may_be_several()
                    || matches!(op.outcome, Outcome::Held { .. })
                        && history.faulty(op.sent, op.answered))
            {
                let over = history.settled(op.answered).plus(*ttl);
                let over = over.plus(history.limits.slack);
                let over = set_back(history, op.sent, over);
                let hidden = Hidden {
                    asked: op.sent,
                    over,
                };
                self.hidden.entry(&op.owner).or_default().push(hidden);
            }
        }
        // The newest first: what shows a newer token ends the older.
        let mut newer_seen = Time::NEVER;
        for lease in self.leases.values_mut().rev() {
            let own = self
                .by_owner
                .get(lease.owner)
                .map(Vec::as_slice)
                .unwrap_or_default();
            lease.read(history, own);
            lease.over = lease.over.min(newer_seen);
            let durable = lease.answers.iter().find(|op| history.durable(op));
            newer_seen = newer_seen.min(durable.map_or(Time::NEVER, |op| op.answered));
        }
        let told = self
            .leases
            .values()
            .filter(|lease| lease.told < Time::NEVER);
        self.told = told.map(|lease| lease.token).collect();
        self.told.sort_by_key(|token| self.leases[token].told);
        for token in &self.told {
            if self.newest_told.last().is_none_or(|newest| newest < token) {
                self.newest_told.push(*token);
            }
        }
        let is_certain = |token: &&i64| self.leases[token].told < self.leases[token].until;
        self.certain = self.told.iter().filter(is_certain).copied().collect();
        self.newest = rising(self.ops.iter().copied());
        let durable = self.ops.iter().filter(|op| history.durable(op));
        self.newest_durable = rising(durable.copied());
    }

    /// The leases that certainly lived at some time, in the order of `told`.
    pub fn certain(&self) -> impl Iterator<Item = &Lease<'a>> {
        self.certain.iter().map(|token| &self.leases[token])
    }

    /// The lease that certainly lived from when the call was sent until it was answered.
    #[must_use]
    pub fn certain_during(&self, op: &Op) -> Option<&Lease<'a>> {
        let after = self
            .certain
            .partition_point(|token| self.leases[token].told <= op.sent);
        let lease = &self.leases[self.certain[..after].last()?];
        (op.answered < lease.until).then_some(lease)
    }

    /// The answer with the largest token of those that were there before a moment;
    /// `durable`: of those that no failover may have forgotten.
    #[must_use]
    pub fn newest_before(&self, at: Time, durable: bool) -> Option<&'a Op> {
        let newest = if durable {
            &self.newest_durable
        } else {
            &self.newest
        };
        let after = newest.partition_point(|op| op.answered < at);
        newest[..after].last().copied()
    }

    /// The lease with the largest token of those that somebody was told of before a
    /// moment.
    #[must_use]
    pub fn newest_told_before(&self, at: Time) -> Option<&Lease<'a>> {
        let after = self
            .newest_told
            .partition_point(|token| self.leases[token].told < at);
        Some(&self.leases[self.newest_told[..after].last()?])
    }

    /// The lease that was granted last among those that were told of up to a moment.
    #[must_use]
    pub fn told_last(&self, at: Time) -> Option<&Lease<'a>> {
        let after = self
            .told
            .partition_point(|token| self.leases[token].told <= at);
        Some(&self.leases[self.told[..after].last()?])
    }

    /// What an owner has called.
    #[must_use]
    pub fn calls_of(&self, owner: &str) -> &[&'a Op] {
        self.by_owner
            .get(owner)
            .map(Vec::as_slice)
            .unwrap_or_default()
    }
}

impl<'a> Lease<'a> {
    fn new(shown: &'a Shown) -> Self {
        Self {
            token: shown.token,
            owner: &shown.owner,
            request_id: None,
            answers: Vec::new(),
            asked: Time::NEVER,
            told: Time::NEVER,
            until: Time::default(),
            over: Time::default(),
            cuts: Vec::new(),
        }
    }

    /// Reads the calls of its owner.
    fn read(&mut self, history: &History, own: &[&'a Op]) {
        let is_grant = |op: &&&Op| op.granted().is_some();
        let grants: Vec<&Op> = self.answers.iter().filter(is_grant).copied().collect();
        self.request_id = grants.first().and_then(|op| op.request()).map(|(_, id)| id);
        let same_request =
            |op: &&&Op| op.request().is_some() && op.request().map(|(_, id)| id) == self.request_id;
        let first = own.iter().filter(same_request).map(|op| op.sent).min();
        let shown = self.answers.iter().map(|op| op.sent).min();
        self.asked = first.or(shown).unwrap_or_default();
        let told = grants.iter().filter(|op| history.durable(op));
        self.told = told.map(|op| op.answered).min().unwrap_or(Time::NEVER);

        let calls = own.iter().filter(|op| self.may_end(history, op));
        let steps = history.events.iter().filter(|event| {
            matches!(event.what, What::ClockStepped(by) if by > 0) && event.to >= self.asked
        });
        self.cuts = steps
            .map(|event| (event.from, None))
            .chain(calls.map(|op| (op.sent, Some(*op))))
            .collect();
        self.until = self.until_as_known(history, Time::NEVER);
        self.over = self.over(history, own);
    }

    /// When it was granted, by the database's clock, as the first answer said.
    #[must_use]
    pub fn acquired_at(&self) -> i64 {
        let first = self.answers.first().and_then(|op| op.shown());
        first.map_or(0, |shown| shown.acquired_at)
    }

    /// Until when it has lived at least, by what was answered up to this moment.
    #[must_use]
    pub fn until_as_known(&self, history: &History, at: Time) -> Time {
        self.longest(history, at).min(self.cut(None))
    }

    /// Until when it has lived at least, when this call did not end it.
    #[must_use]
    pub fn until_but_for(&self, history: &History, call: &Op) -> Time {
        self.longest(history, Time::NEVER).min(self.cut(Some(call)))
    }

    fn longest(&self, history: &History, at: Time) -> Time {
        let answers = self
            .answers
            .iter()
            .filter(|op| op.answered <= at && history.durable(op));
        let until = answers
            .filter_map(|op| Some(op.sent.plus(op.shown()?.remaining)))
            .max();
        until.unwrap_or_default()
    }

    fn cut(&self, but_for: Option<&Op>) -> Time {
        let is_it = |op: Option<&Op>| op.zip(but_for).is_some_and(|(a, b)| std::ptr::eq(a, b));
        let cuts = self.cuts.iter().filter(|(_, op)| !is_it(*op));
        cuts.map(|(at, _)| *at).min().unwrap_or(Time::NEVER)
    }

    /// Whether a call of its owner may end it before its time.
    fn may_end(&self, history: &History, op: &Op) -> bool {
        match &op.call {
            Call::Release { token } => *token == self.token,
            Call::Acquire { request_id, .. } => {
                let same = Some(request_id.as_str()) == self.request_id && !request_id.is_empty();
                let itself = op.shown().is_some_and(|shown| shown.token <= self.token);
                let before = match op.is_unknown() {
                    true => history.settled(op.answered) < self.asked,
                    false => op.answered < self.asked,
                };
                // A refusal did nothing.
                let refused = matches!(op.outcome, Outcome::Held { .. } | Outcome::No(_));
                let refused = refused && !op.may_be_several();
                !(same || itself || before || refused)
            }
            _ => false,
        }
    }
}

/// The answers that show a larger token than all before.
fn rising<'a>(ops: impl Iterator<Item = &'a Op>) -> Vec<&'a Op> {
    let mut highest = 0;
    ops.filter(|op| match op.shown() {
        Some(shown) if shown.token > highest => {
            highest = shown.token;
            true
        }
        _ => false,
    })
    .collect()
}
