//! Which of the failures of a call is told when its time is over.

use tonic::Status;

use crate::{
    Error,
    decode::{Origin, origin},
};

/// How much a failure says of what is the matter, from little to much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Telling {
    /// What answered may be none of the servers. Others have failed otherwise, or it
    /// would be final; so the call may succeed when it is repeated.
    Rejection,
    Silence,
    Connection,
    /// Something on the way has answered.
    Stranger,
    Server,
}

/// The last failure of each server.
#[derive(Debug)]
pub(crate) struct Failures(Vec<Option<(Telling, Error)>>);

impl Failures {
    pub(crate) fn of(servers: usize) -> Self {
        Self(vec![None; servers])
    }

    /// `error` is what `status` means: none when there was no answer.
    pub(crate) fn failed(&mut self, server: usize, status: Option<&Status>, error: Error) {
        let telling = match (&error, status.map(origin)) {
            (_, None) => Telling::Silence,
            (Error::Rejected { .. }, _) => Telling::Rejection,
            (_, Some(Origin::Connection)) => Telling::Connection,
            (_, Some(Origin::Stranger)) => Telling::Stranger,
            (_, Some(Origin::Server)) => Telling::Server,
        };
        let last = &mut self.0[server];
        // There may have been little time left: what it has said before says more.
        if telling != Telling::Silence || last.is_none() {
            *last = Some((telling, error));
        }
    }

    pub(crate) fn most_telling(self) -> Error {
        let all = self.0.into_iter().flatten();
        let most = all.max_by_key(|(telling, _)| *telling);
        most.map_or(Error::TimedOut, |(_, error)| error)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::{ErrorDetails, StatusExt as _};

    use super::*;

    fn unavailable(detail: &str) -> Error {
        Error::Unavailable {
            detail: detail.to_owned(),
        }
    }

    #[test]
    fn an_answer_says_more_than_none_in_whatever_order() {
        let details = ErrorDetails::with_error_info("STORE_UNAVAILABLE", "fencepost", []);
        let server = Status::with_error_details(Code::Unavailable, "constant", details);
        let stranger = Status::unavailable("no healthy upstream");
        let connection = Status::from_error("refused".into());
        let rejection = Error::Rejected {
            detail: "404".to_owned(),
        };
        let told = [
            (Some(&stranger), rejection),
            (None, Error::TimedOut),
            (Some(&connection), unavailable("refused")),
            (Some(&stranger), unavailable("no healthy upstream")),
            (Some(&server), unavailable("the store")),
        ];
        for less in 0..told.len() {
            for more in less + 1..told.len() {
                for turn in 0..2 {
                    let mut failures = Failures::of(2);
                    for (server, which) in [(turn, less), (1 - turn, more)] {
                        let (status, error) = &told[which];
                        failures.failed(server, *status, error.clone());
                    }
                    assert_eq!(failures.most_telling(), told[more].1);
                }
            }
        }
    }

    #[test]
    fn the_last_failure_of_a_server_counts_unless_it_was_silent() {
        let mut failures = Failures::of(1);
        failures.failed(0, None, Error::TimedOut);
        let answer = Status::unavailable("");
        failures.failed(0, Some(&answer), unavailable("before"));
        let refused = Status::from_error("refused".into());
        failures.failed(0, Some(&refused), unavailable("refused"));
        failures.failed(0, None, Error::TimedOut);
        assert_eq!(failures.most_telling(), unavailable("refused"));
        assert_eq!(Failures::of(1).most_telling(), Error::TimedOut);
    }
}
