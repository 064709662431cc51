//! The client, and how it is made.

use std::{io, sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    AcquireOptions, Calls, EndpointsError, Error, Guard, Lock, Tls, TlsFileError,
    acquire::{self, Backoff, Turns},
    call::Servers,
    endpoints,
    observe::{Observer, Told, Tracing},
    thread::Thread,
    wire::Wire,
};

/// Longer budgets count as this one.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A client of one or more replicas of a Fencepost server. Cheap to clone: all
/// clones, and all their guards, share one thread, and two connections to a server.
///
/// May be made and used anywhere, also where there is no Tokio runtime.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

/// What the clones and the guards share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) thread: Thread,
    wire: Wire,
    pub(crate) backoff: Backoff,
    pub(crate) turns: Turns,
    tracing: Tracing,
    /// How many locks are being given back.
    pub(crate) releasing: watch::Sender<usize>,
}

impl Shared {
    /// The servers, for the work at hand.
    pub(crate) fn wire(&self) -> Wire {
        Wire {
            traceparent: self.tracing.traceparent(),
            ..self.wire.clone()
        }
    }
}

/// Why no client was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The servers cannot be named so.
    #[error(transparent)]
    Endpoints(#[from] EndpointsError),
    /// An endpoint is `https`, and a file of TLS cannot be used.
    #[error("TLS cannot be used: {0}")]
    Tls(#[from] TlsFileError),
    /// The machine has no room for another thread, or for what it needs.
    #[error("cannot start the client's thread: {0}")]
    Thread(#[from] io::Error),
}

/// Makes a [`Client`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ClientBuilder {
    endpoints: String,
    timeout: Duration,
    connect_timeout: Duration,
    backoff: Backoff,
    tls: Tls,
    told: Told,
    tracing: Tracing,
}

impl ClientBuilder {
    /// Whom to trust, and who to be, for endpoints that begin with `https`: those
    /// that the machine trusts, and nobody, unless set.
    pub fn tls(self, tls: Tls) -> Self {
        Self { tls, ..self }
    }

    /// How long a call may take, all its attempts together; 5 s unless set, at
    /// most 24 h.
    pub fn timeout(self, timeout: Duration) -> Self {
        let timeout = timeout.min(LONGEST_TIMEOUT);
        Self { timeout, ..self }
    }

    /// How long connecting to one server may take before it counts as away;
    /// 5 s unless set.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self {
            connect_timeout,
            ..self
        }
    }

    /// The pauses of [`acquire_with_retry`](Client::acquire_with_retry): each is
    /// chosen at random up to a bound ("full jitter"), which is `first` at first
    /// and doubles from try to try until it is `longest`. 20 ms and 1 s unless
    /// set. When the lock has changed hands meanwhile it is at most eight
    /// times `first`.
    pub fn backoff(self, first: Duration, longest: Duration) -> Self {
        let backoff = Backoff { first, longest };
        Self { backoff, ..self }
    }

    /// Who is told what happens to the guards, for metrics; nobody unless set.
    pub fn observer(self, observer: Arc<dyn Observer>) -> Self {
        let told = Told::by(observer);
        Self { told, ..self }
    }

    /// What gives the trace context of the work at hand, as W3C's `traceparent`, to be
    /// handed to the server. It is asked in the caller's task when a call or an
    /// acquisition begins; what a guard does to keep its lock, and to give it back,
    /// belongs to the trace that took it.
    pub fn traceparent(self, hook: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        let tracing = Tracing::by(hook);
        Self { tracing, ..self }
    }

    /// Starts the client's thread. Nothing is connected before the first call.
    ///
    /// # Errors
    ///
    /// When an endpoint is not `http://host:port` or `https://host:port`, a file of
    /// TLS cannot be used, or the machine has no room for a thread.
    pub fn build(self) -> Result<Client, BuildError> {
        let addresses = endpoints::parse(&self.endpoints)?;
        let tls = if addresses.iter().any(|address| address.is_secure) {
            Some(Arc::new(self.tls.read()?))
        } else {
            None
        };
        let thread = Thread::start()?;
        let servers = {
            let _runtime = thread.handle().enter();
            Arc::new(Servers::new(&addresses, self.connect_timeout, tls.as_ref()))
        };
        Ok(Client {
            shared: Arc::new(Shared {
                thread,
                wire: Wire {
                    servers,
                    timeout: self.timeout,
                    traceparent: None,
                    told: self.told,
                },
                backoff: self.backoff,
                turns: Turns::default(),
                tracing: self.tracing,
                releasing: watch::Sender::new(0),
            }),
        })
    }
}

impl Client {
    /// How long a call may take, unless said otherwise.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Names the servers: one or more URLs like `http://127.0.0.1:50051`,
    /// separated by commas, all of them replicas on the same database. A call
    /// goes to the one that answered last, and to the others when that fails.
    pub fn builder(endpoints: impl Into<String>) -> ClientBuilder {
        ClientBuilder {
            endpoints: endpoints.into(),
            timeout: Self::DEFAULT_TIMEOUT,
            connect_timeout: endpoints::CONNECT_LIMIT,
            backoff: Backoff::DEFAULT,
            tls: Tls::default(),
            told: Told::default(),
            tracing: Tracing::default(),
        }
    }

    /// A client with all the defaults; see [`builder`](Self::builder).
    ///
    /// # Errors
    ///
    /// As [`ClientBuilder::build`].
    pub fn connect_lazy(endpoints: impl Into<String>) -> Result<Self, BuildError> {
        Self::builder(endpoints).build()
    }

    /// Takes the lock and keeps it, or learns who has it. Never waits for the
    /// holder.
    ///
    /// May be dropped at any time: what it took by then is given back, where the
    /// owner is its own and a server can be asked within two seconds. Else it ends
    /// with its lease.
    ///
    /// # Errors
    ///
    /// [`Refused`](Error::Refused) when another owner has it;
    /// [`Unavailable`](Error::Unavailable) or [`TimedOut`](Error::TimedOut) when
    /// no server could say so within the time of a call;
    /// [`Invalid`](Error::Invalid), [`Rejected`](Error::Rejected) or
    /// [`Internal`](Error::Internal) when repeating does not help; and
    /// [`RequestSpent`](Error::RequestSpent) when the options name a
    /// `request_id` whose lease is gone.
    pub async fn acquire(&self, resource: &str, options: AcquireOptions) -> Result<Guard, Error> {
        let options = options.wait(Duration::ZERO);
        acquire::acquire(&self.shared, resource, options).await
    }

    /// The same, and tries again while another owner has it or no server
    /// answers, until the [`wait`](AcquireOptions::wait) of the options is
    /// over: not earlier, and not later than a moment after.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire): with [`Refused`](Error::Refused),
    /// [`Unavailable`](Error::Unavailable) and [`TimedOut`](Error::TimedOut)
    /// only once the time is over.
    pub async fn acquire_with_retry(
        &self,
        resource: &str,
        options: AcquireOptions,
    ) -> Result<Guard, Error> {
        acquire::acquire(&self.shared, resource, options).await
    }

    /// Takes the lock as [`acquire_with_retry`](Self::acquire_with_retry) does,
    /// runs `work`, and gives the lock back once that has ended.
    ///
    /// When the lease is lost, `work` is dropped at its next await. What it has
    /// spawned it must stop itself: [`Guard::lost_token`] is for that. Dropping
    /// the whole drops `work` first, and then gives the lock back.
    ///
    /// ```no_run
    /// # async fn example(client: fencepost_client::Client) -> Result<(), fencepost_client::Error> {
    /// use fencepost_client::AcquireOptions;
    ///
    /// let rows = client
    ///     .with_lock("nightly", AcquireOptions::default(), async |guard| {
    ///         // … write, with guard.fencing_token() …
    ///         42
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`acquire_with_retry`](Self::acquire_with_retry), and
    /// [`Lost`](Error::Lost) when the lease was over before `work` was, whose
    /// outcome is then dropped: it may have overlapped with the next holder's.
    pub async fn with_lock<T>(
        &self,
        resource: &str,
        options: AcquireOptions,
        work: impl AsyncFnOnce(&Guard) -> T,
    ) -> Result<T, Error> {
        let guard = self.acquire_with_retry(resource, options).await?;
        let outcome = tokio::select! {
            biased;
            reason = guard.lost() => return Err(Error::Lost { reason }),
            outcome = work(&guard) => outcome,
        };
        // Work that never awaits is not cancelled.
        guard.ensure_held()?;
        match guard.release().await {
            Ok(()) => {}
            // Learned only now.
            Err(error @ Error::Lost { .. }) => return Err(error),
            Err(error) => {
                tracing::warn!(resource, %error, "the lock was not given back; its lease runs out");
            }
        }
        Ok(outcome)
    }

    /// Looks at the lock: its live lease, or `None` when it is free.
    ///
    /// # Errors
    ///
    /// As [`Calls::get`].
    pub async fn get(&self, resource: &str) -> Result<Option<Lock>, Error> {
        self.calls().get(resource).await
    }

    /// The calls of the contract, one to one.
    #[must_use]
    pub fn calls(&self) -> Calls {
        Calls {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Waits until the locks of all guards that were dropped have been given
    /// back, or have been tried to for the time of a call.
    ///
    /// A process that ends takes the client's thread with it. Await this at the
    /// end of `main`, or [`Guard::release`] each guard.
    pub async fn released(&self) {
        let mut releasing = self.shared.releasing.subscribe();
        // The sender is ours.
        let _: Result<_, _> = releasing.wait_for(|count| *count == 0).await;
    }
}
