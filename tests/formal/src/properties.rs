//! What must hold in every state, and what must happen in some.

use stateright::Property;

use crate::{World, state::State};

/// Of two leases that anybody was told of, the one that was granted later has the
/// larger token.
pub const TOKENS_RISE: &str = "tokens rise";
/// A grant asked for after another was answered has the larger token.
pub const TOKENS_RISE_FOR_CALLERS: &str = "tokens rise for callers";
/// No two leases that anybody was told of have the same token.
pub const NO_TOKEN_TWICE: &str = "no token twice";
/// A destination that has admitted a newer lease admits no older one.
pub const THE_FENCE_HOLDS: &str = "the fence holds";
/// A lease that its holder was told of, by the grant or by a replay, is not given back.
pub const NOT_GIVEN_BACK: &str = "a lease that was told is not given back";

/// Two grants were told, on two servers: the safety above is not idle talk.
pub const TOLD_TWICE: &str = "grants are told before and after a failover";
/// A replay was told.
pub const REPLAYED: &str = "a retry is handed the same lease";
/// An orphan was given back.
pub const GIVEN_BACK: &str = "a lease that nobody knows is given back";

pub(crate) fn all() -> Vec<Property<World>> {
    vec![
        Property::always(TOKENS_RISE, |_, s| {
            pairs(s, |earlier, later| earlier < later)
        }),
        Property::always(TOKENS_RISE_FOR_CALLERS, |_, s: &State| {
            let mut told = s.ghost.grants.iter().filter(|grant| grant.is_told);
            told.all(|grant| grant.token > grant.floor)
        }),
        Property::always(NO_TOKEN_TWICE, |_, s| {
            pairs(s, |earlier, later| earlier != later)
        }),
        Property::always(THE_FENCE_HOLDS, |_, s: &State| !s.ghost.was_overrun),
        Property::always(NOT_GIVEN_BACK, |_, s: &State| !s.ghost.was_robbed),
        Property::sometimes(TOLD_TWICE, |_, s: &State| {
            let mut told = s.ghost.grants.iter().filter(|grant| grant.is_told);
            let first = told.next();
            first.is_some_and(|first| told.any(|grant| grant.server != first.server))
        }),
        Property::sometimes(REPLAYED, |_, s: &State| s.ghost.was_replayed),
        Property::sometimes(GIVEN_BACK, |_, s: &State| s.ghost.was_given_back),
    ]
}

/// Whether `holds` of the tokens of any two leases that were told, in the order of
/// their commits.
fn pairs(s: &State, holds: impl Fn(u16, u16) -> bool) -> bool {
    let told = || s.ghost.grants.iter().filter(|grant| grant.is_told);
    told().enumerate().all(|(n, earlier)| {
        told()
            .skip(n + 1)
            .all(|later| holds(earlier.token, later.token))
    })
}
