//! A client with generated stubs: one call is one request to one replica.

use std::{collections::VecDeque, time::Duration};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rand::Rng as _;

use super::{
    Context, Error,
    line::{Cut, Held, Line},
};
use crate::history::{Outcome, Shown};

/// So many leases that are over are remembered, to be tried again.
const PAST: usize = 6;

/// So many acquisitions of one owner go out together.
const CROWD: usize = 4;

#[derive(Debug)]
pub(super) struct Client {
    context: Context,
    replicas: Vec<Line>,
    owner: String,
    held: Option<Held>,
    past: VecDeque<Held>,
}

impl Client {
    pub(super) fn new(mut context: Context, endpoints: &[String]) -> Result<Self, Error> {
        let line =
            |(n, url): (usize, &String)| Line::new(context.number, n, url, &context.recorder);
        let replicas = endpoints
            .iter()
            .enumerate()
            .map(line)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            owner: context.fresh(),
            replicas,
            context,
            held: None,
            past: VecDeque::new(),
        })
    }

    pub(super) async fn run(mut self) {
        while !self.context.stop.is_cancelled() {
            self.step().await;
            self.context.rest(self.context.pause).await;
        }
    }

    /// Looks at everything, again and again.
    pub(super) async fn watch(mut self) {
        while !self.context.stop.is_cancelled() {
            let (n, resource) = (self.replica(), self.context.resource());
            self.replicas[n].get(&resource, Cut::Not).await;
            self.context.rest(self.context.pause).await;
        }
    }

    async fn step(&mut self) {
        if let Some(held) = self.held.clone()
            && self.context.chance(self.context.crowds)
        {
            return self.crowd(held).await;
        }
        if let Some(held) = self.held.clone()
            && self.context.chance(self.context.brink)
        {
            self.context.wait(held.ttl.mul_f64(0.9)).await;
            return self.renew(&held).await;
        }
        let what = self.context.rng.random_range(0..100);
        match self.held.clone() {
            None => match what {
                0..72 => self.acquire().await,
                72..84 => self.get().await,
                84..92 => self.late_call().await,
                92..96 => self.late_write().await,
                _ => self.late_duplicate().await,
            },
            Some(held) => match what {
                0..20 => {
                    self.context
                        .write(&held.resource, &held.owner, held.token)
                        .await;
                }
                20..40 => self.renew(&held).await,
                40..70 => self.release(held).await,
                70..75 => self.acquire_again(held).await,
                75..83 => self.keep_alive(held).await,
                83..88 => self.get().await,
                88..92 => self.late_call().await,
                92..94 => self.late_write().await,
                // Leaves it to run out.
                94..96 => self.let_go(),
                // Holds on, beyond its end or not.
                _ => self.context.rest(held.ttl.mul_f64(1.5)).await,
            },
        }
    }

    fn let_go(&mut self) {
        let held = self.held.take();
        self.past.extend(held);
        if self.past.len() > PAST {
            self.past.pop_front();
        }
    }

    /// A new acquisition, under a name that is often new as well.
    async fn acquire(&mut self) {
        if self.context.chance(70) {
            self.owner = self.context.fresh();
        }
        let request_id = match self.context.chance(4) {
            true => String::new(),
            false => self.context.fresh(),
        };
        let wish = Held {
            resource: self.context.resource(),
            owner: self.owner.clone(),
            request_id,
            ttl: self.context.ttl(),
            token: 0,
        };
        self.take(wish).await;
    }

    /// The same owner asks for what it has already.
    async fn acquire_again(&mut self, held: Held) {
        let request_id = self.context.fresh();
        self.let_go();
        self.take(Held { request_id, ..held }).await;
    }

    /// The same owner asks several times at once, through all replicas: so many
    /// acquisitions. The one with the largest token is the latest, which it holds.
    async fn crowd(&mut self, held: Held) {
        self.let_go();
        let wishes: [Held; CROWD] = std::array::from_fn(|_| Held {
            request_id: self.context.fresh(),
            ..held.clone()
        });
        let lines = self.replicas.iter().cycle();
        let mut calls: FuturesUnordered<_> = lines
            .zip(wishes)
            .map(async |(line, wish)| (line.acquire(&wish, Cut::Not).await, wish))
            .collect();
        let mut latest: Option<Held> = None;
        while let Some((outcome, wish)) = calls.next().await {
            let Outcome::Lock(Shown { token, .. }) = outcome else {
                continue;
            };
            if latest.as_ref().is_none_or(|latest| latest.token < token) {
                latest = Some(Held { token, ..wish });
            }
        }
        drop(calls);
        self.held = latest;
    }

    /// Asks, and mostly asks another replica when the answer was lost.
    async fn take(&mut self, wish: Held) {
        let mut n = self.replica();
        for _ in 0..4 {
            let cut = self.cut(self.context.drops);
            match self.replicas[n].acquire(&wish, cut).await {
                Outcome::Lock(Shown { token, .. }) => {
                    self.held = Some(Held { token, ..wish });
                    return;
                }
                Outcome::Unknown(_) if self.context.chance(85) => {
                    n = (n + 1) % self.replicas.len();
                    if self.context.chance(50) {
                        self.context.rest(Duration::from_millis(10)).await;
                    }
                }
                Outcome::Unknown(_) => break,
                _ => {
                    self.context.rest(Duration::from_millis(40)).await;
                    return;
                }
            }
        }
        // Whatever became of it is nobody's.
        self.owner = self.context.fresh();
    }

    /// A request that was answered long ago comes once more.
    async fn late_duplicate(&mut self) {
        if let Some(past) = self.any_past() {
            self.duplicate(past).await;
        }
    }

    async fn duplicate(&mut self, past: Held) {
        let n = self.replica();
        if let Outcome::Lock(Shown { token, .. }) = self.replicas[n].acquire(&past, Cut::Not).await
        {
            self.held = Some(Held { token, ..past });
        }
    }

    async fn renew(&mut self, held: &Held) {
        let (n, cut) = (self.replica(), self.cut(6));
        if matches!(self.replicas[n].renew(held, cut).await, Outcome::No(_)) {
            self.lost(held);
        }
    }

    fn lost(&mut self, held: &Held) {
        if self
            .held
            .as_ref()
            .is_some_and(|mine| mine.token == held.token)
        {
            self.let_go();
        }
    }

    async fn release(&mut self, held: Held) {
        for _ in 0..3 {
            let (n, cut) = (self.replica(), self.cut(6));
            let outcome = self.replicas[n].release(&held, cut).await;
            if !matches!(outcome, Outcome::Unknown(_)) {
                break;
            }
        }
        self.lost(&held);
        // At once, before another acquisition makes the database forget this one.
        if self.context.chance(12) {
            self.duplicate(held).await;
        }
    }

    /// Renews or releases what is over.
    async fn late_call(&mut self) {
        let Some(past) = self.any_past() else { return };
        if self.context.chance(50) {
            self.renew(&past).await;
        } else {
            let n = self.replica();
            self.replicas[n].release(&past, Cut::Not).await;
        }
    }

    /// Writes with the token of a lease that is over.
    async fn late_write(&mut self) {
        let Some(past) = self.any_past() else { return };
        self.context
            .write(&past.resource, &past.owner, past.token)
            .await;
    }

    fn any_past(&mut self) -> Option<Held> {
        let n = self.context.rng.random_range(0..PAST);
        self.past.get(n).or(self.past.back()).cloned()
    }

    async fn get(&mut self) {
        let held = self.held.as_ref().map(|held| held.resource.clone());
        let resource = held.filter(|_| self.context.chance(50));
        let resource = resource.unwrap_or_else(|| self.context.resource());
        let (n, cut) = (self.replica(), self.cut(2));
        self.replicas[n].get(&resource, cut).await;
    }

    /// Keeps a lease by a stream for a while, and leaves it then.
    async fn keep_alive(&mut self, held: Held) {
        let n = self.replica();
        let longest = held.ttl.mul_f64(self.context.rng.random_range(0.1..2.5));
        let stop = self.context.stop.clone();
        let left = async move {
            // Left when the time is over, or the load is stopped.
            let _ = tokio::time::timeout(longest, stop.cancelled()).await;
        };
        let end = self.replicas[n].keep_alive(&held, left).await;
        if matches!(end, Outcome::No(_)) {
            self.lost(&held);
        }
    }

    fn replica(&mut self) -> usize {
        self.context.rng.random_range(0..self.replicas.len())
    }

    fn cut(&mut self, percent: u32) -> Cut {
        let after = Duration::from_micros(self.context.rng.random_range(0..20_000));
        match self.context.rng.random_range(0..100) {
            n if n >= percent => Cut::Not,
            n if n % 3 == 0 => Cut::Deadline(after + Duration::from_millis(1)),
            _ => Cut::Drop(after),
        }
    }
}
