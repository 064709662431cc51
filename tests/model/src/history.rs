//! What is recorded: calls, faults, and the log of the register.

mod time;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

pub use time::Time;
use time::micros;

/// What a client asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the fields are those of the contract")]
pub enum Call {
    /// Take the lock.
    Acquire {
        request_id: String,
        #[serde(with = "micros")]
        ttl: Duration,
    },
    /// Renew a lease, for its own TTL.
    Renew { token: i64 },
    /// Give a lease back.
    Release { token: i64 },
    /// One word of a stream of renewals: sent when the stream was opened,
    /// answered when the word arrived. The last word is the end of the stream.
    /// The background renewal of a guard is a stream of which only the end is seen.
    KeepAlive { token: i64 },
    /// Look at the lock.
    Get,
    /// Write to the fenced register, in one transaction with the token's `admit`.
    Write { token: i64 },
}

impl Call {
    /// Its name in the contract.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Acquire { .. } => "Acquire",
            Self::Renew { .. } => "Renew",
            Self::Release { .. } => "Release",
            Self::KeepAlive { .. } => "KeepAlive",
            Self::Get => "Get",
            Self::Write { .. } => "Write",
        }
    }

    /// The token that the call names.
    pub fn token(&self) -> Option<i64> {
        match *self {
            Self::Renew { token }
            | Self::Release { token }
            | Self::KeepAlive { token }
            | Self::Write { token } => Some(token),
            Self::Acquire { .. } | Self::Get => None,
        }
    }

    /// Whether success means that the lease lived when the call took effect.
    pub fn needs_live_lease(&self) -> bool {
        matches!(
            self,
            Self::Renew { .. } | Self::Release { .. } | Self::KeepAlive { .. }
        )
    }
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Granted, renewed, or shown by Get.
    Lock(Shown),
    /// Refused: this owner has it.
    Held {
        /// The holder's name.
        owner: String,
        /// When it was granted the lock, by the database's clock.
        #[serde(default)]
        acquired_at: i64,
        /// What is left of its lease.
        #[serde(default, with = "micros")]
        remaining: Duration,
    },
    /// Released, or written and committed.
    Done,
    /// It did not happen, for this reason of the contract, or SQLSTATE.
    No(String),
    /// Nobody knows: no answer, or one that says "may have happened".
    Unknown(String),
}

/// A lease as an answer shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// Its fencing token.
    pub token: i64,
    /// Its holder.
    pub owner: String,
    /// What is left of it, counted from when the call was sent: a lower bound.
    #[serde(with = "micros")]
    pub remaining: Duration,
    /// Its time to live.
    #[serde(with = "micros")]
    pub ttl: Duration,
    /// When it was granted, by the database's clock: microseconds since 1970.
    pub acquired_at: i64,
    /// When it ends, by the database's clock.
    pub expires_at: i64,
}

/// A status other than OK that ended a call, as it came over the wire; or `Ok`, without
/// a reason, when OK was no answer: a stream that just ended, a grant without a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its code, as tonic spells it.
    pub code: String,
    /// The reason of its `ErrorInfo`; none in what the transport made up.
    pub reason: Option<String>,
}

/// Through what a call went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Via {
    /// A generated stub, on a connection to this replica: one call, one request.
    Stub(usize),
    /// The client library: one call may be several requests, to any replica.
    Library,
    /// A connection to the database of the register.
    Register,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Op {
    /// Its number; a write's is also its value in the register.
    pub id: u64,
    /// Which client made it.
    pub client: usize,
    /// Through what.
    pub via: Via,
    /// On which resource.
    pub resource: String,
    /// In whose name. Get asks in nobody's.
    pub owner: String,
    /// What it asked for.
    pub call: Call,
    /// Just before it was sent.
    pub sent: Time,
    /// When the answer was there, or the caller gave up.
    pub answered: Time,
    /// What came back.
    pub outcome: Outcome,
    /// The status behind it, when it was no success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
}

impl Op {
    /// The lease in the answer.
    pub fn shown(&self) -> Option<&Shown> {
        match &self.outcome {
            Outcome::Lock(shown) => Some(shown),
            _ => None,
        }
    }

    /// The lease that this Acquire was granted.
    pub fn granted(&self) -> Option<&Shown> {
        self.request().and(self.shown())
    }

    /// The identity of an acquisition: who asked, and by which request id.
    pub fn request(&self) -> Option<(&str, &str)> {
        match &self.call {
            Call::Acquire { request_id, .. } => Some((&self.owner, request_id)),
            _ => None,
        }
    }

    /// Whether the one call may have been several requests: the client library repeats
    /// what is not answered, and a server an Acquire whose grant was over when it heard of it.
    pub fn may_be_several(&self) -> bool {
        match &self.call {
            _ if self.via == Via::Library => true,
            Call::Acquire { ttl, .. } => self.answered.since(self.sent) >= *ttl,
            _ => false,
        }
    }

    /// Whether nobody knows what came of it.
    pub fn is_unknown(&self) -> bool {
        matches!(self.outcome, Outcome::Unknown(_))
    }

    /// Whether it said that what was asked for was done.
    pub fn succeeded(&self) -> bool {
        matches!(self.outcome, Outcome::Lock(_) | Outcome::Done)
    }

    /// Whether it said that the lease which it names is over.
    pub fn lost(&self) -> bool {
        let over = [
            "LOCK_NOT_FOUND",
            "LOCK_EXPIRED",
            "NOT_OWNER",
            "TOKEN_SUPERSEDED",
            "TOKEN_UNKNOWN",
        ];
        let reason = match &self.outcome {
            Outcome::No(reason) => reason.as_str(),
            _ => return false,
        };
        self.call.needs_live_lease() && over.contains(&reason)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "#{} {}..{} client {} via {:?}: {:?} of {:?} by {:?}: {:?}",
            self.id,
            self.sent,
            self.answered,
            self.client,
            self.via,
            self.call,
            self.resource,
            self.owner,
            self.outcome
        )
    }
}

/// What somebody did to the system meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Something was broken, frozen or slow. Calls without an answer may take
    /// effect for longer; every invariant holds.
    Fault(String),
    /// A failover or a restore: what was answered between the two moments may be
    /// forgotten, and leases that had ended then may be back.
    LeasesForgotten,
    /// The database's clock was set ahead by so many microseconds; negative: back.
    ClockStepped(i64),
    /// For the reader alone.
    Note(String),
}

/// When that was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// From when on.
    pub from: Time,
    /// Until when.
    pub to: Time,
    /// What.
    pub what: What,
}

/// A line of the register's log, in the order of the commits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// What was written to.
    pub resource: String,
    /// The token that was shown.
    pub token: i64,
    /// Which write it was: the number of the call.
    pub op: u64,
}

/// What the checker takes for granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Of the random numbers of the run.
    pub seed: u64,
    /// How long after its caller gave up a call may still take effect, when
    /// nothing is at fault: a server works no longer than its request time-out.
    #[serde(with = "micros")]
    pub settle: Duration,
    /// How long a commit may take, and a word of a stream be under way, when
    /// nothing is at fault. Used only where said.
    #[serde(with = "micros")]
    pub slack: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            seed: 0,
            settle: Duration::from_secs(6),
            slack: Duration::from_millis(500),
        }
    }
}

/// All that is known of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// What is taken for granted.
    pub limits: Limits,
    /// The calls, in the order of their answers.
    pub ops: Vec<Op>,
    /// The faults.
    pub events: Vec<Event>,
    /// The register's log.
    pub register: Vec<Admitted>,
}

impl History {
    /// The latest moment at which a call may take effect that was given up at `t`.
    pub fn settled(&self, t: Time) -> Time {
        let mut by = t.plus(self.limits.settle);
        // Sorted by their beginning: one fault may run into the next.
        let mut faults: Vec<&Event> = self.faults().collect();
        faults.sort_by_key(|event| event.from);
        for fault in faults {
            if fault.to >= t && fault.from <= by {
                by = by.max(fault.to.plus(self.limits.settle));
            }
        }
        by
    }

    /// Whether something was at fault between the two moments, or shortly before.
    pub fn faulty(&self, from: Time, to: Time) -> bool {
        let from = from.minus(self.limits.settle);
        self.faults()
            .any(|event| event.from <= to && event.to >= from)
    }

    /// Whether no failover may have forgotten what this call did.
    pub fn durable(&self, op: &Op) -> bool {
        !self.forgotten(op.sent, op.answered)
    }

    /// Whether leases may have been forgotten, or have come back, meanwhile.
    pub fn forgotten(&self, from: Time, to: Time) -> bool {
        self.events.iter().any(|event| {
            event.what == What::LeasesForgotten && event.from <= to && event.to >= from
        })
    }

    /// Whether the database's clock was set between two moments.
    pub fn stepped(&self, from: Time, to: Time) -> bool {
        self.events.iter().any(|event| {
            matches!(event.what, What::ClockStepped(_)) && event.from <= to && event.to >= from
        })
    }

    /// By how much the database's clock was set back between two moments, all steps
    /// back together.
    pub fn set_back_by(&self, from: Time, to: Time) -> Duration {
        let steps = self.events.iter().map(|event| match event.what {
            What::ClockStepped(by) if by < 0 && event.from <= to && event.to >= from => {
                by.unsigned_abs()
            }
            _ => 0,
        });
        Duration::from_micros(steps.sum())
    }

    /// Whether a lease that this call heard is over by time may be back by a later moment:
    /// the clock was set back since.
    pub fn revives(&self, end: &Op, by: Time) -> bool {
        let by_time = match (&end.call, &end.outcome) {
            (_, Outcome::No(reason)) if reason == "LOCK_EXPIRED" => true,
            // Free, whichever way it came to be.
            (Call::Get | Call::Release { .. }, Outcome::No(_)) => true,
            _ => false,
        };
        by_time && !self.set_back_by(end.sent, by).is_zero()
    }

    fn faults(&self) -> impl Iterator<Item = &Event> {
        self.events
            .iter()
            .filter(|event| !matches!(event.what, What::Note(_)))
    }
}

#[cfg(test)]
mod tests;
