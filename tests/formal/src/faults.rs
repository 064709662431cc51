//! Commits, crashes, pasts, and the leap that comes after them.

use crate::{
    Mutation, World,
    state::{GAP, Identity, Past, SPAN, State, Step, Token},
};

impl World {
    /// What is committed is flushed, and with a synchronous standby is there too,
    /// before anybody sees it.
    pub(crate) fn commit(&self, s: &mut State) {
        if !self.has(Mutation::AnswerBeforeFlush) {
            self.flush(s);
        }
    }

    /// All of the log so far reaches the disk.
    pub(crate) fn flush(&self, s: &mut State) {
        s.disk = s.live.clone();
        for kept in &mut s.pasts {
            if kept.kind == Past::SynchronousStandby && !kept.is_used {
                kept.data = Some(s.disk.clone());
            }
        }
    }

    /// A standby catches up, or a backup or dump is made.
    pub(crate) fn keep(&self, s: &mut State, n: usize) {
        s.pasts[n].data = Some(s.disk.clone());
    }

    /// Transactions end and nothing of them stays.
    fn cut(&self, s: &mut State) {
        s.faults += 1;
        s.lock = None;
        for who in 0..s.replicas.len() {
            if s.replicas[who].step.is_in_transaction() {
                s.finish(who);
            }
        }
    }

    /// The server is gone, and connections with it. Through a pooler, a replica's
    /// own connection does not notice.
    fn disconnect(&self, s: &mut State) {
        self.cut(s);
        for replica in &mut s.replicas {
            replica.is_checked &= self.pooler;
        }
    }

    /// What was promised may be forgotten.
    fn lose(&self, s: &mut State) {
        if self.has(Mutation::LeasesPromisedThroughFailover) {
            return;
        }
        s.ghost.promised = 0;
        for replica in &mut s.replicas {
            if let Step::Decided { is_kept, .. } = &mut replica.step {
                *is_kept = false;
            }
        }
    }

    /// A backend dies and Postgres recovers in place, or Postgres restarts: then it
    /// has another start time.
    pub(crate) fn crash(&self, s: &mut State, is_restart: bool) {
        self.disconnect(s);
        s.live = s.disk.clone();
        s.server += u8::from(is_restart);
        s.dump_ends_at = None;
    }

    /// A standby, or a server on a base backup, takes over. The old one is gone.
    pub(crate) fn promote(&self, s: &mut State, n: usize, clock_ahead: u8) {
        let Some(data) = s.pasts[n].data.take() else {
            return;
        };
        s.pasts[n].is_used = true;
        self.disconnect(s);
        if s.pasts[n].kind != Past::SynchronousStandby {
            self.lose(s);
        }
        s.live = data.clone();
        s.disk = data;
        s.server += 1;
        s.clock_ahead = clock_ahead;
        s.dump_ends_at = None;
    }

    /// A dump is restored into the running server, whose connections stay: tables
    /// first, the sequence a new one.
    pub(crate) fn restore(&self, s: &mut State, n: usize) {
        let Some(data) = s.pasts[n].data.take() else {
            return;
        };
        s.pasts[n].is_used = true;
        self.cut(s);
        self.lose(s);
        s.dump_ends_at = Some(data.last);
        s.files += 1;
        s.live = data;
        s.live.last = 0;
        s.live.file = s.files;
        s.disk = s.live.clone();
    }

    /// The end of the dump sets the sequence, whatever has been drawn by now.
    pub(crate) fn end_dump(&self, s: &mut State, at: Token) {
        s.dump_ends_at = None;
        s.live.last = at;
        self.flush(s);
    }

    /// `leap_v1`: one transaction under the identity's lock, with the sequence locked.
    pub(crate) fn leap(&self, s: &mut State, who: usize, floor: Token, always: bool) {
        s.replicas[who].step = Step::Sent;
        if s.identity_holds() && !always && s.live.last > floor {
            return;
        }
        let mut past = s.live.last.max(floor);
        let now = Token::from(s.time + s.clock_ahead) * SPAN;
        if always || now <= past {
            past = s.live.row.as_ref().map_or(past, |row| past.max(row.token));
        }
        let to = if now > past && !self.has(Mutation::RelativeLeap) {
            now
        } else {
            past + GAP
        };
        s.files += 1;
        s.live.last = to;
        s.live.file = s.files;
        s.live.identity = Identity {
            server: s.server,
            file: s.files,
            first_token: to,
        };
        s.time += self.apart;
        self.flush(s);
    }
}
