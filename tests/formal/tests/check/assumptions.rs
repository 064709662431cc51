//! What the rule rests on: without it, it is broken.

use fencepost_formal::{Mutation, NO_TOKEN_TWICE, NOT_GIVEN_BACK, Past, World};

use crate::{breaks, holds};

/// Two standbys whose clocks disagree by all the time that there is between leaps.
const WRONG_CLOCKS: World = World {
    faults: 2,
    pasts: &[Past::Standby, Past::Standby],
    apart: 1,
    skew: 1,
    ..World::SMALL
};

#[test]
fn clocks_must_disagree_by_less_than_the_time_between_two_leaps() {
    breaks(&WRONG_CLOCKS, &[NO_TOKEN_TWICE]);
}

#[test]
fn a_single_replica_stands_wrong_clocks_by_what_it_has_seen() {
    let one = World {
        replicas: 1,
        ..WRONG_CLOCKS
    };
    holds(one.clone(), &[]);
    let forgetful = World {
        mutations: &[Mutation::NoHighest],
        ..one
    };
    breaks(&forgetful, &[NO_TOKEN_TWICE]);
}

#[test]
fn a_lease_is_not_promised_through_an_asynchronous_failover() {
    let world = World {
        mutations: &[Mutation::LeasesPromisedThroughFailover],
        faults: 1,
        pasts: &[Past::Standby],
        ..World::SMALL
    };
    breaks(&world, &[NOT_GIVEN_BACK]);
}
