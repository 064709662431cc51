use std::time::Duration;

use tokio::{sync::watch, time::Instant};

use super::{Attempt, Id, Opened, Schedule, State};
use crate::{
    keep_alive::stage::{CONFIG, keep, store},
    lock::Loss,
    metrics::Metrics,
};

/// A stream that is to hear something within so many seconds.
fn open(schedule: &mut Schedule, id: Id, seconds: u64) -> watch::Receiver<State> {
    let (out, told) = watch::channel(State::Opening);
    let mut keep = keep();
    keep.max_duration = Some(Duration::from_secs(seconds));
    schedule.open(Opened { id, keep, out });
    told
}

#[tokio::test]
async fn the_most_urgent_comes_first_whatever_becomes_of_it() {
    let mut schedule = Schedule::new(store(), CONFIG, Metrics::new(0).streams);
    let waiting = |schedule: &Schedule| -> Vec<Id> {
        let ready = schedule.ready.iter();
        ready.map(|(_, id)| *id).collect()
    };
    let _told = [(1, 3), (2, 1), (3, 2)].map(|(id, left)| open(&mut schedule, id, left));
    assert_eq!(waiting(&schedule), [2, 3, 1]);
    // A late answer brings something.
    schedule.with(2, |stream| stream.trusted_until += Duration::from_secs(5));
    assert_eq!(waiting(&schedule), [3, 1, 2]);
    schedule.close(1, None);
    assert_eq!(waiting(&schedule), [3, 2]);
    schedule.close(2, None);
    schedule.close(3, None);
    assert!(schedule.ready.is_empty() && schedule.events.is_empty());
}

/// A renewal that was sent again elsewhere hears of the loss as well.
#[tokio::test]
async fn a_loss_is_counted_once() {
    let metrics = Metrics::new(0);
    let mut schedule = Schedule::new(store(), CONFIG, metrics.streams.clone());
    let _told = open(&mut schedule, 1, 5);
    for number in 1..=3 {
        let lost = Err(Loss::Expired.into());
        schedule.answered(Attempt { id: 1, number }, Instant::now(), lost);
    }
    let told = "fencepost_leases_lost_total{reason=\"LOCK_EXPIRED\",via=\"stream\"} 1\n";
    assert!(metrics.text().contains(told), "{}", metrics.text());
}

/// One task serves all streams, so what it does for one must not take
/// longer the more of them wait.
#[tokio::test]
async fn a_crowd_that_waits_delays_no_event() {
    const CROWD: u64 = 20_000;
    let mut schedule = Schedule::new(store(), CONFIG, Metrics::new(0).streams);
    let began = Instant::now();
    let mut told = Vec::new();
    for id in 0..CROWD {
        told.push(open(&mut schedule, id, 5));
        // The first one goes, and its answer does not come.
        schedule.send_batch();
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
}
