//! PEM files, and what can be wrong with them.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{Mode, OFlags, open};
use tokio_rustls::rustls::{
    Error, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};

use crate::{certificate::Facts, provider};

/// How long a file may be: several times all the roots that a machine trusts.
const MOST: u64 = 1 << 20;

/// A file under the name that its user gave it by: a flag, or a parameter of a URL.
#[derive(Debug, Clone)]
pub struct PemFile {
    name: &'static str,
    path: PathBuf,
}

/// Why a file cannot be used. Tells its name, and nothing of its path or contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{name} {problem}")]
pub struct BadFile {
    /// What names the file.
    pub name: &'static str,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It is not there, or not for us.
    #[error("cannot be read: {0}")]
    Unreadable(io::ErrorKind),
    /// A pipe, a device, a directory.
    #[error("is not a regular file")]
    NotAFile,
    /// Longer than any certificates are.
    #[error("is larger than 1 MiB")]
    TooLarge,
    /// A read has not ended in time.
    #[error("cannot be read: the file system does not answer")]
    Hangs,
    /// No certificate in it.
    #[error("holds no certificate in PEM")]
    NoCertificate,
    /// One that cannot be used.
    #[error("holds a certificate that cannot be used")]
    BadCertificate,
    /// Its first certificate is over.
    #[error("holds a certificate that has expired")]
    Expired,
    /// Its first certificate begins later.
    #[error("holds a certificate that is not valid yet")]
    NotYet,
    /// Its first certificate is for others.
    #[error(
        "holds a certificate that is not for servers (its extended key usage lacks serverAuth)"
    )]
    NotForServers,
    /// No key in it.
    #[error("holds no private key in PEM, or one with a passphrase")]
    NoKey,
    /// One that cannot be used.
    #[error("holds a private key that cannot be used")]
    BadKey,
    /// A key of another certificate.
    #[error("does not match the certificate")]
    OtherKey,
}

impl PemFile {
    /// Nothing is read yet.
    pub fn new(name: &'static str, path: impl AsRef<Path>) -> Self {
        Self {
            name,
            path: path.as_ref().to_owned(),
        }
    }

    /// What it holds now.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    pub fn read(&self) -> Result<Pem, BadFile> {
        let name = self.name;
        match contents(&self.path) {
            Ok(bytes) => Ok(Pem { name, bytes }),
            Err(problem) => Err(BadFile { name, problem }),
        }
    }
}

/// Waits for nobody who may write into a pipe, and reads no disk into memory.
fn contents(path: &Path) -> Result<Vec<u8>, Problem> {
    let unreadable = |error: io::Error| Problem::Unreadable(error.kind());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::empty()).map_err(|error| unreadable(error.into()))?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(Problem::NotAFile);
    }
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    let read = file.take(MOST + 1).read_to_end(&mut bytes);
    match read.map_err(unreadable)? as u64 {
        ..=MOST => Ok(bytes),
        _ => Err(Problem::TooLarge),
    }
}

/// What a file held when it was read.
#[derive(Clone, PartialEq, Eq)]
pub struct Pem {
    name: &'static str,
    bytes: Vec<u8>,
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pem")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Pem {
    /// This file is bad.
    #[must_use]
    pub fn bad(&self, problem: Problem) -> BadFile {
        let name = self.name;
        BadFile { name, problem }
    }

    /// The certificates in it, at least one.
    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, BadFile> {
        let all: Vec<_> = CertificateDer::pem_slice_iter(&self.bytes)
            .collect::<Result<_, _>>()
            .map_err(|_| self.bad(Problem::BadCertificate))?;
        if all.is_empty() {
            return Err(self.bad(Problem::NoCertificate));
        }
        Ok(all)
    }

    /// Those that it says to trust, at least one.
    ///
    /// # Errors
    ///
    /// When there is none, or one that is none.
    pub fn roots(&self) -> Result<RootCertStore, BadFile> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates()? {
            roots
                .add(certificate)
                .map_err(|_| self.bad(Problem::BadCertificate))?;
        }
        Ok(roots)
    }
}

/// A certificate with those that lead to its root, its private key, and what it
/// says.
///
/// # Errors
///
/// When one of the two cannot be used, or they do not belong together.
pub fn identity(certificate: &Pem, key: &Pem) -> Result<(Arc<CertifiedKey>, Facts), BadFile> {
    let chain = certificate.certificates()?;
    let facts = chain.first().and_then(Facts::of);
    let facts = facts.ok_or(certificate.bad(Problem::BadCertificate))?;
    let secret = PrivateKeyDer::from_pem_slice(&key.bytes).map_err(|_| key.bad(Problem::NoKey))?;
    let certified = CertifiedKey::from_der(chain, secret, &provider());
    let certified = certified.map_err(|error| match error {
        Error::InconsistentKeys(_) => key.bad(Problem::OtherKey),
        Error::InvalidCertificate(_) => certificate.bad(Problem::BadCertificate),
        _ => key.bad(Problem::BadKey),
    })?;
    Ok((Arc::new(certified), facts))
}
