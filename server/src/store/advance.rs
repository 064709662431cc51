//! `fencepostd advance-tokens`: the leap by hand, for what no check can see.
//!
//! A data-only restore beside running servers, and a virtual machine that was
//! rolled back with its memory, leave the identity as it was.

use tokio::time::Instant;

use super::{
    Store,
    failure::Failure,
    identity::{Leap, Position},
    statement,
};
use crate::lock::Outage;

/// Where the tokens were and from where on they are drawn now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Advanced {
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// Why the tokens were left where they are.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdvanceError {
    #[error("tokens are at {at} already, and are never lowered")]
    Lower { at: i64 },
    #[error(
        "{asked} is more than a year of tokens ahead of the clock's {by_clock}; --force takes it all the same"
    )]
    Absurd { asked: i64, by_clock: i64 },
    #[error("{asked} leaves too few tokens below 2^53")]
    Exhausted { asked: i64 },
    #[error(transparent)]
    Outage(#[from] Outage),
}

impl From<Failure> for AdvanceError {
    fn from(failure: Failure) -> Self {
        Outage::from(failure).into()
    }
}

/// What a year of leaps by the clock amounts to.
const YEAR: i64 = 366 * 86_400 * TICKS_PER_SECOND;
const TICKS_PER_SECOND: i64 = 1 << 22;
const LAST_TOKEN: i64 = (1 << 53) - 1;

impl Store {
    /// Leaps now, and in any case to `at_least`.
    pub(crate) async fn advance_tokens(
        &self,
        at_least: Option<i64>,
        force: bool,
    ) -> Result<Advanced, AdvanceError> {
        let deadline = Instant::now() + self.0.config.limits.statement;
        if let Some(asked) = at_least {
            let Position {
                token: at,
                by_clock,
            } = self.0.position(deadline).await?;
            if asked <= at {
                return Err(AdvanceError::Lower { at });
            }
            // Room for a year of leaps has to be left, forced or not.
            if asked > LAST_TOKEN - YEAR {
                return Err(AdvanceError::Exhausted { asked });
            }
            if asked > by_clock.saturating_add(YEAR) && !force {
                return Err(AdvanceError::Absurd { asked, by_clock });
            }
        }
        let floor = at_least.unwrap_or(0);
        let answer = self
            .0
            .pool
            .run(&statement::LEAP, &[&floor, &true], deadline)
            .await?;
        let leap = Leap::read(&answer.rows)?;
        Ok(Advanced {
            from: leap.from,
            to: leap.to,
        })
    }
}
