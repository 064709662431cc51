//! What the design would be without one of its rules, and how that ends.

use fencepost_formal::{
    Mutation, NO_TOKEN_TWICE, NOT_GIVEN_BACK, Past, THE_FENCE_HOLDS, TOKENS_RISE,
    TOKENS_RISE_FOR_CALLERS, World,
};

use crate::{breaks, holds};

#[test]
fn a_token_drawn_before_the_row_lock_goes_backwards() {
    let world = World {
        mutations: &[Mutation::TokenBeforeLock, Mutation::NoRowCheck],
        requests: 3,
        ..World::SMALL
    };
    breaks(&world, &[TOKENS_RISE, THE_FENCE_HOLDS]);
}

#[test]
fn the_rows_check_alone_would_stop_a_token_drawn_before_the_lock() {
    let world = World {
        mutations: &[Mutation::TokenBeforeLock],
        calls: 3,
        requests: 3,
        ..World::SMALL
    };
    holds(world, &[]);
}

#[test]
fn a_release_that_deletes_the_row_lets_tokens_go_backwards() {
    let world = World {
        mutations: &[Mutation::ReleaseDeletesRow],
        ..World::SMALL
    };
    breaks(&world, &[TOKENS_RISE, THE_FENCE_HOLDS]);
}

#[test]
fn a_purge_that_does_not_wait_lets_tokens_go_backwards() {
    let world = World {
        mutations: &[Mutation::PurgeAtOnce],
        ..World::SMALL
    };
    breaks(&world, &[TOKENS_RISE, THE_FENCE_HOLDS]);
}

#[test]
fn a_guard_per_connection_misses_a_failover_behind_a_pooler() {
    let world = World {
        mutations: &[Mutation::GuardPerConnection],
        pooler: true,
        faults: 1,
        pasts: &[Past::Standby],
        ..World::SMALL
    };
    breaks(
        &world,
        &[
            TOKENS_RISE,
            TOKENS_RISE_FOR_CALLERS,
            NO_TOKEN_TWICE,
            THE_FENCE_HOLDS,
        ],
    );
}

#[test]
fn a_guard_per_connection_misses_a_restore_even_without_a_pooler() {
    let world = World {
        mutations: &[Mutation::GuardPerConnection],
        pooler: false,
        faults: 1,
        pasts: &[Past::Dump],
        ..World::SMALL
    };
    breaks(&world, &[TOKENS_RISE_FOR_CALLERS, NO_TOKEN_TWICE]);
}

#[test]
fn a_relative_leap_gives_two_standbys_the_same_token() {
    let world = World {
        mutations: &[Mutation::RelativeLeap],
        skew: 0,
        faults: 2,
        pasts: &[Past::Standby, Past::Standby],
        ..World::SMALL
    };
    breaks(&world, &[NO_TOKEN_TWICE]);
}

#[test]
fn a_relative_leap_gives_two_restores_the_same_token() {
    let world = World {
        mutations: &[Mutation::RelativeLeap],
        skew: 0,
        faults: 2,
        pasts: &[Past::Dump, Past::Dump],
        ..World::SMALL
    };
    breaks(&world, &[NO_TOKEN_TWICE]);
}

#[test]
fn a_give_back_by_token_takes_the_lease_that_a_replay_was_handed() {
    let world = World {
        mutations: &[Mutation::GiveBackByToken],
        ..World::SMALL
    };
    breaks(&world, &[NOT_GIVEN_BACK]);
}

#[test]
fn a_give_back_by_the_last_attempt_takes_a_lease_whose_holder_was_told() {
    let world = World {
        mutations: &[Mutation::GiveBackByLastAttempt],
        ..World::SMALL
    };
    breaks(&world, &[NOT_GIVEN_BACK]);
}

#[test]
fn an_answer_before_the_flush_gives_a_token_twice() {
    let world = World {
        mutations: &[Mutation::AnswerBeforeFlush],
        faults: 1,
        crashes: true,
        ..World::SMALL
    };
    breaks(&world, &[NO_TOKEN_TWICE, NOT_GIVEN_BACK]);
}

#[test]
fn the_end_of_a_dump_sets_tokens_back_unless_the_last_leap_is_remembered() {
    let world = World {
        mutations: &[Mutation::NoFirstToken],
        faults: 1,
        pasts: &[Past::Dump],
        ..World::SMALL
    };
    breaks(&world, &[NO_TOKEN_TWICE]);
}

#[test]
fn two_failovers_need_no_belt() {
    let world = World {
        mutations: &[
            Mutation::NoRowCheck,
            Mutation::NoFirstToken,
            Mutation::NoHighest,
        ],
        faults: 2,
        pasts: &[Past::Standby, Past::Standby],
        ..World::SMALL
    };
    holds(world, &[]);
}
