//! Exit codes: what a script should do next.
//!
//! Those from 64 on are of `sysexits.h`, so that they differ from what most
//! commands end with.

use std::{fmt, io};

use fencepost_client::{BuildError, EndpointsError, Error};

use rustix::process::Signal;

use crate::fence::FenceFailure;

/// The table, for `--help`.
pub(crate) const HELP: &str = "\
Exit codes:
   0  done
   1  get: the lock is free
  64  wrong usage, or a value that the server refuses
  69  no server (fence: no database), or no answer in time; it may have happened all the same
  70  a bug
  75  not acquired: another owner has the lock
  76  the lease is over, or never was yours: stop working; fence check: not admitted
  78  wrong configuration, such as a bad endpoint, or no fencing kit in the database
run ends as its command does, with 128 + n when a signal has ended it, and else with
 126  the command cannot be executed
 127  there is no such command";

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// `get` of a free name.
    Free,
    /// `EX_USAGE`.
    Usage,
    /// `EX_UNAVAILABLE`: the server is away.
    Unavailable,
    /// `EX_SOFTWARE`.
    Bug,
    /// `EX_TEMPFAIL`: another owner has the lock.
    NotAcquired,
    /// `EX_PROTOCOL`: the lease is lost, or not the caller's.
    Lost,
    /// `EX_CONFIG`.
    Configuration,
    /// As the command of `run` did, or as it would be told by a shell.
    Command(u8),
}

/// Where our own codes begin, unless `run --own-exit-codes` moves them.
const FIRST_OWN: u8 = 64;

impl Exit {
    /// The command of `run` is there, and cannot be run.
    pub(crate) const NOT_EXECUTABLE: Self = Self::Command(126);
    /// The command of `run` is not there.
    pub(crate) const NOT_FOUND: Self = Self::Command(127);

    /// Ended by this signal.
    pub(crate) fn by_signal(signal: Signal) -> Self {
        Self::by_signal_number(signal.as_raw())
    }

    pub(crate) fn by_signal_number(signal: i32) -> Self {
        Self::Command(u8::try_from(128 + signal).unwrap_or(u8::MAX))
    }

    /// The code, with our own ones moved to begin at `first`.
    pub(crate) fn code(self, first: Option<u8>) -> u8 {
        let own = |code| first.unwrap_or(FIRST_OWN) + (code - FIRST_OWN);
        match self {
            Self::Done => 0,
            Self::Free => 1,
            Self::Usage => own(64),
            Self::Unavailable => own(69),
            Self::Bug => own(70),
            Self::NotAcquired => own(75),
            Self::Lost => own(76),
            Self::Configuration => own(78),
            Self::Command(code) => code,
        }
    }
}

/// Why a subcommand failed. Displays as what follows `fencepost: `.
#[derive(Debug)]
pub(crate) enum Failure {
    /// `--endpoint` cannot be used, or the machine has no room.
    Client(BuildError),
    /// A certificate without its key, or a key without its certificate.
    HalfAnIdentity,
    /// The call failed.
    Call(Error),
    /// A subcommand of `fence` failed.
    Fence(FenceFailure),
    /// The call went through, but its answer could not be printed.
    Output(io::Error),
    /// Another port, another file or another hook is needed.
    Setting(&'static str, io::Error),
    /// The machine refused what every program needs.
    Machine(io::Error),
}

impl Failure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Fence(failure) => failure.exit(),
            Self::Client(BuildError::Endpoints(_) | BuildError::Tls(_))
            | Self::HalfAnIdentity
            | Self::Setting(..)
            | Self::Call(Error::Rejected { .. }) => Exit::Configuration,
            Self::Call(Error::Refused { .. }) => Exit::NotAcquired,
            Self::Call(Error::Lost { .. } | Error::RequestSpent) => Exit::Lost,
            Self::Call(Error::Invalid { .. }) => Exit::Usage,
            Self::Call(Error::Unavailable { .. } | Error::TimedOut) => Exit::Unavailable,
            // What this program does not know of is a bug of one or the other.
            Self::Call(_) | Self::Client(_) | Self::Output(_) | Self::Machine(_) => Exit::Bug,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(BuildError::Endpoints(error)) => {
                let EndpointsError {
                    position, problem, ..
                } = error;
                write!(f, "endpoint {position} of --endpoint: {problem}")
            }
            Self::Client(error) => error.fmt(f),
            Self::HalfAnIdentity => f.write_str("--tls-cert and --tls-key go together"),
            Self::Call(error) => error.fmt(f),
            Self::Fence(failure) => failure.fmt(f),
            Self::Setting(flag, error) => write!(f, "{flag} cannot be used: {error}"),
            Self::Output(error) => write!(f, "cannot print the answer: {error}"),
            Self::Machine(error) => write!(f, "cannot start: {error}"),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}
