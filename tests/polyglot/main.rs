//! One scenario, run by a client of each language: see README.md beside this.
//!
//! The languages are the arguments of `POLYGLOT`, separated by spaces; without it
//! only Rust. Each gets two servers on a database of its own, so that they can run
//! at the same time. The end is a table of language × step.

#![allow(clippy::print_stdout, reason = "the table is what this is about")]

mod agent;
mod matching;
mod others;

use std::{
    collections::BTreeMap,
    env,
    process::ExitCode,
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    postgres::{Database, fresh_database},
};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::sleep};

use crate::{agent::Agent, matching::Names, others::Others};

/// What the clients of all languages do.
const SCENARIO: &str = include_str!("scenario.json");

/// Where a language stands, after a step.
type Outcome = Result<(), String>;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let languages = env::var("POLYGLOT").unwrap_or_else(|_| "rust".to_owned());
    let languages: Vec<String> = languages
        .split_whitespace()
        .map(ToOwned::to_owned)
        .collect();
    let steps: Vec<Value> = serde_json::from_str(SCENARIO).expect("a scenario");
    let columns = runtime.block_on(async {
        let mut running = JoinSet::new();
        for (place, language) in languages.iter().cloned().enumerate() {
            let steps = steps.clone();
            let runtime = tokio::runtime::Handle::current();
            running
                .spawn_blocking(move || (place, runtime.block_on(Stage::run(&language, &steps))));
        }
        let mut columns = running.join_all().await;
        columns.sort_by_key(|(place, _)| *place);
        columns
    });

    print!("\n{:40}", "");
    languages
        .iter()
        .for_each(|language| print!("{language:>10}"));
    println!();
    for (number, step) in steps.iter().enumerate() {
        print!("{:40}", step["name"].as_str().unwrap_or_default());
        for (_, column) in &columns {
            let word = match column.get(number) {
                Some(Ok(())) => "ok",
                Some(Err(_)) => "FAILED",
                None => "-",
            };
            print!("{word:>10}");
        }
        println!();
    }
    let (mut passed, mut failed) = (0, 0);
    for ((_, column), language) in columns.iter().zip(&languages) {
        for (step, outcome) in steps.iter().zip(column) {
            match outcome {
                Ok(()) => passed += 1,
                Err(why) => {
                    failed += 1;
                    println!("\n{language}, {}: {why}", step["name"]);
                }
            }
        }
        failed += steps.len() - column.len();
    }
    println!("\n{passed} passed, {failed} failed");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A server whose log tells of each call.
async fn heard(database: &Database) -> Server {
    let server = Server::builder(&database.url()).flag("--log", "info,fencepostd=debug");
    server.ready().await
}

/// Two servers, somebody else, and the agent of one language.
struct Stage {
    database: Database,
    servers: [Server; 2],
    others: Others,
    agent: Agent,
}

impl Stage {
    async fn run(language: &str, steps: &[Value]) -> Vec<Outcome> {
        let database = fresh_database().await;
        let servers = [heard(&database).await, heard(&database).await];
        let others = Others::new(&database, &servers[0]).await;
        let endpoints = servers.each_ref().map(|server| server.grpc().to_string());
        let mut stage = Self {
            database,
            servers,
            others,
            agent: Agent::start(language),
        };
        let connected = stage
            .agent
            .ask(&json!({"do": "connect", "endpoints": endpoints}))
            .await;
        if let Err(why) = connected {
            return vec![Err(why)];
        }
        let mut outcomes = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            let outcome = stage.step(&format!("{language}-{number}"), step).await;
            let failed = outcome.is_err();
            outcomes.push(outcome);
            // What went wrong may be in the way of the rest.
            if failed && !stage.agent.is_alive() {
                break;
            }
        }
        outcomes
    }

    async fn step(&mut self, resource: &str, step: &Value) -> Outcome {
        let mut names = Names::new(resource);
        let before = self.servers.each_ref().map(|server| server.logs().len());
        for command in step["commands"].as_array().into_iter().flatten() {
            let mut asked = command.clone();
            let object = asked.as_object_mut().ok_or("a command is an object")?;
            let expected = object.remove("expect").unwrap_or_else(|| json!({}));
            let saved = object.remove("save").unwrap_or_else(|| json!({}));
            let asked = names.fill(&asked);
            let begun = Instant::now();
            let mut answer = match asked["do"].as_str().unwrap_or_default() {
                "test.sleep" => {
                    sleep(Duration::from_millis(asked["ms"].as_u64().unwrap_or(0))).await;
                    json!({})
                }
                "test.signal" => {
                    self.agent
                        .signal(asked["signal"].as_str().unwrap_or_default())?;
                    json!({})
                }
                "test.sql" => {
                    let statement = asked["sql"].as_str().unwrap_or_default();
                    self.database.client().await.run(statement).await;
                    json!({})
                }
                "test.kill" => {
                    self.server(&asked)?.kill9().await;
                    json!({})
                }
                "test.drain" => {
                    let server = self.server(&asked)?;
                    server.sigterm();
                    let ended = server.wait_exit().await;
                    json!({"code": ended.code()})
                }
                "test.start" => {
                    let server = self.server(&asked)?;
                    server.restart().await;
                    server.wait_ready().await;
                    json!({})
                }
                "test.calls" => self.calls(before),
                "test.acquire" => self.others.acquire(&asked).await,
                "test.release" => self.others.release(&asked).await,
                "test.write" => self.others.write(&asked).await,
                _ => self.agent.ask(&asked).await?,
            };
            answer["elapsed_ms"] = json!(u64::try_from(begun.elapsed().as_millis()).unwrap_or(0));
            let expected = names.fill(&expected);
            matching::expect(&expected, &answer)
                .map_err(|why| format!("{asked} was answered with {answer}: {why}"))?;
            names.save(&saved, &answer)?;
        }
        Ok(())
    }

    /// How many calls of each kind were answered OK since the servers' logs had
    /// these lengths, by the servers' own word.
    fn calls(&self, before: [usize; 2]) -> Value {
        let mut counts = BTreeMap::from([("KeepAlive", 0), ("Renew", 0)]);
        for (server, before) in self.servers.iter().zip(before) {
            for line in server.logs().iter().skip(before) {
                let line: Value = serde_json::from_str(line).unwrap_or_default();
                let rpc = line["span"]["rpc"].as_str().unwrap_or_default();
                let name = rpc.rsplit('/').next().unwrap_or_default();
                if line["message"] == "answered"
                    && line["code"] == "Ok"
                    && let Some(count) = counts.get_mut(name)
                {
                    *count += 1;
                }
            }
        }
        json!(counts)
    }

    fn server(&mut self, asked: &Value) -> Result<&mut Server, String> {
        let number = asked["server"]
            .as_u64()
            .and_then(|n| usize::try_from(n).ok());
        number
            .and_then(|number| self.servers.get_mut(number))
            .ok_or_else(|| "no such server".to_owned())
    }
}
