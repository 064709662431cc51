//! The signals that stop a server.

use std::io;

use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// How the server was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// SIGTERM: a supervisor's, which may have others to tell first.
    Terminate,
    /// SIGINT, or SIGHUP: a person's, or that of a terminal that was closed.
    Interrupt,
}

/// Watches from its creation on, so that an early signal is not lost.
pub(crate) struct Signals {
    terminate: Stream,
    interrupt: Stream,
    hangup: Stream,
}

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    pub(crate) async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::Terminate,
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.hangup.recv() => Signal::Interrupt,
        }
    }
}
