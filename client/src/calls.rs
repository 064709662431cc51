//! The contract's calls, one to one, for callers that keep the lease themselves.

use std::{sync::Arc, time::Duration};

use fencepost_proto::v1;
use uuid::Uuid;

use crate::{
    AcquireOptions, Acquisition, Error, KeepAlive, KeepAliveOptions, Lock,
    client::Shared,
    owner,
    wire::{Key, Wire, proto_ttl},
};

/// The calls of the contract. Nothing is renewed or given back here unless it is
/// asked for: a program that holds a lock while it works wants a
/// [`Guard`](crate::Guard). For a lease that outlives its process, such as one of
/// a script. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Calls {
    pub(crate) shared: Arc<Shared>,
}

impl Calls {
    /// Takes the lock, or learns who has it. Never waits for the holder.
    ///
    /// # Errors
    ///
    /// [`RequestSpent`](Error::RequestSpent) when the lease of this
    /// `request_id` is gone, which also happens when an answer was lost and the
    /// lease expired before the call was repeated; else
    /// [`Invalid`](Error::Invalid), [`Unavailable`](Error::Unavailable),
    /// [`TimedOut`](Error::TimedOut), [`Rejected`](Error::Rejected) or
    /// [`Internal`](Error::Internal). [`wait`](AcquireOptions::wait) and
    /// [`margin`](AcquireOptions::margin) mean nothing here.
    pub async fn acquire(
        &self,
        resource: &str,
        options: AcquireOptions,
    ) -> Result<Acquisition, Error> {
        let request = acquire_request(resource, options)?;
        let answer = self.run(async move |wire| wire.acquire(request).await);
        let (acquisition, _) = answer.await?;
        Ok(acquisition)
    }

    /// Makes the lease last for `ttl` from now on, or for its own time to live
    /// when that is `None`. It never gets shorter.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when the lease is over, also when nobody took the
    /// lock since; else as [`acquire`](Self::acquire).
    pub async fn renew(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
        ttl: Option<Duration>,
    ) -> Result<Lock, Error> {
        let key = key(resource, owner, fencing_token);
        let answer = self.run(async move |wire| wire.renew(&key, ttl).await);
        let (lock, _) = answer.await?;
        Ok(lock)
    }

    /// Gives the lock back.
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when there was nothing to give back; else as
    /// [`acquire`](Self::acquire).
    pub async fn release(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
    ) -> Result<(), Error> {
        let key = key(resource, owner, fencing_token);
        self.run(async move |wire| wire.release(&key).await).await
    }

    /// Opens a stream that renews the lease until the stream's own time is over.
    /// It is opened once, at the first server that takes it.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire). That the lease is over is said by
    /// [`KeepAlive::next`].
    pub async fn keep_alive(
        &self,
        resource: &str,
        owner: &str,
        fencing_token: i64,
        options: KeepAliveOptions,
    ) -> Result<KeepAlive, Error> {
        let key = key(resource, owner, fencing_token);
        let opened = self.run(async move |wire| wire.keep_alive(&key, options).await);
        Ok(KeepAlive {
            stream: opened.await?,
            _shared: Arc::clone(&self.shared),
        })
    }

    /// Looks at the lock: its live lease, or `None` when it is free. A caller
    /// that did not acquire a lease does not hold it, whatever token it sees.
    ///
    /// # Errors
    ///
    /// [`Invalid`](Error::Invalid), [`Unavailable`](Error::Unavailable),
    /// [`TimedOut`](Error::TimedOut), [`Rejected`](Error::Rejected) or
    /// [`Internal`](Error::Internal).
    pub async fn get(&self, resource: &str) -> Result<Option<Lock>, Error> {
        let resource = resource.to_owned();
        self.run(async move |wire| wire.get(resource).await).await
    }

    async fn run<T: Send + 'static, F>(&self, call: impl FnOnce(Wire) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        self.shared.thread.run(call(self.shared.wire())).await
    }
}

fn key(resource: &str, owner: &str, token: i64) -> Key {
    Key {
        resource: resource.to_owned(),
        owner: owner.to_owned(),
        token,
    }
}

/// # Errors
///
/// [`Invalid`](Error::Invalid) when a field cannot even be sent.
pub(crate) fn acquire_request(
    resource: &str,
    options: AcquireOptions,
) -> Result<v1::AcquireRequest, Error> {
    Ok(v1::AcquireRequest {
        resource: resource.to_owned(),
        owner: options.owner.unwrap_or_else(owner::unique),
        ttl: Some(proto_ttl(options.ttl)?),
        labels: options.labels.into_iter().collect(),
        request_id: options.request_id.unwrap_or_else(new_request_id),
    })
}

pub(crate) fn new_request_id() -> String {
    Uuid::new_v4().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Client;

    /// Callers spawn these.
    fn sendable<T: Send>(_: T) {}

    #[test]
    fn calls_can_be_spawned() -> Result<(), crate::BuildError> {
        let calls = Client::connect_lazy("http://127.0.0.1:1")?.calls();
        sendable(calls.acquire("r", AcquireOptions::default()));
        sendable(calls.renew("r", "o", 1, None));
        sendable(calls.release("r", "o", 1));
        sendable(calls.get("r"));
        sendable(calls.keep_alive("r", "o", 1, KeepAliveOptions::default()));
        Ok(())
    }
}
