//! What the tests of this module need.

use std::time::Duration;

use super::{Keep, KeepAliveConfig};
use crate::{
    lock::{FencingToken, Owner, Resource},
    metrics::Metrics,
    store::{Limits, Renew, Store, StoreConfig, SynchronousCommit},
};

pub(super) const CONFIG: KeepAliveConfig = KeepAliveConfig {
    max_duration: Duration::from_secs(10),
    max_streams: 1,
    singles: 1,
    request_timeout: Duration::from_secs(10),
};

/// What a stream asks for, with nothing set that may be unset.
pub(super) fn keep() -> Keep {
    Keep {
        renew: Renew {
            resource: Resource::new("r".to_owned()).unwrap(),
            owner: Owner::stored("o".to_owned()),
            token: FencingToken::stored(1),
            ttl: None,
        },
        max_duration: None,
        caller_deadline: None,
    }
}

/// A store that nobody answers.
pub(super) fn store() -> Store {
    let config = StoreConfig {
        pgbouncer: false,
        pool_size: 1,
        max_in_flight: 1,
        synchronous_commit: SynchronousCommit::On,
        allow_fsync_off: false,
        purge_retention: Duration::from_secs(3600),
        limits: Limits::within(CONFIG.request_timeout),
    };
    let url = "postgresql://nobody@127.0.0.1:1/none".parse().unwrap();
    Store::new(&url, config, Metrics::new(0).store).unwrap()
}
