//! A TCP proxy on loopback that delays, holds, swallows, cuts and refuses.
//!
//! Both directions are set on their own, at run time, and what is set holds
//! for open connections too. `up` is from the client to the server, `down`
//! from the server to the client.

mod pump;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};

use crate::{system::free_address, wait::eventually};

/// What happens to bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// They pass at once.
    Pass,
    /// They pass this much later, in order.
    Delay(Duration),
    /// They wait until the flow is set to something else: a link that lost
    /// its packets and will send them again.
    Hold,
    /// They are read and thrown away, and so is the end of the stream.
    Swallow,
    /// This many more bytes pass, counted over all connections from the
    /// moment this is set; what follows is thrown away.
    SwallowAfter(u64),
    /// This many more bytes pass, counted likewise; the next byte resets its
    /// connection instead.
    ResetAfter(u64),
}

#[derive(Clone, Debug)]
struct Plan {
    target: SocketAddr,
    up: Flow,
    down: Flow,
    listening: bool,
    /// Counts the times that all connections were ended.
    ended: u64,
    with_reset: bool,
}

#[derive(Debug, Default)]
struct Counters {
    /// Bytes that have passed since the direction's flow was set last.
    up: AtomicU64,
    down: AtomicU64,
    /// Bytes of both directions that did not pass when they came.
    hindered: AtomicU64,
    open: AtomicU64,
    accepted: AtomicU64,
    listening: AtomicBool,
    /// The last end of all connections that the acceptor has heard of.
    ended: AtomicU64,
}

/// A running proxy. Dropping it closes everything.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    plan: watch::Sender<Plan>,
    counters: Arc<Counters>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy in front of `target` that lets all pass.
    pub async fn start(target: SocketAddr) -> Self {
        let (address, listener) = loop {
            // Others look for free ports at the same time.
            let address = free_address();
            if let Ok(listener) = Listener::bind(address).await {
                break (address, listener);
            }
        };
        let (plan, watched) = watch::channel(Plan {
            target,
            up: Flow::Pass,
            down: Flow::Pass,
            listening: true,
            ended: 0,
            with_reset: false,
        });
        let counters = Arc::<Counters>::default();
        counters.listening.store(true, Ordering::SeqCst);
        let acceptor = tokio::spawn(accept(address, listener, watched, Arc::clone(&counters)));
        Self {
            address,
            plan,
            counters,
            acceptor,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets everything pass, and listens.
    pub async fn forward(&self) {
        self.set(Flow::Pass, Flow::Pass);
        self.listen(true).await;
    }

    /// Delays both directions.
    pub fn delay(&self, by: Duration) {
        self.set(Flow::Delay(by), Flow::Delay(by));
    }

    /// Throws requests away; answers to earlier ones pass.
    pub fn swallow_up(&self) {
        self.set_up(Flow::Swallow);
    }

    /// Throws answers away; requests pass.
    pub fn swallow_down(&self) {
        self.set_down(Flow::Swallow);
    }

    /// Accepts and reads, and never answers.
    pub fn black_hole(&self) {
        self.set(Flow::Swallow, Flow::Swallow);
    }

    /// Holds both directions; [`Proxy::forward`] delivers what was held.
    pub fn hold(&self) {
        self.set(Flow::Hold, Flow::Hold);
    }

    /// Sets both directions.
    pub fn set(&self, up: Flow, down: Flow) {
        self.set_up(up);
        self.set_down(down);
    }

    /// Sets what happens from client to server.
    pub fn set_up(&self, flow: Flow) {
        self.plan.send_modify(|plan| {
            self.counters.up.store(0, Ordering::SeqCst);
            plan.up = flow;
        });
    }

    /// Sets what happens from server to client.
    pub fn set_down(&self, flow: Flow) {
        self.plan.send_modify(|plan| {
            self.counters.down.store(0, Ordering::SeqCst);
            plan.down = flow;
        });
    }

    /// Closes the listener, so that new connections are refused. Open ones
    /// stay. [`Proxy::forward`] listens again.
    pub async fn refuse(&self) {
        self.listen(false).await;
    }

    /// Resets every open connection on both sides (`RST`).
    pub async fn reset(&self) {
        self.end(true).await;
    }

    /// Closes every open connection on both sides (`FIN`).
    pub async fn cut(&self) {
        self.end(false).await;
    }

    /// Sends new connections to another address; open ones stay.
    pub fn retarget(&self, target: SocketAddr) {
        self.plan.send_modify(|plan| plan.target = target);
    }

    /// Bytes from client to server that passed since the flow was set last.
    pub fn passed_up(&self) -> u64 {
        self.counters.up.load(Ordering::SeqCst)
    }

    /// Bytes from server to client that passed since the flow was set last.
    pub fn passed_down(&self) -> u64 {
        self.counters.down.load(Ordering::SeqCst)
    }

    /// Bytes so far that were late, held back, thrown away, or met by a reset.
    pub fn hindered(&self) -> u64 {
        self.counters.hindered.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> u64 {
        self.counters.open.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.counters.accepted.load(Ordering::SeqCst)
    }

    async fn listen(&self, wanted: bool) {
        self.plan.send_modify(|plan| plan.listening = wanted);
        eventually("the listener is open or closed", async || {
            let listening = self.counters.listening.load(Ordering::SeqCst);
            (listening == wanted).then_some(())
        })
        .await;
    }

    async fn end(&self, with_reset: bool) {
        let (mut ended, mut accepted) = (0, 0);
        self.plan.send_modify(|plan| {
            plan.ended += 1;
            plan.with_reset = with_reset;
            (ended, accepted) = (plan.ended, self.accepted());
        });
        eventually("the old connections are gone", async || {
            let heard = self.counters.ended.load(Ordering::SeqCst) >= ended;
            let new = self.accepted() - accepted;
            (heard && self.open() <= new).then_some(())
        })
        .await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

/// A listener, and a second handle that takes what waits in its queue even
/// before the runtime has heard of it.
struct Listener {
    listener: TcpListener,
    queue: std::net::TcpListener,
}

impl Listener {
    async fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?.into_std()?;
        let queue = listener.try_clone()?;
        Ok(Self {
            listener: TcpListener::from_std(listener)?,
            queue,
        })
    }

    async fn accept(&self) -> TcpStream {
        loop {
            if let Ok((stream, _)) = self.listener.accept().await {
                return stream;
            }
        }
    }

    fn queued(&self) -> Option<TcpStream> {
        let (stream, _) = self.queue.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        TcpStream::from_std(stream).ok()
    }
}

/// Accepts connections and serves them, as the plan wants it. All connections
/// end with this task.
async fn accept(
    address: SocketAddr,
    listener: Listener,
    mut plan: watch::Receiver<Plan>,
    counters: Arc<Counters>,
) {
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut ended = 0;
    loop {
        let now = plan.borrow_and_update().clone();
        let mut new = Vec::new();
        if now.ended != ended {
            // Who has connected before the end is ended too, though nobody
            // has accepted it yet.
            new.extend(std::iter::from_fn(|| listener.as_ref()?.queued()));
        }
        if now.listening && listener.is_none() {
            let again = Listener::bind(address).await;
            listener = Some(again.expect("the port is still ours"));
        } else if !now.listening {
            listener = None;
        }
        if new.is_empty() {
            counters
                .listening
                .store(listener.is_some(), Ordering::SeqCst);
            counters.ended.store(now.ended, Ordering::SeqCst);
            ended = now.ended;
            let accepted = async {
                match &listener {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                stream = accepted => new.push(stream),
                changed = plan.changed() => if changed.is_err() { return },
                Some(_) = connections.join_next() => {}
            }
        }
        for stream in new {
            counters.accepted.fetch_add(1, Ordering::SeqCst);
            counters.open.fetch_add(1, Ordering::SeqCst);
            let (plan, counters) = (plan.clone(), Arc::clone(&counters));
            connections.spawn(async move {
                serve(stream, plan, ended, &counters).await;
                counters.open.fetch_sub(1, Ordering::SeqCst);
            });
        }
    }
}

/// Serves one connection until it ends or is ended.
async fn serve(
    mut client: TcpStream,
    plan: watch::Receiver<Plan>,
    ended: u64,
    counters: &Counters,
) {
    let _ = client.set_nodelay(true);
    let mut ends = plan.clone();
    let end = async move {
        match ends.wait_for(|plan| plan.ended != ended).await {
            Ok(plan) => plan.with_reset,
            Err(_) => true,
        }
    };
    tokio::pin!(end);

    let target = plan.borrow().target;
    let connected = tokio::select! {
        connected = TcpStream::connect(target) => connected,
        with_reset = &mut end => return pump::close(&client, with_reset),
    };
    let Ok(mut server) = connected else {
        // A hole is a hole whether or not somebody lives behind it.
        let holed = plan.borrow().up == Flow::Swallow;
        if holed {
            tokio::select! {
                () = pump::discard(&mut client, &counters.hindered) => {}
                with_reset = &mut end => pump::close(&client, with_reset),
            }
        } else {
            pump::close(&client, true);
        }
        return;
    };
    let _ = server.set_nodelay(true);

    let with_reset = {
        let (client_read, client_write) = client.split();
        let (server_read, server_write) = server.split();
        let up = pump::pump(
            client_read,
            server_write,
            plan.clone(),
            |plan| plan.up,
            &counters.up,
            &counters.hindered,
        );
        let down = pump::pump(
            server_read,
            client_write,
            plan.clone(),
            |plan| plan.down,
            &counters.down,
            &counters.hindered,
        );
        tokio::select! {
            done = async { tokio::try_join!(up, down) } => done.is_err(),
            with_reset = &mut end => with_reset,
        }
    };
    pump::close(&client, with_reset);
    pump::close(&server, with_reset);
}
