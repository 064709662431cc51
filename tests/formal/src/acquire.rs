//! Acquire, step by step as the database takes it, and what ends a lease.

use crate::{
    Mutation, World,
    state::{Call, Grant, Orphan, Row, State, Step, Token},
};

impl World {
    /// A caller asks a replica, for the first time or again.
    pub(crate) fn begin(&self, s: &mut State, who: usize, request: u8) {
        s.calls += 1;
        s.callers = s.callers.max(who + 1);
        s.replicas[who].call = Call {
            request,
            attempt: s.calls,
            floor: s.highest_told(),
            ..Call::default()
        };
        s.replicas[who].step = Step::Sent;
    }

    /// The statement takes its snapshot: the guard and the row, in one look.
    pub(crate) fn look(&self, s: &mut State, who: usize) {
        let holds = s.identity_holds();
        let first_token = s.live.identity.first_token;
        let is_round = self.rounds && !s.replicas[who].call.is_alone;
        let is_locked = s.lock.is_some();
        let replica = &mut s.replicas[who];
        if !(self.has(Mutation::GuardPerConnection) && replica.is_checked) {
            if !holds {
                replica.step = Step::Leap {
                    floor: 0,
                    always: false,
                };
                return;
            }
            replica.is_checked = true;
        }
        replica.call.highest = replica.highest;
        replica.call.first_token = first_token;
        replica.call.is_overtaken = false;

        let request = replica.call.request;
        let Some(row) = &s.live.row else {
            replica.step = Step::Free;
            return;
        };
        let is_retry = row.request == Some(request);
        if is_retry && is_round {
            replica.call.is_alone = true;
        } else if is_retry && row.is_live {
            replica.step = Step::Retry { token: row.token };
        } else if is_retry || is_held(row, request) {
            s.finish(who);
        } else if !is_round {
            replica.step = Step::Free;
        } else if is_locked {
            // SKIP LOCKED has passed it over.
            replica.call.is_alone = true;
        } else {
            replica.step = Step::Locked { proposed: 0 };
            s.lock = Some(who);
        }
    }

    /// Locks the row that the look took for the request's own, judges, adds a
    /// claim, commits.
    pub(crate) fn replay(&self, s: &mut State, who: usize, token: Token) {
        let call = s.replicas[who].call.clone();
        let Some(row) = s
            .live
            .row
            .as_mut()
            .filter(|row| row.is_live && row.token == token)
        else {
            s.replicas[who].step = Step::Sent;
            return;
        };
        row.claims = 2;
        if self.has(Mutation::GiveBackByLastAttempt) {
            row.attempt = call.attempt;
        }
        s.replicas[who].step = Step::Decided {
            grant: row.grant,
            is_new: false,
            is_kept: true,
        };
        self.commit(s);
    }

    /// The INSERT evaluates the row that it proposes.
    pub(crate) fn propose(&self, s: &mut State, who: usize) {
        let token = s.draw();
        s.replicas[who].step = Step::Proposed { token };
    }

    /// The INSERT finds the name absent and nobody bringing it into being, or locks
    /// the row that is there and evaluates `DO UPDATE … WHERE`.
    pub(crate) fn lock(&self, s: &mut State, who: usize, proposed: Token) {
        let call = &mut s.replicas[who].call;
        match &s.live.row {
            None => {
                s.lock = Some(who);
                self.write(s, who, proposed);
            }
            Some(_) if self.rounds && !call.is_alone => {
                call.is_alone = true;
                s.replicas[who].step = Step::Sent;
            }
            Some(row) if row.request == Some(call.request) || is_held(row, call.request) => {
                s.replicas[who].step = Step::Sent;
            }
            Some(_) => {
                s.lock = Some(who);
                s.replicas[who].step = Step::Locked { proposed };
            }
        }
    }

    /// `DO UPDATE SET` draws the token.
    pub(crate) fn set(&self, s: &mut State, who: usize, proposed: Token) {
        let token = if self.has(Mutation::TokenBeforeLock) {
            proposed
        } else {
            s.draw()
        };
        self.write(s, who, token);
    }

    /// The new row must pass the belts of the database.
    fn write(&self, s: &mut State, who: usize, token: Token) {
        let prev_token = s.live.row.as_ref().map_or(0, |row| row.token);
        let rises = token > prev_token || self.has(Mutation::NoRowCheck);
        let in_reign =
            token >= s.replicas[who].call.first_token || self.has(Mutation::NoFirstToken);
        s.replicas[who].step = if rises && in_reign {
            Step::Written { token }
        } else {
            s.lock = None;
            Step::Leap {
                floor: 0,
                always: true,
            }
        };
    }

    /// The commit of a grant: flushed, replicated where that is waited for, then
    /// visible, then the lock is free.
    pub(crate) fn grant(&self, s: &mut State, who: usize, token: Token) {
        let call = s.replicas[who].call.clone();
        let grant = s.ghost.grants.len();
        s.ghost.grants.push(Grant {
            token,
            floor: call.floor,
            server: s.server,
            is_told: false,
        });
        s.live.row = Some(Row {
            request: Some(call.request),
            is_live: true,
            token,
            attempt: call.attempt,
            claims: 1,
            grant,
        });
        s.lock = None;
        s.replicas[who].step = Step::Decided {
            grant,
            is_new: true,
            is_kept: true,
        };
        s.overtake();
        self.commit(s);
    }

    /// The answer reaches the replica, which judges it and hands it to the caller.
    pub(crate) fn answer(&self, s: &mut State, who: usize, grant: usize, is_new: bool, kept: bool) {
        let token = s.ghost.grants[grant].token;
        let replica = &mut s.replicas[who];
        if is_new && token <= replica.call.highest && !self.has(Mutation::NoHighest) {
            replica.step = Step::Unusable { token };
            return;
        }
        replica.highest = replica.highest.max(token);
        s.tell(grant, kept);
        s.ghost.was_replayed |= !is_new;
        s.finish(who);
    }

    /// The caller has gone, or the connection is lost after the commit.
    pub(crate) fn leave(&self, s: &mut State, who: usize, grant: usize, is_new: bool) {
        if is_new || self.has(Mutation::GiveBackByLastAttempt) {
            s.replicas[who].orphan = Some(Orphan {
                attempt: s.replicas[who].call.attempt,
                token: s.ghost.grants[grant].token,
            });
        }
        s.finish(who);
    }

    /// Whether giving back `orphan` would find its lease.
    pub(crate) fn finds(&self, s: &State, orphan: &Orphan) -> bool {
        s.live.row.as_ref().is_some_and(|row| {
            row.is_live
                && if self.has(Mutation::GiveBackByToken) {
                    row.token == orphan.token
                } else {
                    row.attempt == orphan.attempt
                        && (row.claims == 1 || self.has(Mutation::GiveBackByLastAttempt))
                }
        })
    }

    /// Gives a lease back that nobody was told of: lock, judge, write, commit.
    pub(crate) fn give_back(&self, s: &mut State, orphan: &Orphan) {
        if !self.finds(s, orphan) {
            return;
        }
        if let Some(row) = &mut s.live.row {
            row.is_live = false;
            row.request = None;
            s.ghost.was_robbed |= s.ghost.promised & (1 << row.grant) != 0;
        }
        s.ghost.was_given_back = true;
        s.overtake();
        self.commit(s);
    }

    /// The belt of the replica: the grant goes back, then the sequence leaps.
    pub(crate) fn refuse(&self, s: &mut State, who: usize, token: Token) {
        let attempt = s.replicas[who].call.attempt;
        self.give_back(s, &Orphan { attempt, token });
        s.replicas[who].step = Step::Leap {
            floor: s.replicas[who].call.highest,
            always: false,
        };
    }

    /// The lease's time is over: no write, the clock has gone on.
    pub(crate) fn expire(&self, s: &mut State) {
        let Some(grant) = s.live.row.as_ref().map(|row| row.grant) else {
            return;
        };
        for row in [&mut s.live.row, &mut s.disk.row].into_iter().flatten() {
            row.is_live &= row.grant != grant;
        }
        s.overtake();
    }

    /// The holder releases: lock, judge, write, commit.
    pub(crate) fn release(&self, s: &mut State) {
        if self.has(Mutation::ReleaseDeletesRow) {
            s.live.row = None;
        } else if let Some(row) = &mut s.live.row {
            row.is_live = false;
        }
        s.overtake();
        self.commit(s);
    }

    /// An idle row is deleted.
    pub(crate) fn purge(&self, s: &mut State) {
        s.live.row = None;
        self.commit(s);
    }
}

/// Two requests of one parity have one owner.
fn is_held(row: &Row, request: u8) -> bool {
    row.is_live && row.request.is_some_and(|held| held % 2 != request % 2)
}
