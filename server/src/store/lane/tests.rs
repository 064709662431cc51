//! What goes into a round, and what becomes of the calls that wait.

use std::{collections::BTreeMap, time::Duration};

use tokio::{runtime::Builder, time::Instant};

use super::{Lane, Round};
use crate::{
    caller::Caller,
    lock::{
        AcquireError, FencingToken, Labels, Outage, Owner, ReleaseError, RequestId, Resource,
        TtlLimits,
    },
    metrics::Metrics,
    store::{
        Acquire, Limits, Release, Store, StoreConfig, SynchronousCommit,
        call::{Ask, Call, Told, Waiting},
        get::Get,
    },
};

const MINUTE: Duration = Duration::from_secs(60);

/// A store that nobody answers.
fn store() -> Store {
    let config = StoreConfig {
        pgbouncer: false,
        pool_size: 1,
        max_in_flight: 10_000,
        synchronous_commit: SynchronousCommit::On,
        allow_fsync_off: false,
        purge_retention: MINUTE,
        limits: Limits::within(MINUTE),
    };
    let url = "postgresql://nobody@127.0.0.1:1/none".parse().unwrap();
    Store::new(&url, config, Metrics::new(0).store).unwrap()
}

struct Stage {
    store: Store,
    lane: Lane,
}

impl Stage {
    fn new() -> Self {
        Self {
            store: store(),
            lane: Lane::new(Metrics::new(0).store.lanes.calls),
        }
    }

    /// Queues a call whose caller waits for so long.
    fn push<Q: Ask>(&self, ask: Q, kind: fn(Waiting<Q>) -> Call, patience: Duration) -> Told<Q> {
        let admitted = self.store.admit(ask, None, Instant::now() + patience);
        let Ok((waiting, told)) = admitted else {
            panic!("there is no room");
        };
        self.lane.push(kind(waiting));
        told
    }

    fn acquire(&self, resource: &str, owner: &str) -> Told<Acquire> {
        self.push(acquire(resource, owner), Call::Acquire, MINUTE)
    }

    fn release(&self, resource: &str, token: i64) -> Told<Release> {
        self.push(release(resource, token), Call::Release, MINUTE)
    }

    fn get(&self, resource: &str) -> Told<Get> {
        self.push(Get::new(named(resource)), Call::Get, MINUTE)
    }

    fn next_round(&self) -> Vec<String> {
        told(&self.lane.take_round())
    }
}

fn named(resource: &str) -> Resource {
    Resource::new(resource.to_owned()).unwrap()
}

fn acquire(resource: &str, owner: &str) -> Acquire {
    let any = TtlLimits {
        min: Duration::ZERO,
        max: MINUTE,
    };
    Acquire {
        resource: named(resource),
        owner: Owner::stored(owner.to_owned()),
        ttl: any.check(MINUTE).unwrap(),
        labels: Labels::stored(BTreeMap::new()),
        request_id: RequestId::new(String::new()).unwrap(),
        caller: Caller::default(),
    }
}

fn release(resource: &str, token: i64) -> Release {
    Release {
        resource: named(resource),
        owner: Owner::stored("a".to_owned()),
        token: FencingToken::stored(token),
        caller: Caller::default(),
    }
}

/// What is in a round, a line for each call that goes to the database.
fn told(round: &Round) -> Vec<String> {
    let acquires = round.acquires.iter().map(|crowd| {
        let owners = std::iter::once(&crowd.first).chain(&crowd.others);
        let owners: Vec<_> = owners.map(|call| call.ask.owner.as_str()).collect();
        let resource = crowd.first.ask.resource.as_str();
        format!("acquire {resource} {}", owners.join(" "))
    });
    let releases = round.releases.iter().map(|call| {
        let Release {
            resource, token, ..
        } = &call.ask;
        format!("release {} {}", resource.as_str(), token.get())
    });
    let gets = round.gets.iter();
    let gets = gets.map(|call| format!("get {}", call.ask.resource().as_str()));
    acquires.chain(releases).chain(gets).collect()
}

fn answer<Q: Ask>(told: Told<Q>) -> Result<Q::Answer, Q::Error> {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(told.answer(Instant::now()))
}

#[test]
fn a_resource_has_one_call_in_a_round_and_the_others_keep_their_order() {
    let stage = Stage::new();
    let _first = (stage.release("r", 1), stage.release("r", 2));
    let _then = (stage.acquire("r", "b"), stage.release("r", 3));
    let _beside = (stage.acquire("s", "b"), stage.release("t", 4));
    assert_eq!(
        stage.next_round(),
        ["acquire s b", "release r 1", "release t 4"]
    );
    assert_eq!(stage.next_round(), ["release r 2"]);
    assert_eq!(stage.next_round(), ["release r 3"]);
    assert_eq!(stage.next_round(), ["acquire r b"]);
    assert!(stage.lane.take_round().is_empty());
}

#[test]
fn acquires_of_other_owners_join_the_first_and_its_own_do_not() {
    let stage = Stage::new();
    let _crowd = ["a", "b", "a", "c", "b"].map(|owner| stage.acquire("r", owner));
    let _beside = stage.acquire("s", "b");
    assert_eq!(stage.next_round(), ["acquire r a b c b", "acquire s b"]);
    assert_eq!(stage.next_round(), ["acquire r a"]);
    assert!(stage.lane.take_round().is_empty());
}

#[test]
fn gets_of_one_name_go_together() {
    let stage = Stage::new();
    let _gets = ["r", "s", "r", "r"].map(|name| stage.get(name));
    assert_eq!(stage.next_round(), ["get r", "get s", "get r", "get r"]);
    assert!(stage.lane.take_round().is_empty());
}

#[test]
fn what_nobody_waits_for_is_not_begun_but_for_a_release() {
    let stage = Stage::new();
    drop((stage.acquire("a", "a"), stage.get("g")));
    drop(stage.release("r", 1));
    assert_eq!(stage.next_round(), ["release r 1"]);

    let late = (
        stage.push(acquire("a", "a"), Call::Acquire, Duration::ZERO),
        stage.push(release("r", 1), Call::Release, Duration::ZERO),
    );
    assert!(stage.lane.take_round().is_empty());
    let (acquired, released) = (answer(late.0), answer(late.1));
    assert!(matches!(
        acquired.err(),
        Some(AcquireError::Outage(Outage::Deadline))
    ));
    assert!(matches!(
        released,
        Err(ReleaseError::Outage(Outage::Deadline))
    ));
}

#[test]
fn a_round_has_at_most_five_hundred_rows_and_any_crowd() {
    let stage = Stage::new();
    let name = |n: i64| format!("r {n}");
    let _acquires: Vec<_> = (0..499).map(|n| stage.acquire(&name(n), "a")).collect();
    let _hot = stage.acquire("hot", "a");
    let _next = stage.acquire("name", "a");
    let _crowd = stage.acquire("hot", "b");
    let round = stage.next_round();
    assert_eq!(round.len(), 500);
    assert_eq!(round[499], "acquire hot a b");
    assert_eq!(stage.next_round(), ["acquire name a"]);
}

#[test]
fn releases_go_before_acquires_and_leave_them_half_of_a_round() {
    let stage = Stage::new();
    let name = |n: i64| format!("r {n}");
    let _acquires: Vec<_> = (0..500).map(|n| stage.acquire(&name(n), "a")).collect();
    let _release = stage.release("other", 1);
    let round = stage.next_round();
    assert_eq!((round.len(), round[499].as_str()), (500, "release other 1"));
    assert_eq!(stage.next_round(), ["acquire r 499 a"]);

    let _releases: Vec<_> = (0..600).map(|n| stage.release(&name(n), n)).collect();
    let _acquires = ["a", "b"].map(|name| stage.acquire(name, "a"));
    let round = stage.next_round();
    assert_eq!((round.len(), round[1].as_str()), (500, "acquire b a"));
    let round = stage.next_round();
    assert_eq!((round.len(), round[0].as_str()), (102, "release r 498 498"));
}

#[test]
fn what_is_put_back_comes_first_and_in_its_order() {
    let stage = Stage::new();
    let _first = ["a", "b", "c"].map(|owner| stage.acquire("r", owner));
    let crowd = stage.lane.take_round().acquires.remove(0);
    let _later = stage.acquire("r", "d");
    stage
        .lane
        .put_back(crowd.others.into_iter().map(Call::Acquire).collect());
    assert_eq!(stage.next_round(), ["acquire r b c d"]);
}

#[test]
fn a_task_is_started_when_none_is_there() {
    let stage = Stage::new();
    assert!(!stage.lane.starts(), "there is nothing to do");
    let _told = stage.release("r", 1);
    assert!(stage.lane.starts());
    let left = stage.release("r", 2);
    assert!(!stage.lane.starts());
    assert!(stage.lane.goes_on());

    // A panic answers what waits, and is not the end of the lane.
    stage.lane.abandon(|| Outage::Draining);
    assert!(matches!(
        answer(left),
        Err(ReleaseError::Outage(Outage::Draining))
    ));
    let _told = stage.release("r", 1);
    assert!(stage.lane.starts());
    stage.lane.fail_all(|| Outage::Draining);
    assert!(!stage.lane.goes_on());
    let _told = stage.release("r", 1);
    assert!(stage.lane.starts());
}

#[test]
fn a_panic_in_a_round_answers_its_calls_and_ends_nothing_else() {
    // Without timers, which every round needs.
    let bare = Builder::new_current_thread().build().unwrap();
    let inner = store().0;
    for _ in 0..2 {
        let deadline = Instant::now() + MINUTE;
        let store = Store(std::sync::Arc::clone(&inner));
        let (waiting, told) = store.admit(release("r", 1), None, deadline).ok().unwrap();
        {
            let _entered = bare.enter();
            inner.enqueue(Call::Release(waiting));
        }
        inner.tracker.close();
        bare.block_on(inner.tracker.wait());
        inner.tracker.reopen();
        assert!(matches!(
            answer(told),
            Err(ReleaseError::Outage(Outage::Internal(_)))
        ));
    }
}
