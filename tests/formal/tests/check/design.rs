//! The design, in worlds that differ in what goes wrong.

use fencepost_formal::{GIVEN_BACK, Past, REPLAYED, TOLD_TWICE, World};

use crate::holds;

#[test]
fn the_design_holds_while_calls_race() {
    let world = World {
        calls: 3,
        requests: 3,
        ..World::SMALL
    };
    holds(world, &[REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_while_rounds_race() {
    let world = World {
        calls: 3,
        requests: 3,
        rounds: true,
        ..World::SMALL
    };
    holds(world, &[REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_while_postgres_crashes_twice() {
    let world = World {
        faults: 2,
        crashes: true,
        ..World::SMALL
    };
    holds(world, &[TOLD_TWICE, REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_when_a_synchronous_standby_is_promoted() {
    let world = World {
        faults: 2,
        crashes: true,
        pasts: &[Past::SynchronousStandby],
        ..World::SMALL
    };
    holds(world, &[TOLD_TWICE, REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_when_two_standbys_are_promoted_in_turn() {
    let world = World {
        faults: 2,
        pasts: &[Past::Standby, Past::Standby],
        ..World::SMALL
    };
    holds(world, &[TOLD_TWICE, REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_when_a_dump_is_restored() {
    let world = World {
        faults: 1,
        pasts: &[Past::Dump],
        ..World::SMALL
    };
    holds(world, &[REPLAYED, GIVEN_BACK]);
}

#[test]
fn the_design_holds_when_a_dump_is_restored_after_a_failover() {
    let world = World {
        faults: 2,
        pasts: &[Past::Standby, Past::Dump],
        ..World::SMALL
    };
    holds(world, &[TOLD_TWICE, REPLAYED, GIVEN_BACK]);
}

#[test]
#[ignore = "a minute: make soak"]
fn the_design_holds_in_larger_worlds() {
    for pasts in [
        &[Past::Dump, Past::Dump],
        &[Past::Dump, Past::Standby],
        &[Past::Standby, Past::SynchronousStandby],
    ] {
        let world = World {
            faults: 2,
            pasts,
            ..World::SMALL
        };
        holds(world, &[REPLAYED, GIVEN_BACK]);
    }
    let three_calls = World {
        calls: 3,
        faults: 1,
        ..World::SMALL
    };
    let crashes = World {
        crashes: true,
        ..three_calls.clone()
    };
    holds(crashes, &[TOLD_TWICE, REPLAYED, GIVEN_BACK]);
    for pasts in [&[Past::Dump], &[Past::Standby]] {
        let world = World {
            pasts,
            ..three_calls.clone()
        };
        holds(world, &[REPLAYED, GIVEN_BACK]);
    }
    let three_replicas = World {
        replicas: 3,
        calls: 3,
        requests: 3,
        ..World::SMALL
    };
    holds(three_replicas, &[REPLAYED, GIVEN_BACK]);
}
