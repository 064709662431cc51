//! The number of a lease.

use super::Invalid;

/// A fencing token: above 0 and, in every token this server hands out, below
/// 2^53, so that languages whose numbers are doubles hold it exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FencingToken(i64);

impl FencingToken {
    /// 0 is proto3's default, so it is a forgotten field and never a wish.
    pub(crate) fn new(value: i64) -> Result<Self, Invalid> {
        if value <= 0 {
            return Err(Invalid::new("must be above 0"));
        }
        Ok(Self(value))
    }

    /// A token as the store gave it back.
    pub(crate) fn stored(value: i64) -> Self {
        Self(value)
    }

    pub(crate) fn get(self) -> i64 {
        self.0
    }
}
