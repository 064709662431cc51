use super::*;

const MS: u64 = 1000;

fn fault(from: u64, to: u64) -> Event {
    Event {
        from: Time(from * MS),
        to: Time(to * MS),
        what: What::Fault("f".to_owned()),
    }
}

#[test]
fn a_call_without_an_answer_settles_after_the_faults() {
    let settled = |events: &[Event]| {
        let history = History {
            events: events.to_vec(),
            ..History::default()
        };
        history.settled(Time(1000 * MS)).0 / MS
    };
    assert_eq!(settled(&[]), 7000);
    assert_eq!(settled(&[fault(0, 999), fault(7001, 8000)]), 7000);
    assert_eq!(settled(&[fault(0, 3000)]), 9000);
    // One runs into the next, in whatever order they were told.
    assert_eq!(settled(&[fault(8000, 20_000), fault(500, 3000)]), 26_000);
}
