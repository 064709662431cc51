//! What is done in a round, when, and what the checker excuses of it.

use std::time::Duration;

use clap::ValueEnum;
use fencepost_model::history::{Event, Time, What};

use crate::{Mode, node::WayBack};

/// Under load before each fault, and after it.
pub(crate) const STEADY: Duration = Duration::from_secs(3);

/// How far an asynchronous standby may be behind on this machine, busy as it is.
const LAG: Duration = Duration::from_secs(2);

/// What is done in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Fault {
    Kill,
    Switchover,
    CutOffAndKill,
    Freeze,
}

impl Fault {
    pub(crate) fn of_round(number: u16) -> Self {
        match number % 6 {
            0 => Self::Kill,
            2 => Self::CutOffAndKill,
            4 => Self::Freeze,
            _ => Self::Switchover,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Switchover => "switchover",
            Self::CutOffAndKill => "cut off, kill -9",
            Self::Freeze => "freeze",
        }
    }
}

/// When what was done in a round.
pub(crate) struct Moments {
    pub(crate) fault: Fault,
    /// When it began, the cutting off included.
    pub(crate) from: Time,
    /// When the leader was told to go, or killed.
    pub(crate) struck: Time,
    /// When another node committed.
    pub(crate) committed: Time,
    /// When all was served again.
    pub(crate) served: Time,
    /// When the node was back.
    pub(crate) whole: Time,
    pub(crate) way_back: WayBack,
}

impl Moments {
    /// What the checker is told of the round, and so what it excuses.
    ///
    /// A leader that was frozen wakes up as a second primary: without a watchdog it takes
    /// writes until its Patroni has seen what time it is, and, asynchronous, commits them
    /// alone. So both may grant one lock, and each hears of nothing that the other did. What
    /// was under way at any moment from the freeze (and [`LAG`] before it) until the cluster
    /// is whole again therefore proves nothing of a lease: not that it lives (`exclusion`,
    /// `kept`), nor that it is over or never was (`stale`, `ended`, `takeable`, `gets`,
    /// `replays`, `losses`). That is more than the moment of two primaries: it takes in the
    /// [`STEADY`] seconds between the recovery and the thaw, for leases of that time are
    /// unknown to the leader that wakes up.
    ///
    /// Never excused, on whichever primary: a token that is not above all that were shown
    /// before it was asked for, one that is granted twice, and the register. And it ends:
    /// what is sent after `whole` is judged in full, beside leases that were granted after
    /// it or before it all. A lease of the time between stays unproven to its end. The next
    /// round begins [`STEADY`] seconds later at the earliest, and excuses [`LAG`] of these.
    ///
    /// Synchronous, it commits nothing, and calls that it takes are in doubt until then. But
    /// Patroni before 3.0.3 (`overwrites`) may make it the leader again, over the head of the
    /// new one, whose commits are thrown away: then nothing is certain of a lease either.
    pub(crate) fn excuse(&self, mode: Mode, overwrites: bool) -> Event {
        let forgets = match mode {
            Mode::Asynchronous => self.fault != Fault::Switchover,
            Mode::Synchronous => overwrites && self.way_back == WayBack::LedAgain,
        };
        Event {
            from: match mode {
                Mode::Asynchronous if forgets => self.from.minus(LAG),
                _ => self.from,
            },
            to: match self.fault {
                Fault::Freeze => self.whole,
                _ => self.served,
            },
            what: match forgets {
                true => What::LeasesForgotten,
                false => What::Fault(self.fault.name().to_owned()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use fencepost_model::{
        check,
        history::{Call, History, Op, Outcome, Shown, Via},
    };

    use super::*;

    const TTL: Duration = Duration::from_secs(2);

    fn at(seconds: f64) -> Time {
        Time::default().plus(Duration::from_secs_f64(seconds))
    }

    /// Frozen at 10 s, served again at 30 s, whole at 40 s.
    fn freeze() -> Moments {
        Moments {
            fault: Fault::Freeze,
            from: at(10.0),
            struck: at(10.0),
            committed: at(29.0),
            served: at(30.0),
            whole: at(40.0),
            way_back: WayBack::Rewound,
        }
    }

    fn grant(owner: &str, token: i64, sent: f64) -> Op {
        Op {
            id: 0,
            client: 0,
            via: Via::Stub(0),
            resource: "r".to_owned(),
            owner: owner.to_owned(),
            call: Call::Acquire {
                request_id: token.to_string(),
                ttl: TTL,
            },
            sent: at(sent),
            answered: at(sent + 0.01),
            outcome: Outcome::Lock(Shown {
                token,
                owner: owner.to_owned(),
                remaining: TTL,
                ttl: TTL,
                acquired_at: token,
                expires_at: token + 2_000_000,
            }),
            status: None,
        }
    }

    /// The invariants that two grants contradict when the second is sent 0.1 s after the
    /// first.
    fn contradicted(first: f64, tokens: [i64; 2]) -> Vec<&'static str> {
        let history = History {
            ops: vec![
                grant("a", tokens[0], first),
                grant("b", tokens[1], first + 0.1),
            ],
            events: vec![freeze().excuse(Mode::Asynchronous, false)],
            ..History::default()
        };
        let violations = check(&history);
        violations
            .iter()
            .map(|violation| violation.invariant)
            .collect()
    }

    #[test]
    fn two_primaries_are_excused_until_the_cluster_is_whole() {
        assert_eq!(contradicted(37.0, [5, 6]), [""; 0]);
        assert_eq!(contradicted(39.95, [5, 6]), [""; 0]);
        assert!(contradicted(40.1, [5, 6]).contains(&"exclusion"));
        // As well as one `LAG` before the freeze, and not earlier.
        assert!(contradicted(7.5, [5, 6]).contains(&"exclusion"));
        assert_eq!(contradicted(8.5, [5, 6]), [""; 0]);
    }

    #[test]
    fn a_token_that_falls_is_never_excused() {
        assert!(contradicted(37.0, [6, 5]).contains(&"tokens"));
        assert!(contradicted(37.0, [5, 5]).contains(&"tokens"));
    }

    #[test]
    fn no_round_excuses_the_end_of_the_one_before() {
        assert!(STEADY > LAG);
        let kill = Moments {
            fault: Fault::Kill,
            ..freeze()
        };
        assert_eq!(kill.excuse(Mode::Asynchronous, false).to, kill.served);
        for (fault, to) in [
            (Fault::Freeze, kill.whole),
            (Fault::Switchover, kill.served),
        ] {
            let round = Moments { fault, ..freeze() };
            let excuse = round.excuse(Mode::Synchronous, true);
            assert_eq!((excuse.from, excuse.to), (round.from, to));
            assert_eq!(excuse.what, What::Fault(fault.name().to_owned()));
        }
    }

    #[test]
    fn a_leader_that_overwrote_the_next_is_excused_where_patroni_does_that() {
        let round = Moments {
            way_back: WayBack::LedAgain,
            ..freeze()
        };
        let what = |overwrites| round.excuse(Mode::Synchronous, overwrites).what;
        assert_eq!(what(true), What::LeasesForgotten);
        assert_eq!(what(false), What::Fault("freeze".to_owned()));
    }
}
