//! When a lease is over.

use std::time::Duration;

use super::Lease;
use crate::history::{Call, Event, History, Op, Time, Via, What};

impl Lease<'_> {
    pub(super) fn over(&self, history: &History, own: &[&Op]) -> Time {
        let moved = self.answers.iter().filter(|op| op.call != Call::Get);
        // Nobody but its owner can have renewed it, and its owner was never told.
        let seen = self.answers.first().filter(|op| op.call == Call::Get);
        let latest = |op: &Op| match op.via {
            Via::Library => history.settled(op.answered),
            _ => op.answered,
        };
        let answered = moved
            .chain(seen)
            .filter_map(|op| Some(latest(op).plus(op.shown()?.ttl)));
        let unanswered = own
            .iter()
            .filter(|op| op.is_unknown() && self.may_renew(op))
            .map(|op| history.settled(op.answered).plus(self.longest_ttl()));
        let by_time = answered.chain(unanswered).max().unwrap_or_default();
        let by_time = by_time.plus(history.limits.slack);
        let ended = own
            .iter()
            .filter(|op| op.call.token() == Some(self.token) && history.durable(op))
            .filter(|op| op.lost() || (matches!(op.call, Call::Release { .. }) && op.succeeded()))
            .filter(|op| !history.revives(op, Time::NEVER))
            .map(|op| op.answered)
            .min();
        set_back(history, self.asked, by_time).min(ended.unwrap_or(Time::NEVER))
    }

    /// Whether this call renews it, when it does anything.
    #[must_use]
    pub fn may_renew(&self, op: &Op) -> bool {
        matches!(op.call, Call::Renew { token } | Call::KeepAlive { token } if token == self.token)
    }

    fn longest_ttl(&self) -> Duration {
        let ttls = self.answers.iter().filter_map(|op| op.shown());
        ttls.map(|shown| shown.ttl).max().unwrap_or_default()
    }
}

/// The end of a lease when the clock was set back while it lived.
pub(super) fn set_back(history: &History, asked: Time, over: Time) -> Time {
    let step = |over: Time, event: &&Event| match event.what {
        What::ClockStepped(by) if by < 0 && event.from <= over => {
            over.plus(Duration::from_micros(by.unsigned_abs()))
        }
        _ => over,
    };
    let since = history.events.iter().filter(|event| event.to >= asked);
    let mut steps: Vec<_> = since.collect();
    // Each may make the lease live to see the next.
    steps.sort_by_key(|event| event.from);
    steps.iter().fold(over, step)
}
