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

#[test]
fn the_first_success_is_one_that_was_sent_after() {
    let op = |sent, answered, outcome| Op {
        id: 0,
        client: 0,
        via: Via::Stub(0),
        resource: String::new(),
        owner: String::new(),
        call: Call::Release { token: 1 },
        sent: Time(sent),
        answered: Time(answered),
        outcome,
    };
    let history = History {
        ops: vec![
            op(1, 6, Outcome::Done),
            op(5, 7, Outcome::Unknown(String::new())),
            op(6, 9, Outcome::Done),
            op(7, 8, Outcome::Done),
        ],
        ..History::default()
    };
    assert_eq!(
        history.first_success_after("Release", Time(5)),
        Some(Time(8))
    );
    assert_eq!(history.first_success_after("Renew", Time(5)), None);
}
