//! The agent of `tests/polyglot/README.md` for Rust.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a part of a test: its output is read by the test, and a panic fails it"
)]

use std::{
    collections::HashMap,
    io::BufRead as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use fencepost_client::{AcquireOptions, Client, Error, Guard};
use fencepost_proto::v1::{self, lock_service_client::LockServiceClient};
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, oneshot, watch},
    time::timeout,
};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

#[tokio::main]
async fn main() {
    let mut agent = None;
    for line in std::io::stdin().lock().lines() {
        let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if asked["do"] == "connect" {
            agent = Some(Agent::connect(&asked).await);
            println!("{{}}");
            continue;
        }
        let agent = agent.as_mut().expect("connect comes first");
        println!("{}", agent.carry_out(&asked).await);
    }
}

struct Agent {
    client: Client,
    stub: LockServiceClient<Channel>,
    guards: HashMap<String, Guard>,
    many: HashMap<String, Vec<Guard>>,
    works: HashMap<String, Work>,
}

/// Work under a lock, and how it is told to end.
struct Work {
    stop: Arc<Notify>,
    state: watch::Receiver<&'static str>,
}

fn text<'a>(asked: &'a Value, field: &str) -> &'a str {
    asked[field].as_str().unwrap_or_default()
}

fn millis(asked: &Value, field: &str) -> Duration {
    Duration::from_millis(asked[field].as_u64().unwrap_or(0))
}

impl Agent {
    async fn connect(asked: &Value) -> Self {
        let endpoints = asked["endpoints"].as_array().unwrap().iter();
        let urls: Vec<String> = endpoints
            .map(|endpoint| format!("http://{}", endpoint.as_str().unwrap()))
            .collect();
        let channel = Channel::from_shared(urls[0].clone())
            .unwrap()
            .connect_lazy();
        Self {
            client: Client::connect_lazy(urls.join(",")).unwrap(),
            stub: LockServiceClient::new(channel),
            guards: HashMap::new(),
            many: HashMap::new(),
            works: HashMap::new(),
        }
    }

    async fn carry_out(&mut self, asked: &Value) -> Value {
        let name = text(asked, "as").to_owned();
        match text(asked, "do") {
            "acquire" => {
                let mut options = AcquireOptions::default()
                    .ttl(millis(asked, "ttl_ms"))
                    .wait(millis(asked, "wait_ms"));
                if let Some(owner) = asked["owner"].as_str() {
                    options = options.owner(owner);
                }
                if let Some(id) = asked["request_id"].as_str() {
                    options = options.request_id(id);
                }
                let resource = text(asked, "resource");
                match self.client.acquire_with_retry(resource, options).await {
                    Ok(guard) => {
                        let answer = json!({
                            "outcome": "acquired",
                            "token": guard.fencing_token(),
                            "owner": guard.owner(),
                        });
                        self.guards.insert(name, guard);
                        answer
                    }
                    Err(error) => failure(&error),
                }
            }
            "acquire_many" => {
                let mut taking = tokio::task::JoinSet::new();
                for number in 0..asked["count"].as_u64().unwrap() {
                    let client = self.client.clone();
                    let resource = format!("{}-{number}", text(asked, "resource"));
                    let options = AcquireOptions::default().ttl(millis(asked, "ttl_ms"));
                    taking.spawn(async move { client.acquire(&resource, options).await });
                }
                let guards: Vec<_> = taking.join_all().await.into_iter().flatten().collect();
                let acquired = guards.len();
                self.many.insert(name, guards);
                json!({"acquired": acquired})
            }
            "check" => {
                let guard = &self.guards[&name];
                match guard.ensure_held() {
                    Ok(()) => json!({
                        "held": true,
                        "remaining_ms": u64::try_from(guard.remaining().as_millis()).unwrap(),
                    }),
                    Err(error) => {
                        json!({"held": false, "remaining_ms": 0, "reason": failure(&error)["reason"]})
                    }
                }
            }
            "check_many" => {
                let held = self.many[&name].iter().filter(|guard| guard.is_held());
                json!({"held": held.count()})
            }
            "wait_lost" => {
                let lost = self.guards[&name].lost();
                match timeout(millis(asked, "within_ms"), lost).await {
                    Ok(reason) => json!({"lost": true, "reason": reason.as_str()}),
                    Err(_elapsed) => json!({"lost": false}),
                }
            }
            "release" => match self.guards.remove(&name).unwrap().release().await {
                Ok(()) => json!({"outcome": "released"}),
                Err(error) => failure(&error),
            },
            "release_many" => {
                let mut released = 0;
                for guard in self.many.remove(&name).unwrap() {
                    released += u64::from(guard.release().await.is_ok());
                }
                json!({"released": released})
            }
            "work" => self.work(name, asked).await,
            "work_state" => {
                let mut state = self.works[&name].state.clone();
                let ended = state.wait_for(|state| *state != "running");
                let ended = timeout(millis(asked, "within_ms"), ended).await;
                json!({"state": ended.map_or("running", |state| *state.unwrap())})
            }
            "stop_work" => {
                let mut work = self.works.remove(&name).unwrap();
                work.stop.notify_one();
                let ended = work.state.wait_for(|state| *state != "running").await;
                json!({"state": *ended.unwrap()})
            }
            "call" => self.call(asked).await,
            other => json!({"failed": format!("what is {other}?")}),
        }
    }

    async fn work(&mut self, name: String, asked: &Value) -> Value {
        let (client, resource) = (self.client.clone(), text(asked, "resource").to_owned());
        let options = AcquireOptions::default().ttl(millis(asked, "ttl_ms"));
        let stop = Arc::new(Notify::new());
        let (ends, state) = watch::channel("running");
        let (starts, started) = oneshot::channel();
        let stopped = Arc::clone(&stop);
        tokio::spawn(async move {
            // The work is dropped when the lease is lost, and does not get there.
            let by_itself = AtomicBool::new(false);
            let ended = &by_itself;
            let _outcome = client
                .with_lock(&resource, options, async move |guard| {
                    starts.send(guard.fencing_token()).unwrap();
                    stopped.notified().await;
                    ended.store(true, Ordering::Relaxed);
                })
                .await;
            let lost = !by_itself.into_inner();
            ends.send_replace(if lost { "stopped" } else { "ended" });
        });
        self.works.insert(name, Work { stop, state });
        json!({"token": started.await.unwrap()})
    }

    async fn call(&mut self, asked: &Value) -> Value {
        let request = &asked["request"];
        let (resource, owner) = (text(request, "resource"), text(request, "owner"));
        let (resource, owner) = (resource.to_owned(), owner.to_owned());
        let token = &request["fencing_token"];
        let fencing_token = token
            .as_i64()
            .or_else(|| token.as_str()?.parse().ok())
            .unwrap_or(0);
        let ttl = request["ttl"].as_str().map(|ttl| {
            let seconds: f64 = ttl.trim_end_matches('s').parse().unwrap();
            prost_types::Duration::try_from(Duration::from_secs_f64(seconds)).unwrap()
        });
        let answer = match text(asked, "rpc") {
            "Acquire" => {
                let request_id = text(request, "request_id").to_owned();
                let asked = v1::AcquireRequest {
                    resource,
                    owner,
                    ttl,
                    request_id,
                    ..Default::default()
                };
                let answer = self
                    .stub
                    .acquire(asked)
                    .await
                    .map(tonic::Response::into_inner);
                answer.map(|it| json!({"acquired": it.acquired, "lock": lock(it.lock)}))
            }
            "Renew" => {
                let asked = v1::RenewRequest {
                    resource,
                    owner,
                    fencing_token,
                    ttl,
                };
                let answer = self
                    .stub
                    .renew(asked)
                    .await
                    .map(tonic::Response::into_inner);
                answer.map(|it| json!({"lock": lock(it.lock)}))
            }
            "Release" => {
                let asked = v1::ReleaseRequest {
                    resource,
                    owner,
                    fencing_token,
                };
                self.stub.release(asked).await.map(|_| json!({}))
            }
            "Get" => {
                let answer = self.stub.get(v1::GetRequest { resource }).await;
                answer.map(|it| json!({"lock": lock(it.into_inner().lock)}))
            }
            other => panic!("what is {other}?"),
        };
        match answer {
            Ok(response) => json!({"code": "OK", "response": response}),
            Err(status) => refused(&status),
        }
    }
}

fn failure(error: &Error) -> Value {
    match error {
        Error::Refused { holder } => json!({
            "outcome": "refused",
            "holder": holder.owner,
            "remaining_ms": u64::try_from(holder.remaining.as_millis()).unwrap(),
        }),
        Error::Lost { reason } => json!({"outcome": "lost", "reason": reason.as_str()}),
        Error::RequestSpent => json!({"outcome": "spent"}),
        Error::Invalid { violations } => {
            let fields: Vec<_> = violations.iter().map(|it| it.field.clone()).collect();
            json!({"outcome": "invalid", "fields": fields})
        }
        _ => json!({"outcome": "unavailable"}),
    }
}

/// In protobuf's JSON, as far as the scenario looks at it.
fn lock(lock: Option<v1::Lock>) -> Value {
    lock.map_or(Value::Null, |lock| {
        json!({
            "resource": lock.resource,
            "owner": lock.owner,
            "fencing_token": lock.fencing_token.to_string(),
            "ttl": lock.ttl.map(|ttl| ttl.to_string()),
        })
    })
}

fn refused(status: &Status) -> Value {
    let info = status
        .get_details_error_info()
        .filter(|info| info.domain == v1::ERROR_DOMAIN);
    let violations = status
        .get_details_bad_request()
        .map(|bad| bad.field_violations);
    let fields: Vec<_> = violations
        .into_iter()
        .flatten()
        .map(|it| it.field)
        .collect();
    json!({"code": name(status.code()), "reason": info.map(|info| info.reason), "fields": fields})
}

/// As gRPC spells it.
fn name(code: Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(c.to_uppercase());
    }
    name
}
