//! What the sidecar knows of its lease, for all who ask.

use std::{
    fs,
    future::pending,
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use fencepost_client::{Error, Guard, Holder, LostReason};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{clock::Moment, output};

/// More who want the lock released at the same time are turned away.
const ORDERS: usize = 8;

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct Seat {
    shared: Arc<Shared>,
}

struct Shared {
    resource: String,
    file: Option<PathBuf>,
    state: Mutex<State>,
    stopping: AtomicBool,
    orders: mpsc::Sender<Order>,
    heartbeat: watch::Sender<Option<Instant>>,
}

enum State {
    /// Somebody else may have the lock.
    Standing {
        holder: Option<Refusal>,
    },
    Holding(Guard),
}

/// Who had the lock when we last asked.
struct Refusal {
    holder: Holder,
    until: Moment,
}

/// The neighbour wants the lock released.
pub(super) struct Order {
    answer: oneshot::Sender<Released>,
}

/// What became of it.
pub(super) enum Released {
    Done,
    NotHeld,
    /// Free when the lease ends.
    Later,
}

impl Order {
    pub(super) fn carried_out(self, outcome: Result<(), Error>) {
        self.answer(match outcome {
            Ok(()) => Released::Done,
            Err(Error::Lost { .. }) => Released::NotHeld,
            Err(_) => Released::Later,
        });
    }

    pub(super) fn not_held(self) {
        self.answer(Released::NotHeld);
    }

    fn answer(self, released: Released) {
        // The neighbour has not waited for it.
        let _: Result<(), Released> = self.answer.send(released);
    }
}

impl Seat {
    pub(super) fn new(resource: &str, file: Option<PathBuf>) -> (Self, mpsc::Receiver<Order>) {
        let (orders, received) = mpsc::channel(ORDERS);
        let shared = Shared {
            resource: resource.to_owned(),
            file,
            state: Mutex::new(State::Standing { holder: None }),
            stopping: AtomicBool::new(false),
            orders,
            heartbeat: watch::Sender::new(None),
        };
        let shared = Arc::new(shared);
        (Self { shared }, received)
    }

    // --- what happens ---------------------------------------------------------

    /// The lock is ours. A heartbeat is due from here on.
    pub(super) fn sit(&self, guard: Guard) {
        self.heartbeat();
        *self.state() = State::Holding(guard);
        self.tell();
    }

    /// The lock is not ours any longer. Its guard, if we had one.
    pub(super) fn leave(&self) -> Option<Guard> {
        let before = std::mem::replace(&mut *self.state(), State::Standing { holder: None });
        self.tell();
        match before {
            State::Holding(guard) => Some(guard),
            State::Standing { .. } => None,
        }
    }

    /// Somebody else has it.
    pub(super) fn refused(&self, holder: Holder) {
        let until = Moment::now().after(holder.remaining);
        let holder = Some(Refusal { holder, until });
        *self.state() = State::Standing { holder };
        self.tell();
    }

    /// Nobody answers who has it.
    pub(super) fn unknown(&self) {
        self.leave();
    }

    pub(super) fn stop_renewing(&self) {
        if let State::Holding(guard) = &*self.state() {
            guard.stop_renewing();
        }
    }

    /// We are to end. Whether that was known.
    pub(super) fn stop(&self) -> bool {
        let before = self.shared.stopping.swap(true, Ordering::Relaxed);
        self.tell();
        before
    }

    pub(super) fn heartbeat(&self) {
        self.shared.heartbeat.send_replace(Some(Instant::now()));
    }

    /// Asks for the lock to be released; returns when it was, or was not.
    pub(super) async fn release(&self) -> Option<Released> {
        let (answer, answered) = oneshot::channel();
        self.shared.orders.try_send(Order { answer }).ok()?;
        answered.await.ok()
    }

    // --- what is the case -----------------------------------------------------

    pub(super) fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::Relaxed)
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(&*self.state(), State::Holding(guard) if guard.is_held())
    }

    pub(super) fn lost_reason(&self) -> LostReason {
        match &*self.state() {
            State::Holding(guard) => match guard.ensure_held() {
                Err(Error::Lost { reason }) => reason,
                Err(_) | Ok(()) => LostReason::Unconfirmed,
            },
            State::Standing { .. } => LostReason::NotFound,
        }
    }

    /// Waits until there was a heartbeat no longer than this ago.
    pub(super) async fn heartbeat_within(&self, time: Duration) {
        let mut heartbeats = self.shared.heartbeat.subscribe();
        // The sender is ours.
        let _: Result<_, _> = heartbeats
            .wait_for(|last| last.is_some_and(|last| last.elapsed() < time))
            .await;
    }

    /// Waits until there was none for so long.
    pub(super) async fn silent_for(&self, time: Duration) {
        loop {
            let last = *self.shared.heartbeat.borrow();
            let last = last.unwrap_or_else(Instant::now);
            match last.checked_add(time) {
                Some(until) if until <= Instant::now() => return,
                Some(until) => sleep_until(until).await,
                // No clock can tell it.
                None => pending().await,
            }
        }
    }

    /// What GET /lease says.
    pub(super) fn lease(&self) -> Value {
        let mut lease = json!({
            "resource": self.shared.resource,
            "held": false,
            "stopping": self.is_stopping(),
        });
        match &*self.state() {
            State::Holding(guard) => {
                let remaining = guard.remaining();
                // By the clock, and in one look.
                if !remaining.is_zero() {
                    lease["held"] = json!(true);
                    lease["owner"] = json!(guard.owner());
                    lease["fencing_token"] = json!(guard.fencing_token());
                    lease["remaining"] = json!(output::seconds(remaining));
                }
            }
            State::Standing { holder } => {
                lease["holder"] = holder.as_ref().map_or(Value::Null, |refusal| {
                    let mut holder = refusal.holder.clone();
                    holder.remaining = refusal.until.remaining();
                    output::holder(&holder)
                });
            }
        }
        lease
    }

    // --- the file -------------------------------------------------------------

    /// Writes the file, and says on stderr when it cannot.
    pub(super) fn tell(&self) {
        if let Err(error) = self.publish() {
            output::error(&format!("the state file cannot be written: {error}"));
        }
    }

    /// A reader sees the old file or the new one, never half of one. It gets
    /// stale when we are killed, so it says until when it can be believed.
    pub(super) fn publish(&self) -> io::Result<()> {
        let Some(path) = &self.shared.file else {
            return Ok(());
        };
        let asked = Moment::now();
        let mut state = self.lease();
        if let State::Holding(guard) = &*self.state() {
            let until = asked.after(guard.remaining());
            state["held_until_boottime_ms"] = json!(until.0);
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let new = path.with_file_name(name);
        fs::write(&new, format!("{state}\n"))?;
        fs::rename(&new, path)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
