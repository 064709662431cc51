//! The audit log: what became of leases, told where the database's answer is read, so
//! that nothing depends on whether the caller still waits for it.
//!
//! Events of a target of their own, which [`telemetry`](crate::telemetry) writes as
//! JSON; disabled, an event costs a load and a branch. A refusal changes nothing and is
//! not told. What no answer says is not told either: a grant whose answer was lost
//! shows as the replay, the loss or the giving back of its lease; a release whose
//! answer was lost does not show.

use std::time::Duration;

use fencepost_proto::v1::reason;
use tracing::Level;

use super::{acquire::Ended, give_back::Orphan, release::Release, row};
use crate::{
    caller::Caller,
    lock::{Lease, Loss},
    telemetry::AUDIT,
};

fn is_on() -> bool {
    tracing::enabled!(target: AUDIT, Level::INFO)
}

fn peer(caller: &Caller) -> Option<String> {
    caller.peer().map(|peer| peer.to_string())
}

fn trace_id(caller: &Caller) -> Option<String> {
    caller.trace_id().map(|id| id.to_string())
}

/// A lease was granted, and may have ended another.
pub(super) fn granted(caller: &Caller, lease: &Lease, ended: Option<&Ended>) {
    if !is_on() {
        return;
    }
    if let Some(ended) = ended {
        tracing::info!(
            target: AUDIT,
            event = "lost",
            resource = lease.resource.as_str(),
            owner = ended.owner.as_str(),
            fencing_token = ended.token.get(),
            reason = reason(ended),
            next_owner = lease.owner.as_str(),
            next_fencing_token = lease.token.get(),
            peer = peer(caller),
            subject = caller.subject(),
            trace_id = trace_id(caller),
        );
    }
    let taken_over = ended.is_some_and(|ended| ended.how == Loss::Expired);
    let outcome = if taken_over { "taken_over" } else { "granted" };
    acquired(caller, lease, outcome);
}

/// As the answers say it that hear of such a loss.
fn reason(ended: &Ended) -> &'static str {
    match ended.how {
        Loss::Superseded => reason::TOKEN_SUPERSEDED,
        _ => reason::LOCK_EXPIRED,
    }
}

/// A lease was asked for again by the request that it was granted to.
pub(super) fn replayed(caller: &Caller, lease: &Lease) {
    if is_on() {
        acquired(caller, lease, "replayed");
    }
}

fn acquired(caller: &Caller, lease: &Lease, outcome: &str) {
    tracing::info!(
        target: AUDIT,
        event = "acquired",
        resource = lease.resource.as_str(),
        owner = lease.owner.as_str(),
        fencing_token = lease.token.get(),
        outcome,
        ttl_ms = millis(lease.ttl),
        labels = %row::labels_json(&lease.labels),
        peer = peer(caller),
        subject = caller.subject(),
        trace_id = trace_id(caller),
    );
}

pub(super) fn released(caller: &Caller, ask: &Release, held: Duration) {
    if is_on() {
        tracing::info!(
            target: AUDIT,
            event = "released",
            resource = ask.resource.as_str(),
            owner = ask.owner.as_str(),
            fencing_token = ask.token.get(),
            held_ms = millis(held),
            peer = peer(caller),
            subject = caller.subject(),
            trace_id = trace_id(caller),
        );
    }
}

/// A lease that nobody was told of has ended.
pub(super) fn given_back(orphan: &Orphan) {
    if is_on() {
        let (resource, owner) = orphan.names();
        tracing::info!(
            target: AUDIT,
            event = "given_back",
            resource = resource.as_str(),
            owner = owner.as_str(),
            fencing_token = orphan.token().map(|token| token.get()),
        );
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
