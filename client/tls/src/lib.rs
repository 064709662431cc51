//! What all TLS of Fencepost has in common: one provider of cryptography, PEM
//! files whose faults are told without their contents, and a client's
//! configuration that follows its files.
//!
//! Certificates are renewed under way, often every few hours, by somebody who
//! replaces files. So nothing here reads a file once: whoever makes a new
//! connection asks for what the files hold now, and gets what they held before
//! when that cannot be used.

mod certificate;
mod client;
mod files;
mod looks;
#[cfg(feature = "postgres")]
pub mod postgres;
mod verify;

use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};

pub use certificate::Facts;
pub use client::{ClientTls, Roots, Trust};
pub use files::{BadFile, Pem, PemFile, Problem, identity};
pub use looks::{Hangs, Looks};

/// The one provider that is used, handed to each configuration: a default of the
/// process would be whichever library came first.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}
