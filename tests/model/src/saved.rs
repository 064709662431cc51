//! A history as a file: one JSON object a line.

use std::{io, iter};

use serde::{Deserialize, Serialize};

use crate::history::{Admitted, Event, History, Limits, Op};

impl History {
    /// Writes one JSON object a line.
    ///
    /// # Errors
    ///
    /// When there is no room.
    pub fn save(&self, mut to: impl io::Write) -> io::Result<()> {
        let run = Line::Run(self.limits.clone());
        let ops = self.ops.iter().cloned().map(|op| Line::Op(Box::new(op)));
        let events = self.events.iter().cloned().map(Line::Event);
        let register = self.register.iter().cloned().map(Line::Admitted);
        for line in iter::once(run).chain(ops).chain(events).chain(register) {
            serde_json::to_writer(&mut to, &line)?;
            writeln!(to)?;
        }
        to.flush()
    }

    /// Reads what [`History::save`] wrote.
    ///
    /// # Errors
    ///
    /// When it is something else.
    pub fn load(from: impl io::BufRead) -> io::Result<Self> {
        let mut history = Self::default();
        for line in from.lines() {
            match serde_json::from_str(&line?)? {
                Line::Run(limits) => history.limits = limits,
                Line::Op(op) => history.ops.push(*op),
                Line::Event(event) => history.events.push(event),
                Line::Admitted(admitted) => history.register.push(admitted),
            }
        }
        Ok(history)
    }
}

/// A line of a saved history.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Run(Limits),
    Op(Box<Op>),
    Event(Event),
    Admitted(Admitted),
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::history::{Call, Outcome, Shown, Status, Time, Via, What};

    #[test]
    fn a_history_is_read_as_it_was_written() {
        let op = |call, outcome| Op {
            id: 1,
            client: 2,
            via: Via::Stub(1),
            resource: "r\n\"".to_owned(),
            owner: "o".to_owned(),
            call,
            sent: Time(3),
            answered: Time(4),
            outcome,
            status: None,
        };
        let shown = Shown {
            token: (1 << 53) - 1,
            owner: "o".to_owned(),
            remaining: Duration::from_micros(5),
            ttl: Duration::from_micros(6),
            acquired_at: -7,
            expires_at: 8,
        };
        let request_id = String::new();
        let ttl = Duration::from_secs(1);
        let history = History {
            limits: Limits {
                seed: u64::MAX,
                ..Limits::default()
            },
            ops: vec![
                op(Call::Acquire { request_id, ttl }, Outcome::Lock(shown)),
                op(Call::Get, Outcome::Unknown("lost".to_owned())),
                op(
                    Call::KeepAlive { token: 9 },
                    Outcome::No("LOCK_EXPIRED".to_owned()),
                ),
                op(Call::Release { token: 9 }, Outcome::Done),
            ],
            events: [
                What::LeasesForgotten,
                What::ClockStepped(-1),
                What::Fault("f".to_owned()),
            ]
            .map(|what| Event {
                from: Time(1),
                to: Time(2),
                what,
            })
            .into(),
            register: vec![Admitted {
                resource: "r".to_owned(),
                token: 1,
                op: 2,
            }],
        };
        let mut history = history;
        history.ops[1].status = Some(Status {
            code: "Unavailable".to_owned(),
            reason: None,
        });
        let mut file = Vec::new();
        history.save(&mut file).unwrap();
        assert_eq!(History::load(file.as_slice()).unwrap(), history);
        assert!(History::load(b"{}".as_slice()).is_err());
    }
}
