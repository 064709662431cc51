//! Which steps are possible when, for the checker.

use stateright::{Model, Property};

use crate::{
    Mutation, World, properties,
    state::{Call, Data, Ghost, Identity, Kept, Past, Replica, SPAN, State, Step},
};

/// One atomic step: `who` is a replica, `grant` the n-th that was ever committed,
/// `n` a past.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are explained above")]
pub enum Action {
    /// A caller sends Acquire. Requests of one parity are one owner's.
    Begin { who: usize, request: u8 },
    /// The call's next step in the database; the state says which.
    Go { who: usize },
    /// The answer is handed to the caller.
    Answer { who: usize },
    /// The caller has gone before that, or the answer is lost before the replica.
    Leave { who: usize },
    /// The replica gives back what a caller has left.
    GiveBack { who: usize },
    /// The lease's time is over.
    Expire,
    /// The holder releases.
    Release,
    /// The row is deleted.
    Purge,
    /// A holder, perhaps one of long ago, writes to the destination.
    Write { grant: usize },
    /// The log is flushed by itself.
    Flush,
    /// A standby catches up; a backup or a dump is made.
    Keep { n: usize },
    /// A crash that Postgres recovers from in place.
    Crash,
    /// A crash, and a new start.
    Restart,
    /// A standby is promoted; its clock is ahead by so much.
    Promote { n: usize, clock_ahead: u8 },
    /// A dump's tables are restored.
    Restore { n: usize },
    /// The dump's end sets the sequence.
    EndDump,
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let data = Data {
            row: None,
            last: SPAN,
            file: 1,
            identity: Identity {
                server: 1,
                file: 1,
                first_token: SPAN,
            },
        };
        let replica = Replica {
            step: Step::Idle,
            call: Call::default(),
            highest: 0,
            is_checked: true,
            orphan: None,
        };
        let pasts = self.pasts.iter().map(|&kind| Kept {
            kind,
            data: (kind == Past::SynchronousStandby).then(|| data.clone()),
            is_used: false,
        });
        vec![State {
            live: data.clone(),
            disk: data.clone(),
            server: 1,
            clock_ahead: 0,
            time: 1 + self.apart,
            files: 1,
            dump_ends_at: None,
            lock: None,
            pasts: pasts.collect(),
            replicas: vec![replica; self.replicas],
            calls: 0,
            callers: 0,
            faults: 0,
            ghost: Ghost::default(),
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for (who, replica) in s.replicas.iter().enumerate() {
            match replica.step {
                // All replicas are alike, and so are both owners: the first to call is the first.
                Step::Idle if s.calls < self.calls && who <= s.callers => {
                    let requests = if s.calls == 0 { 1 } else { self.requests };
                    let begin = |request| Action::Begin { who, request };
                    actions.extend((0..requests).map(begin));
                }
                Step::Idle => {}
                Step::Decided { .. } => {
                    actions.extend([Action::Answer { who }, Action::Leave { who }]);
                }
                // These wait for the row's lock.
                Step::Retry { .. } | Step::Proposed { .. } | Step::Unusable { .. }
                    if s.lock.is_some() => {}
                // ALTER SEQUENCE waits for all who have drawn.
                Step::Leap { .. } if s.replicas.iter().any(|r| r.step.has_drawn()) => {}
                _ => actions.push(Action::Go { who }),
            }
            // SKIP LOCKED: a locked row is left for later.
            let orphan = replica.orphan.as_ref().filter(|_| s.lock.is_none());
            if orphan.is_some_and(|orphan| self.finds(s, orphan)) {
                actions.push(Action::GiveBack { who });
            }
        }
        self.ends(s, actions);
        self.faults(s, actions);
        for (grant, g) in s.ghost.grants.iter().enumerate() {
            // What is refused changes nothing.
            let is_news = s.ghost.newest != Some(grant);
            if g.is_told && is_news && g.token >= s.ghost.fence {
                actions.push(Action::Write { grant });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        match action {
            Action::Begin { who, request } => self.begin(&mut s, who, request),
            Action::Go { who } => self.go(&mut s, who),
            Action::Answer { who } => {
                if let Step::Decided {
                    grant,
                    is_new,
                    is_kept,
                } = last.replicas[who].step
                {
                    self.answer(&mut s, who, grant, is_new, is_kept);
                }
            }
            Action::Leave { who } => {
                if let Step::Decided { grant, is_new, .. } = last.replicas[who].step {
                    self.leave(&mut s, who, grant, is_new);
                }
            }
            Action::GiveBack { who } => {
                let orphan = s.replicas[who].orphan.take()?;
                self.give_back(&mut s, &orphan);
            }
            Action::Expire => self.expire(&mut s),
            Action::Release => self.release(&mut s),
            Action::Purge => self.purge(&mut s),
            Action::Write { grant } => {
                let ghost = &mut s.ghost;
                ghost.fence = ghost.grants[grant].token;
                ghost.was_overrun |= ghost.newest.is_some_and(|newest| newest > grant);
                ghost.newest = ghost.newest.max(Some(grant));
            }
            Action::Flush => self.flush(&mut s),
            Action::Keep { n } => self.keep(&mut s, n),
            Action::Crash => self.crash(&mut s, false),
            Action::Restart => self.crash(&mut s, true),
            Action::Promote { n, clock_ahead } => self.promote(&mut s, n, clock_ahead),
            Action::Restore { n } => self.restore(&mut s, n),
            Action::EndDump => self.end_dump(&mut s, last.dump_ends_at?),
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}

impl World {
    fn go(&self, s: &mut State, who: usize) {
        match s.replicas[who].step {
            Step::Sent => self.look(s, who),
            Step::Retry { token } => self.replay(s, who, token),
            Step::Free => self.propose(s, who),
            Step::Proposed { token } => self.lock(s, who, token),
            Step::Locked { proposed } => self.set(s, who, proposed),
            Step::Written { token } => self.grant(s, who, token),
            Step::Unusable { token } => self.refuse(s, who, token),
            Step::Leap { floor, always } => self.leap(s, who, floor, always),
            Step::Idle | Step::Decided { .. } => {}
        }
    }

    /// What ends a lease, and a row.
    fn ends(&self, s: &State, actions: &mut Vec<Action>) {
        let Some(row) = &s.live.row else { return };
        if row.is_live {
            actions.push(Action::Expire);
            if s.lock.is_none() && s.ghost.grants[row.grant].is_told {
                actions.push(Action::Release);
            }
        } else if s.lock.is_none() {
            // The retention is longer than any statement: none that looked before
            // the row's last change is still under way.
            let is_overtaken = s.replicas.iter().any(|r| r.call.is_overtaken);
            if !is_overtaken || self.has(Mutation::PurgeAtOnce) {
                actions.push(Action::Purge);
            }
        }
    }

    fn faults(&self, s: &State, actions: &mut Vec<Action>) {
        if self.has(Mutation::AnswerBeforeFlush) && s.disk != s.live {
            actions.push(Action::Flush);
        }
        if s.dump_ends_at.is_some() {
            actions.push(Action::EndDump);
        }
        let is_left = s.faults < self.faults;
        for (n, kept) in s.pasts.iter().enumerate() {
            if is_left && !kept.is_used && kept.data.as_ref() != Some(&s.disk) {
                actions.push(Action::Keep { n });
            }
            let is_next = s.pasts[..n].iter().all(|before| before.is_used);
            match kept.kind {
                _ if !is_left || !is_next || kept.data.is_none() => {}
                Past::Dump => actions.push(Action::Restore { n }),
                _ => actions
                    .extend((0..=self.skew).map(|clock_ahead| Action::Promote { n, clock_ahead })),
            }
        }
        if is_left && self.crashes {
            actions.extend([Action::Crash, Action::Restart]);
        }
    }
}
