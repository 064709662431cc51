//! The terminal that we were started from.
//!
//! Only one process group of a session may read from it and is told of its keys.
//! The command's must be that, or a shell or an editor in it would be stopped at
//! its first read; and ours again at the end, for whoever has started us.

use std::fs::{File, OpenOptions};

use nix::sys::signal::{SigSet, Signal};
use rustix::{
    process::{Pid, getpgrp},
    termios::{tcgetpgrp, tcsetpgrp},
};

/// The controlling terminal, if there is one.
pub(super) struct Terminal {
    device: Option<File>,
    handed_over: bool,
}

impl Terminal {
    pub(super) fn ours() -> Self {
        Self {
            device: OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/tty")
                .ok(),
            handed_over: false,
        }
    }

    /// Gives the terminal to this group, if it is ours to give. Whether it was.
    pub(super) fn hand_to(&mut self, group: Pid) -> bool {
        self.handed_over = self.device.as_ref().is_some_and(|device| {
            tcgetpgrp(device) == Ok(getpgrp()) && tcsetpgrp(device, group).is_ok()
        });
        self.handed_over
    }

    /// Takes it back, if it was given. Whether it was.
    pub(super) fn take_back(&mut self) -> bool {
        let Some(device) = self.device.as_ref().filter(|_| self.handed_over) else {
            return false;
        };
        self.handed_over = false;
        // Who is not in the foreground is stopped by TTOU for asking, unless it is
        // blocked. The mask is this thread's, and it is put back.
        let before = SigSet::thread_get_mask();
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTTOU);
        if blocked.thread_block().is_err() {
            return false;
        }
        let taken = tcsetpgrp(device, getpgrp()).is_ok();
        if let Ok(before) = before {
            let _: nix::Result<()> = before.thread_set_mask();
        }
        taken
    }
}
