//! `fence.admit` against a model: sessions take turns at random, and every answer
//! is the one that the model knows.
//!
//! Where [`fence_property`](crate::fence_property) lets writers race, here one
//! statement is sent at a time, so what it must answer is certain: also within
//! savepoints, and beside transactions that are not ended.

use std::collections::BTreeMap;

use fencepost_support::postgres::Client;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

use crate::fence_world::{admit, fenced, highest, rejected, state};

const SESSIONS: usize = 3;
const RESOURCES: [&str; 2] = ["a", "b"];
const STEPS: usize = 600;

/// What a session's transaction has admitted, by resource; the last map is that
/// of its innermost savepoint.
type Shown = Vec<BTreeMap<&'static str, i64>>;

#[derive(Default)]
struct Model {
    /// The highest token that a committed transaction has shown.
    committed: BTreeMap<&'static str, i64>,
    /// Of each session; empty outside of a transaction.
    sessions: [Shown; SESSIONS],
    rejections: i64,
}

impl Model {
    /// Whether another session's transaction has the row of this resource.
    fn is_taken(&self, session: usize, resource: &str) -> bool {
        let mut others = self.sessions.iter().enumerate();
        others.any(|(other, shown)| {
            other != session && shown.iter().any(|shown| shown.contains_key(resource))
        })
    }

    /// The highest token that this session sees.
    fn highest(&self, session: usize, resource: &str) -> i64 {
        let shown = self.sessions[session].iter().rev();
        let own = shown.filter_map(|shown| shown.get(resource)).max();
        let committed = self.committed.get(resource);
        own.max(committed).copied().unwrap_or(0)
    }

    /// The SQLSTATE of an admit, which is noted when it succeeds.
    fn admit(&mut self, session: usize, resource: &'static str, token: i64) -> &'static str {
        if !(1..1 << 53).contains(&token) {
            return "22023";
        }
        if self.is_taken(session, resource) {
            return "55P03";
        }
        if token < self.highest(session, resource) {
            self.rejections += 1;
            return "FP409";
        }
        match self.sessions[session].last_mut() {
            Some(shown) => shown.insert(resource, token),
            None => self.committed.insert(resource, token),
        };
        "00000"
    }

    fn commit(&mut self, session: usize) {
        for shown in std::mem::take(&mut self.sessions[session]) {
            self.committed.extend(shown);
        }
    }
}

/// A token near what was seen, or what is none.
fn token(rng: &mut StdRng, near: i64) -> i64 {
    match rng.random_range(0..20) {
        0 => *[i64::MIN, -1, 0, 1 << 53, i64::MAX].choose(rng).unwrap(),
        _ => near + rng.random_range(-2..=2),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_the_one_of_the_model() {
    let seed: u64 = rand::rng().random();
    println!("seed: {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let database = fenced().await;
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..SESSIONS {
        let client = database.client().await;
        // Whether somebody waits is known at once.
        client.run("SET lock_timeout = '10ms'").await;
        clients.push(client);
    }
    let mut model = Model::default();
    for step in 0..STEPS {
        let session = rng.random_range(0..SESSIONS);
        let client = &clients[session];
        let depth = model.sessions[session].len();
        match rng.random_range(0..10) {
            0 | 1 if depth == 0 => {
                client.run("BEGIN").await;
                model.sessions[session].push(BTreeMap::new());
            }
            0 if depth < 4 => {
                client.run(&format!("SAVEPOINT s{depth}")).await;
                model.sessions[session].push(BTreeMap::new());
            }
            1 if depth > 1 => {
                let name = format!("s{}", depth - 1);
                let undo = format!("ROLLBACK TO {name}; RELEASE {name}");
                client.run(&undo).await;
                model.sessions[session].pop();
            }
            2 if depth > 0 => {
                client.run("COMMIT").await;
                model.commit(session);
            }
            3 if depth > 0 => {
                client.run("ROLLBACK").await;
                model.sessions[session].clear();
            }
            _ => {
                let resource = RESOURCES.choose(&mut rng).copied().unwrap();
                let token = token(&mut rng, model.highest(session, resource));
                // A transaction survives what it is refused.
                if depth > 0 {
                    client.run("SAVEPOINT admit").await;
                }
                let answer = state(admit(client, resource, token).await);
                let expected = model.admit(session, resource, token);
                assert_eq!(
                    answer, expected,
                    "step {step}: session {session} shows {token} for {resource}"
                );
                if depth > 0 && answer != "00000" {
                    client.run("ROLLBACK TO admit").await;
                }
                if depth > 0 {
                    client.run("RELEASE admit").await;
                }
            }
        }
    }
    for client in &clients {
        client.run("ROLLBACK").await;
    }
    for resource in RESOURCES {
        let committed = model.committed.get(resource).copied().unwrap_or(0);
        assert_eq!(highest(&clients[0], resource).await, committed);
    }
    assert!(model.rejections > 0);
    assert_eq!(rejected(&clients[0]).await, model.rejections);
}
