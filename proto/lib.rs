//! Generated stubs of `fencepost.v1`, the wire contract of Fencepost.
//!
//! The contract itself, with its units, ranges and traps, is
//! `proto/fencepost/v1/lock_service.proto`; the comments there come along as
//! the docs of these types.

/// Version 1 of the contract.
#[allow(unused_qualifications, reason = "generated code spells its paths out")]
pub mod v1 {
    tonic::include_proto!("fencepost.v1");

    /// The encoded descriptors of this package, for server reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("fencepost");

    /// The full name of the lock service, as health checks name it.
    pub const LOCK_SERVICE: &str = lock_service_server::SERVICE_NAME;

    /// The domain of our `google.rpc.ErrorInfo`.
    pub const ERROR_DOMAIN: &str = "fencepost";

    /// The reasons of our `google.rpc.ErrorInfo`, as the contract lists them.
    pub mod reason {
        /// A field, or the message, is not valid.
        pub const INVALID_REQUEST: &str = "INVALID_REQUEST";
        /// The database is away, read-only or too slow. It may have happened.
        pub const STORE_UNAVAILABLE: &str = "STORE_UNAVAILABLE";
        /// This server is stopping.
        pub const DRAINING: &str = "DRAINING";
        /// A stream's time is over: open the next one.
        pub const REOPEN: &str = "REOPEN";
        /// Too much is in flight. It did not happen.
        pub const OVERLOADED: &str = "OVERLOADED";
        /// The call's time is over. It may have happened.
        pub const DEADLINE: &str = "DEADLINE";
        /// A bug.
        pub const INTERNAL: &str = "INTERNAL";
        /// The lease of this `request_id` is over.
        pub const REQUEST_SPENT: &str = "REQUEST_SPENT";
        /// Terminal: there is no such lease.
        pub const LOCK_NOT_FOUND: &str = "LOCK_NOT_FOUND";
        /// Terminal: the lease has expired.
        pub const LOCK_EXPIRED: &str = "LOCK_EXPIRED";
        /// Terminal: another owner holds the lock.
        pub const NOT_OWNER: &str = "NOT_OWNER";
        /// Terminal: the same owner has a newer lease.
        pub const TOKEN_SUPERSEDED: &str = "TOKEN_SUPERSEDED";
        /// Terminal: a failover or a restore forgot the lease.
        pub const TOKEN_UNKNOWN: &str = "TOKEN_UNKNOWN";
    }
}
