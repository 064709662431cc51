//! Exit codes: what a script should do next.
//!
//! Those from 64 on are of `sysexits.h`, so that they differ from what most
//! commands end with.

use std::{fmt, io, process::ExitCode};

use fencepost_client::{BuildError, Error};

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
  78  wrong configuration, such as a bad endpoint, or no fencing kit in the database";

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Done.
    Done = 0,
    /// `get` of a free name.
    Free = 1,
    /// `EX_USAGE`.
    Usage = 64,
    /// `EX_UNAVAILABLE`: the server is away.
    Unavailable = 69,
    /// `EX_SOFTWARE`.
    Bug = 70,
    /// `EX_TEMPFAIL`: another owner has the lock.
    NotAcquired = 75,
    /// `EX_PROTOCOL`: the lease is lost, or not the caller's.
    Lost = 76,
    /// `EX_CONFIG`.
    Configuration = 78,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a subcommand failed. Displays as what follows `fencepost: `.
#[derive(Debug)]
pub(crate) enum Failure {
    /// `--endpoint` cannot be used, or the machine has no room.
    Client(BuildError),
    /// The call failed.
    Call(Error),
    /// A subcommand of `fence` failed.
    Fence(FenceFailure),
    /// The call went through, but its answer could not be printed.
    Output(io::Error),
    /// The machine refused what every program needs.
    Machine(io::Error),
}

impl Failure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Fence(failure) => failure.exit(),
            Self::Client(BuildError::Endpoints(_)) | Self::Call(Error::Rejected { .. }) => {
                Exit::Configuration
            }
            Self::Call(Error::Refused { .. }) => Exit::NotAcquired,
            Self::Call(Error::Lost { .. } | Error::RequestSpent) => Exit::Lost,
            Self::Call(Error::Invalid { .. }) => Exit::Usage,
            Self::Call(Error::Unavailable { .. } | Error::TimedOut) => Exit::Unavailable,
            Self::Call(Error::Internal { .. })
            | Self::Client(_)
            | Self::Output(_)
            | Self::Machine(_) => Exit::Bug,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(error) => error.fmt(f),
            Self::Call(error) => error.fmt(f),
            Self::Fence(failure) => failure.fmt(f),
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
