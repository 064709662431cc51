//! A process that holds many leases at once, for a test to freeze and wake: takes
//! them from a real server, writes with each, says `ready`, and at the next line of
//! its standard input writes with each once more, sure that it still holds them.
//!
//!   fence_worker SERVER DATABASE METHOD ISOLATION NAME COUNT TTL_MS
//!
//! Each late write is a line `ID TOKEN OUTCOME`; the last line is `done`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a part of a test: its output is read by the test, and a panic fails it"
)]

use std::{env, io, time::Duration};

use fencepost_support::{
    calls,
    fence::{Method, Outcome, Writer},
    server,
};

/// Connections to the database, each with its share of the leases.
const LANES: usize = 8;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [server, database, method, isolation, name, count, ttl] = &arguments[..] else {
        panic!("seven arguments, not {}", arguments.len());
    };
    let method: Method = method.parse().unwrap();
    let count: i32 = count.parse().unwrap();
    let ttl = Duration::from_millis(ttl.parse().unwrap());

    let mut taking = Vec::new();
    for lane in 0..LANES {
        let writer = Writer::connect(database, method, isolation, name).await;
        let writer = writer.unwrap();
        let mut client = server::Client::new(server::channel_at(server.parse().unwrap()).await);
        let name = name.clone();
        taking.push(tokio::spawn(async move {
            let mut leases = Vec::new();
            for id in (0..count).skip(lane).step_by(LANES) {
                let resource = format!("{name}-{id}");
                let lock = calls::granted(&mut client, &resource, "zombie", ttl).await;
                let outcome = writer.write(id, lock.fencing_token, "first").await;
                assert_eq!(outcome, Outcome::Written, "{resource}");
                leases.push((id, lock.fencing_token));
            }
            (writer, leases)
        }));
    }
    let mut lanes = Vec::new();
    for lane in taking {
        lanes.push(lane.await.unwrap());
    }

    println!("ready");
    let mut order = String::new();
    if io::stdin().read_line(&mut order).unwrap() == 0 {
        // Whoever gave the orders has gone.
        return;
    }
    let mut writing = Vec::new();
    for (writer, leases) in lanes {
        writing.push(tokio::spawn(async move {
            for (id, token) in leases {
                let outcome = writer.write_late(id, token, "late").await;
                println!("{id} {token} {outcome:?}");
            }
        }));
    }
    for lane in writing {
        lane.await.unwrap();
    }
    println!("done");
}
