//! A client of the lock service by the generated stubs alone: for Fencepost,
//! and for the server that does nothing, which hears the same calls.

use fencepost_proto::v1::{
    AcquireRequest, ReleaseRequest, RenewRequest, lock_service_client::LockServiceClient,
};
use tonic::transport::Channel;
use uuid::Uuid;

use super::TTL_S;
use crate::load::{Client, Result};

pub(crate) type Stub = LockServiceClient<Channel>;

/// A holder of one name.
pub(crate) struct Holder {
    pub(crate) stub: Stub,
    pub(crate) resource: String,
    pub(crate) owner: String,
    pub(crate) fencing_token: i64,
}

impl Holder {
    pub(crate) fn new(channel: &Channel, resource: String, n: usize) -> Self {
        Self {
            stub: Stub::new(channel.clone()),
            resource,
            owner: format!("client-{n}"),
            fencing_token: 0,
        }
    }
}

/// A client for each name, on these connections in turn.
pub(super) fn clients(channels: &[Channel], names: &[String]) -> Vec<Box<dyn Client>> {
    let numbered = names.iter().zip(channels.iter().cycle()).enumerate();
    let boxed = numbered.map(|(n, (name, channel))| {
        Box::new(Holder::new(channel, name.clone(), n)) as Box<dyn Client>
    });
    boxed.collect()
}

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        // As the client library asks.
        let request = AcquireRequest {
            resource: self.resource.clone(),
            owner: self.owner.clone(),
            ttl: Some(prost_types::Duration {
                seconds: TTL_S.into(),
                nanos: 0,
            }),
            request_id: Uuid::new_v4().to_string(),
            ..AcquireRequest::default()
        };
        let answer = self.stub.acquire(request).await?.into_inner();
        if let Some(lock) = answer.lock {
            self.fencing_token = lock.fencing_token;
        }
        Ok(answer.acquired)
    }

    async fn release(&mut self) -> Result<()> {
        let request = ReleaseRequest {
            resource: self.resource.clone(),
            owner: self.owner.clone(),
            fencing_token: self.fencing_token,
        };
        self.stub.release(request).await?;
        Ok(())
    }

    async fn renew(&mut self) -> Result<()> {
        let request = RenewRequest {
            resource: self.resource.clone(),
            owner: self.owner.clone(),
            fencing_token: self.fencing_token,
            ttl: None,
        };
        self.stub.renew(request).await?;
        Ok(())
    }
}
