//! The token rule as a model, and a checker that goes through all of it.
//!
//! What is checked is the design, not the code: that its rules, taken together, leave no
//! order of events in which an older lease gets the better of a newer one; and that each
//! rule is needed, since without it the checker finds such an order. What ships is
//! `server/src/store/migrations/*.sql` and `server/src/store/`; the names here are theirs.
//!
//! # The system
//!
//! One resource, so one row, and one sequence. *Replicas* (servers of Fencepost) share the
//! database, know nothing of each other, and take one call at a time. A caller may send the
//! same request to two of them, one after the other or at once.
//!
//! The database is what its statements see ([`State`]'s `live`), what a crash would leave
//! (`disk`), and *pasts*: standbys, base backups and dumps, each a copy of `disk` at some
//! moment. A sequence knows no transactions: what `nextval` gave is given, and is on disk
//! with the next commit that is flushed.
//!
//! # Acquire
//!
//! Each line is one atomic step; between any two of them everybody else may take any number
//! (`acquire.rs`; the names are the states of `Step`).
//!
//! ```text
//! Sent      the statement takes its snapshot. Another identity than the running server's and
//!           its sequence file's: -> Leap. The row is this request's own and live: -> Retry;
//!           its own and over: spent. Another owner's and live: held. Otherwise: -> Free
//! Retry     waits for the row's lock. Still that live lease: claims + 1, commit -> Decided.
//!           Otherwise -> Sent
//! Free      the INSERT evaluates the row it proposes, and draws a token for it -> Proposed
//! Proposed  waits for the row's lock, or for who is just inserting it. No row: inserts, with the
//!           token drawn before the wait -> Written. A row that is free, and not of this request:
//!           -> Locked. Otherwise -> Sent: looks again
//! Locked    draws the token, under the lock. Not above the row's last one, or below where the
//!           last leap went: the transaction fails -> Leap. Otherwise -> Written
//! Written   commits: flushed, on the synchronous standby if there is one, then visible, and
//!           only then is the lock free -> Decided
//! Decided   the replica has the answer. A new token that is not above all that the replica had
//!           seen when it sent the statement -> Unusable. Otherwise the caller is told. Or the
//!           caller has gone, or the answer is lost: a new lease (never a replay) is an orphan
//! Unusable  gives the lease back under its lock -> Leap
//! Leap      waits for all who have drawn (ALTER SEQUENCE), then in one transaction under the
//!           identity's lock: nothing if the identity holds by now and nothing forces it; else
//!           the sequence to T, or to S + 2^28 where T is not above S, in a new file; the
//!           identity becomes this server, this file, and where the leap went -> Sent
//! ```
//!
//! In a *round* (`acquire_all_v1`) the look locks a free row at once or passes it over (SKIP
//! LOCKED); a proposed row that meets one on insertion is no grant. What is not judged goes
//! singly.
//!
//! An orphan is given back when the row is not locked and is still live, of the attempt that
//! created it, and claimed once; its request is then forgotten. Release and expiry keep the
//! row. Purge deletes it when no statement is under way that began before its last change,
//! which is what a retention above every statement limit comes to.
//!
//! # What goes wrong
//!
//! - Postgres crashes and recovers in place (same start time), or starts anew (another).
//! - A standby that lags is promoted, and then a second one, which has followed the first or
//!   not. A base backup, a snapshot and a point in time are the same: a server with another
//!   start time on an older state, with another clock.
//! - A dump is restored into the running server: first tables and identity, with a sequence of
//!   its own that begins at nothing; at the end the sequence is set to what the dump says.
//!   Calls go on in between.
//! - Callers leave, answers are lost, requests are repeated on another replica.
//! - Any holder who was ever told, however long ago, writes to a destination that keeps the
//!   highest token it has seen and refuses smaller ones.
//!
//! # What must hold
//!
//! [`TOKENS_RISE`], [`TOKENS_RISE_FOR_CALLERS`], [`NO_TOKEN_TWICE`], [`THE_FENCE_HOLDS`] and
//! [`NOT_GIVEN_BACK`], in every state. They speak of grants that somebody was *told* of: what
//! nobody ever heard of may be lost and its token drawn again. The order of grants is that of
//! their commits, on whatever server. A replay is no new grant: after a failover it may hand out
//! an ended lease that came back, with its old token, which the fence then refuses. Answers
//! are not ordered among themselves: of two calls that overlap, the older grant may be told last.
//!
//! A lease, in contrast to its token, is promised only while nothing of the past is lost:
//! after an asynchronous failover or a restore, [`NOT_GIVEN_BACK`] speaks of new answers alone.
//!
//! # What it rests on
//!
//! - Clocks of two database servers disagree by less than the time between two leaps, and
//!   fewer tokens are drawn than the clock has ticks, 2^22 a second. `World::apart` and
//!   `World::skew` are these; the test `assumptions` sees the rule fail when they are equal.
//! - An old primary takes no more writes once a standby is promoted. Nothing here can fence it.
//! - Start times and sequence files are never used twice.
//! - What a flush has reported survives a crash (`fsync`).
//! - A restore takes tables away only between transactions, which the locks of DROP see to.
//! - Nothing else sets the sequence or the identity (a data-only restore, a machine rolled
//!   back with its memory): `advance-tokens` is for those, and not modelled.
//!
//! # What is left out, and why it may be
//!
//! - *Other resources.* They share the sequence, where their draws are gaps, and the identity.
//! - *Time.* A lease may end at any moment; the only clock that is read is the leap's. A past
//!   brings its leases back live even if their time is over: more than what can happen.
//! - *Renewals.* They change no token. A renewed lease is not given back and not replayed, so it
//!   has fewer ways to end than one that was not.
//! - *Steps inside a lock.* Retry, release, give-back and purge lock, judge, write and commit in
//!   one step: they touch nothing but the row and what is visible only with their commit. For
//!   the same reason the flush, the synchronous standby and visibility are one: nobody sees a
//!   commit that is not flushed, and a crash between them is one before or after.
//! - *Rows stay locked until the transaction ends*, also when the verdict was no. Here they are
//!   free at once, which lets more happen.
//! - *An answer lost after it was handed over* counts as told: the stronger reading.
//! - *Sequences log 32 values ahead.* Here each is logged with the next flush: more is lost.
//! - *`remaining`, deadlines, limits.* They only ever turn a grant into none.
//! - All replicas are alike, and so are both owners, so the first call is replica 0's and owner
//!   A's.
//!
//! The worlds are small ([`World`]): two or three calls, one or two faults. A violation needs two
//! grants and what lies between them; more calls only add gaps and leaps. That is an argument
//! and no proof, and what is not in the model is not checked: for that there are the tests
//! on a real Postgres (`tests/it/tokens_*`).

mod acquire;
mod check;
mod faults;
mod model;
mod properties;
mod state;
mod world;

pub use check::Findings;
pub use model::Action;
pub use properties::{
    GIVEN_BACK, NO_TOKEN_TWICE, NOT_GIVEN_BACK, REPLAYED, THE_FENCE_HOLDS, TOKENS_RISE,
    TOKENS_RISE_FOR_CALLERS, TOLD_TWICE,
};
pub use state::{Past, State};
pub use world::{Mutation, World};
