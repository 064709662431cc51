//! Certificates of the tests' own making.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use crate::system::{PrivateDirectory, private_directory};

/// Longer than a test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// One that signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// What a certificate says that it is for.
#[derive(Clone, Copy, Debug)]
pub enum Usage {
    /// For clients alone.
    Client,
    /// For servers alone.
    Server,
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl Authority {
    /// A new one.
    pub fn new(name: &str) -> Self {
        let mut params = params(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_after = (now() + 24 * HOUR).into();
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Its own certificate, which others are to trust.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for this common name, and for these names and addresses, that
    /// lasts from now on for so long.
    pub fn issue(&self, name: &str, alternatives: &[&str], life: Duration) -> Issued {
        let mut params = params(name, alternatives);
        params.not_after = (now() + life).into();
        self.sign(params)
    }

    /// One that has expired.
    pub fn issue_expired(&self, name: &str, alternatives: &[&str]) -> Issued {
        let mut params = params(name, alternatives);
        params.not_after = (now() - HOUR).into();
        self.sign(params)
    }

    /// One that begins in so long, and lasts for some hours.
    pub fn issue_later(&self, name: &str, alternatives: &[&str], wait: Duration) -> Issued {
        let mut params = params(name, alternatives);
        params.not_before = (now() + wait).into();
        params.not_after = (now() + 3 * HOUR).into();
        self.sign(params)
    }

    /// One that says that it is for this, and lasts for some hours.
    pub fn issue_for(&self, name: &str, alternatives: &[&str], usage: Usage) -> Issued {
        let mut params = params(name, alternatives);
        params.not_after = (now() + 3 * HOUR).into();
        params.extended_key_usages = vec![match usage {
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
        }];
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Issued {
        let key = KeyPair::generate().expect("a key");
        Issued {
            certificate: params.signed_by(&key, &self.0).expect("a signature").pem(),
            key: key.serialize_pem(),
        }
    }
}

fn params(name: &str, alternatives: &[&str]) -> CertificateParams {
    let alternatives: Vec<_> = alternatives.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(alternatives).expect("names of a certificate");
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (now() - 2 * HOUR).into();
    params
}

#[expect(
    clippy::disallowed_methods,
    reason = "certificates last by the wall clock"
)]
fn now() -> SystemTime {
    SystemTime::now()
}

/// A directory for PEM files, gone when it is dropped.
#[derive(Debug)]
pub struct Folder(PrivateDirectory);

impl Default for Folder {
    fn default() -> Self {
        Self(private_directory())
    }
}

impl Folder {
    /// Where a file of this name is, or would be.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The same, as text.
    pub fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Writes a file, or replaces it as a whole.
    pub fn write(&self, name: &str, contents: &str) -> PathBuf {
        let (path, part) = (self.path(name), self.path("part"));
        fs::write(&part, contents).expect("room on the disk");
        fs::rename(&part, &path).expect("a file can be replaced");
        path
    }

    /// Writes `NAME.crt`, then `NAME.key`.
    pub fn write_both(&self, name: &str, issued: &Issued) {
        self.write(&format!("{name}.crt"), &issued.certificate);
        self.write(&format!("{name}.key"), &issued.key);
    }
}
