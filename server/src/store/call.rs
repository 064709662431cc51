//! A call on its way through the store.
//!
//! Its work is never part of its caller's future: dropping the caller cancels no
//! statement and poisons no connection. Only the answer is lost then, and with it
//! a [`Grant`](super::acquire::Grant), which gives its lease back.

use std::sync::Arc;

use tokio::{
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};
use tracing::{Instrument as _, Span};

use super::{
    Inner, Store,
    acquire::Acquire,
    failure::{Because, Failure},
    get::Get,
    release::Release,
    renew::Renew,
};
use crate::{
    lock::{Outage, Resource},
    metrics::{ShedMetric, ShedMetrics},
    room::{Peer, Place, Room},
    trace::Trace,
};

/// What becomes of a call whose caller leaves before its turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Abandoned {
    /// It is not begun: streams that are opened and reset must cost nothing.
    Skip,
    /// It is done nevertheless: it ends something.
    Finish,
}

/// What a caller asks of one row.
pub(super) trait Ask: Sized + Send + Sync + 'static {
    type Answer: Send + 'static;
    type Error: From<Outage> + Send + 'static;

    const ABANDONED: Abandoned;

    /// Where it must find a place.
    fn room(inner: &Inner) -> &Arc<Room>;

    /// What is counted of those that were shed.
    fn shed(metrics: &ShedMetrics) -> &ShedMetric;

    fn resource(&self) -> &Resource;

    /// Carries it out by statements of its own, which wait for its row.
    fn alone(
        self,
        inner: Arc<Inner>,
        deadline: Instant,
    ) -> impl Future<Output = Result<Self::Answer, Self::Error>> + Send;
}

/// A call whose caller waits for the answer.
pub(super) struct Waiting<Q: Ask> {
    pub(super) ask: Q,
    deadline: Instant,
    /// The caller's, for what is logged of the call once it goes on alone.
    span: Span,
    pub(super) trace: Trace,
    reply: Reply<Q>,
}

/// How its caller is answered.
struct Reply<Q: Ask> {
    /// The call's place among those that may be at work at one time.
    place: Place,
    tell: oneshot::Sender<Result<Q::Answer, Q::Error>>,
}

impl<Q: Ask> Reply<Q> {
    fn send(self, answer: Result<Q::Answer, Q::Error>) {
        drop(self.place);
        // Where the caller has gone, a grant is dropped here, while the task that
        // answers still counts: a drain must find it among the orphans.
        drop(self.tell.send(answer));
    }
}

/// Where its caller waits.
pub(super) struct Told<Q: Ask>(oneshot::Receiver<Result<Q::Answer, Q::Error>>);

impl<Q: Ask> Told<Q> {
    pub(super) async fn answer(self, deadline: Instant) -> Result<Q::Answer, Q::Error> {
        match timeout_at(deadline, self.0).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => {
                let panicked = Because("the task of a call panicked");
                Err(Outage::Internal(Box::new(panicked)).into())
            }
            Err(_) => Err(Outage::Deadline.into()),
        }
    }
}

impl Store {
    /// Takes a call in, unless there is no room for it, or no promise to be made.
    pub(super) fn admit<Q: Ask>(
        &self,
        ask: Q,
        peer: Peer,
        deadline: Instant,
    ) -> Result<(Waiting<Q>, Told<Q>), Outage> {
        if self.0.tracker.is_closed() {
            return Err(Outage::Draining);
        }
        self.check_durable()?;
        let place = Q::room(&self.0).enter(peer).map_err(|why| {
            Q::shed(&self.0.metrics.shed).no_room.count(why);
            Outage::Overloaded
        })?;
        let (tell, told) = oneshot::channel();
        let waiting = Waiting {
            ask,
            deadline,
            span: Span::current(),
            trace: Trace::current(),
            reply: Reply { place, tell },
        };
        Ok((waiting, Told(told)))
    }

    /// Has a call carried out, in the next round of its lane.
    pub(super) async fn call<Q: Ask>(
        &self,
        ask: Q,
        kind: fn(Waiting<Q>) -> Call,
        peer: Peer,
        deadline: Instant,
    ) -> Result<Q::Answer, Q::Error> {
        let (waiting, told) = self.admit(ask, peer, deadline)?;
        self.0.enqueue(kind(waiting));
        told.answer(deadline).await
    }
}

impl<Q: Ask> Waiting<Q> {
    /// Whether there is no use in beginning it.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.deadline <= now || (Q::ABANDONED == Abandoned::Skip && self.reply.tell.is_closed())
    }

    /// It is not begun.
    fn shed(self, metrics: &ShedMetrics) {
        Q::shed(metrics).late.inc();
        self.answer(Err(Outage::Deadline.into()));
    }

    pub(super) fn answer(self, answer: Result<Q::Answer, Q::Error>) {
        self.reply.send(answer);
    }

    /// Gives the call a task of its own, that waits for the row.
    pub(super) fn go_alone(self, inner: &Arc<Inner>) {
        self.go_on(inner, Q::alone);
    }

    /// Carries on with `work` in a task of the store's tracker, once there is a
    /// turn for it.
    pub(super) fn go_on<F>(
        self,
        inner: &Arc<Inner>,
        work: impl FnOnce(Q, Arc<Inner>, Instant) -> F + Send + 'static,
    ) where
        F: Future<Output = Result<Q::Answer, Q::Error>> + Send,
    {
        let turn = inner.turns.take(self.ask.resource());
        let patience = inner.config.limits.wait;
        let store = Arc::clone(inner);
        let (span, trace) = (self.span.clone(), self.trace.clone());
        let task = async move {
            let Self {
                ask,
                deadline,
                mut reply,
                ..
            } = self;
            let turn = tokio::select! {
                biased;
                () = reply.tell.closed(), if Q::ABANDONED == Abandoned::Skip => return,
                turn = timeout(patience, turn) => turn,
            };
            let answer = match turn {
                Ok(Ok(_turn)) => work(ask, store, deadline).await,
                _ => Err(Outage::from(Failure::no_connection()).into()),
            };
            reply.send(answer);
        };
        inner.tracker.spawn(trace.scope(task.instrument(span)));
    }
}

/// A call of any kind.
pub(super) enum Call {
    Acquire(Waiting<Acquire>),
    Release(Waiting<Release>),
    Renew(Waiting<Renew>),
    Get(Waiting<Get>),
}

/// Does the same with a call of any kind.
macro_rules! any {
    ($call:expr, $waiting:ident => $do:expr) => {
        match $call {
            Call::Acquire($waiting) => $do,
            Call::Release($waiting) => $do,
            Call::Renew($waiting) => $do,
            Call::Get($waiting) => $do,
        }
    };
}

impl Call {
    pub(super) fn resource(&self) -> &Resource {
        any!(self, waiting => waiting.ask.resource())
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        any!(self, waiting => waiting.is_over(now))
    }

    pub(super) fn go_alone(self, inner: &Arc<Inner>) {
        any!(self, waiting => waiting.go_alone(inner));
    }

    pub(super) fn shed(self, metrics: &ShedMetrics) {
        any!(self, waiting => waiting.shed(metrics));
    }

    pub(super) fn fail(self, outage: Outage) {
        any!(self, waiting => waiting.answer(Err(outage.into())));
    }
}
