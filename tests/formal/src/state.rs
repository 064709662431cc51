//! What there is: a server with its data, its copies, the replicas, and what
//! the checker remembers so as to judge.

/// A fencing token.
pub(crate) type Token = u16;

/// How many tokens there are between two readings of a clock: 2^22 a second.
pub(crate) const SPAN: Token = 64;

/// How far a relative leap goes, beyond all that can have been lost: 2^28.
pub(crate) const GAP: Token = 4 * SPAN;

/// Everything at one moment.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct State {
    /// What statements see: committed rows, and the sequence, which knows no transactions.
    pub(crate) live: Data,
    /// What a crash would leave: the log up to its last flush.
    pub(crate) disk: Data,
    /// `pg_postmaster_start_time()`: another number for each start of any server.
    pub(crate) server: u8,
    /// How far this server's clock is ahead of the slowest.
    pub(crate) clock_ahead: u8,
    /// The time, in units in which it is `Model::apart` from one leap to the next.
    pub(crate) time: u8,
    /// The newest file of a sequence anywhere.
    pub(crate) files: u8,
    /// A dump is being restored: where its end will set the sequence.
    pub(crate) dump_ends_at: Option<Token>,
    /// Whose transaction holds the lock of the row, or is bringing it into being.
    pub(crate) lock: Option<usize>,
    /// What standbys, backups and dumps hold.
    pub(crate) pasts: Vec<Kept>,
    /// The servers of Fencepost, each with one call at a time.
    pub(crate) replicas: Vec<Replica>,
    pub(crate) calls: u8,
    /// How many replicas have been called so far.
    pub(crate) callers: usize,
    pub(crate) faults: u8,
    pub(crate) ghost: Ghost,
}

/// The contents of a database.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) row: Option<Row>,
    /// The last token that the sequence gave.
    pub(crate) last: Token,
    /// Where the sequence is stored.
    pub(crate) file: u8,
    pub(crate) identity: Identity,
}

/// `fencepost.identity`.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) server: u8,
    pub(crate) file: u8,
    pub(crate) first_token: Token,
}

/// The row of the one resource in `fencepost.locks`.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Row {
    /// The acquisition, which names its owner as well; none once given back.
    pub(crate) request: Option<u8>,
    pub(crate) is_live: bool,
    pub(crate) token: Token,
    pub(crate) attempt: u8,
    pub(crate) claims: u8,
    /// Ghost: which grant this is.
    pub(crate) grant: usize,
}

/// What a standby, a base backup or a dump holds.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) kind: Past,
    /// None before the first time, and once it has taken over.
    pub(crate) data: Option<Data>,
    pub(crate) is_used: bool,
}

/// Where an older state of the database is kept, and how it takes over.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Past {
    /// A standby that lags, or a base backup or snapshot: started as a server of its own.
    Standby,
    /// A standby that each commit waits for.
    SynchronousStandby,
    /// A dump: restored into the server that runs.
    Dump,
}

/// A server of Fencepost, and its connection.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Replica {
    pub(crate) step: Step,
    pub(crate) call: Call,
    /// The highest token that it has seen.
    pub(crate) highest: Token,
    /// Whether the identity was compared on this connection.
    pub(crate) is_checked: bool,
    pub(crate) orphan: Option<Orphan>,
}

/// An Acquire under way.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) request: u8,
    pub(crate) attempt: u8,
    /// Its round could not judge it: it goes singly.
    pub(crate) is_alone: bool,
    /// The replica's `highest` when the statement was sent.
    pub(crate) highest: Token,
    /// `first_token`, as the statement's look saw it.
    pub(crate) first_token: Token,
    /// The row changed since the statement's look.
    pub(crate) is_overtaken: bool,
    /// Ghost: the highest token that anybody had been told when the call began.
    pub(crate) floor: Token,
}

/// Where a call is.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Step {
    /// No call.
    Idle,
    /// The statement is on its way.
    Sent,
    /// It saw its own request in the row: lock, then judge.
    Retry { token: Token },
    /// It saw the resource free: propose a row.
    Free,
    /// The proposed row has a token; now for the row's lock.
    Proposed { token: Token },
    /// The row is locked, and the verdict is: granted.
    Locked { proposed: Token },
    /// The row is written, and not committed.
    Written { token: Token },
    /// Committed as a new lease or a replay. `is_kept`: no failover or restore has come since.
    Decided {
        grant: usize,
        is_new: bool,
        is_kept: bool,
    },
    /// The grant's token is not above all that was seen: give it back first.
    Unusable { token: Token },
    /// The sequence must leap before the statement is repeated.
    Leap { floor: Token, always: bool },
}

impl Step {
    /// Whether a transaction on the server is under way.
    pub(crate) fn is_in_transaction(&self) -> bool {
        matches!(
            self,
            Self::Retry { .. }
                | Self::Free
                | Self::Proposed { .. }
                | Self::Locked { .. }
                | Self::Written { .. }
        )
    }

    /// Whether that transaction has called `nextval`, and so keeps ALTER SEQUENCE out.
    pub(crate) fn has_drawn(&self) -> bool {
        matches!(
            self,
            Self::Proposed { .. } | Self::Locked { .. } | Self::Written { .. }
        )
    }
}

/// A lease whose caller has gone.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Orphan {
    pub(crate) attempt: u8,
    pub(crate) token: Token,
}

/// What nobody in the system knows, and the properties speak of.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub(crate) struct Ghost {
    /// All grants that were ever committed, on any server, in that order.
    pub(crate) grants: Vec<Grant>,
    /// Grants that somebody was told of and that no failover or restore has lost, as bits.
    pub(crate) promised: u8,
    /// One of those was given back.
    pub(crate) was_robbed: bool,
    /// The highest token that the destination has admitted.
    pub(crate) fence: Token,
    /// The newest grant that it has admitted.
    pub(crate) newest: Option<usize>,
    /// It has admitted an older one after that.
    pub(crate) was_overrun: bool,
    /// A replay was told.
    pub(crate) was_replayed: bool,
    /// An orphan was given back.
    pub(crate) was_given_back: bool,
}

/// One lease, from its commit on.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) token: Token,
    pub(crate) floor: Token,
    pub(crate) server: u8,
    pub(crate) is_told: bool,
}

impl State {
    pub(crate) fn identity_holds(&self) -> bool {
        self.live.identity.server == self.server && self.live.identity.file == self.live.file
    }

    /// `nextval`.
    pub(crate) fn draw(&mut self) -> Token {
        self.live.last += 1;
        assert!(
            !self.live.last.is_multiple_of(SPAN),
            "more tokens were drawn than fit between two readings of a clock"
        );
        self.live.last
    }

    /// The row changed: statements that looked before are late.
    pub(crate) fn overtake(&mut self) {
        for replica in &mut self.replicas {
            if replica.step.is_in_transaction() {
                replica.call.is_overtaken = true;
            }
        }
    }

    /// The call is over.
    pub(crate) fn finish(&mut self, who: usize) {
        let replica = &mut self.replicas[who];
        replica.step = Step::Idle;
        replica.call = Call::default();
    }

    /// The answer has reached the caller.
    pub(crate) fn tell(&mut self, grant: usize, is_kept: bool) {
        self.ghost.grants[grant].is_told = true;
        if is_kept {
            self.ghost.promised |= 1 << grant;
        }
    }

    /// The highest token that anybody was told.
    pub(crate) fn highest_told(&self) -> Token {
        let told = self.ghost.grants.iter().filter(|grant| grant.is_told);
        told.map(|grant| grant.token).max().unwrap_or(0)
    }
}
