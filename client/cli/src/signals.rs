//! Signals that come to us: to be handed on, or to end what we do.

use std::{fs, future::poll_fn, io, task::Poll};

use rustix::{
    io::Errno,
    process::{Signal, getpid, kill_process},
};
use tokio::signal::unix::{SignalKind, signal};

/// What can be handed on: not KILL and STOP, which nobody is told of; not CHLD and
/// PIPE, which are our own; not those that say that the process itself is broken.
const FORWARDED: [Signal; 13] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::TERM,
    Signal::CONT,
    Signal::TSTP,
    Signal::URG,
    Signal::VTALARM,
    Signal::PROF,
    Signal::WINCH,
];

/// Signals that are listened to, instead of doing what they do.
pub(crate) struct Signals {
    streams: Vec<(Signal, tokio::signal::unix::Signal)>,
}

impl Signals {
    /// From here on.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let streams = FORWARDED
            .into_iter()
            .filter(|signal| !is_in(ignored, *signal))
            .map(|number| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?)))
            .collect::<io::Result<_>>()?;
        Ok(Self { streams })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (number, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next one that is meant to end us. Others do what they do.
    pub(crate) async fn deadly(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::TSTP => {
                    // Returns when we are continued.
                    let _: Result<(), Errno> = kill_process(getpid(), Signal::STOP);
                }
                signal if ends_programs(signal) => return signal,
                _ => {}
            }
        }
    }
}

/// Whether a program that does nothing about this signal is ended by it.
pub(crate) fn ends_programs(signal: Signal) -> bool {
    ![Signal::CONT, Signal::TSTP, Signal::URG, Signal::WINCH].contains(&signal)
}

/// Which signals we were started with as ignored, such as HUP by nohup(1): so
/// they stay, for the command as well. A bit each; see proc_pid_status(5).
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

fn is_in(mask: u64, signal: Signal) -> bool {
    mask >> (signal.as_raw() - 1) & 1 == 1
}
