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
}
