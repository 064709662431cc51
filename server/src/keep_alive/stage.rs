//! What the tests of this module need.

use std::time::Duration;

use super::{Keep, KeepAliveConfig};
use crate::{
    lock::{FencingToken, Owner, Resource},
    store::Renew,
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
