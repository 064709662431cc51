//! The client's side: whom to trust, and who to be.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_rustls::rustls::{
    ClientConfig, RootCertStore, client::WebPkiServerVerifier, client::danger::ServerCertVerifier,
    sign::SingleCertAndKey,
};

use crate::{
    files::{BadFile, Pem, PemFile, Problem, identity},
    looks::Looks,
    provider,
    verify::AnyName,
};

/// Who may sign a server's certificate.
#[derive(Debug, Clone)]
pub enum Roots {
    /// Those that the machine trusts.
    System,
    /// Those in a file.
    File(PemFile),
}

/// Which servers to trust.
#[derive(Debug, Clone)]
pub enum Trust {
    /// Those with a certificate of these roots for the name that was dialled.
    Name(Roots),
    /// Those with a certificate of these roots, for whatever name.
    Chain(Roots),
    /// All of them: against those who listen only.
    Anybody,
}

/// A client's configuration, which follows its files.
#[derive(Debug)]
pub struct ClientTls {
    trust: Trust,
    /// The certificate and its key.
    identity: Option<(PemFile, PemFile)>,
    protocols: Vec<Vec<u8>>,
    /// The machine's own are not looked for again.
    system: Arc<RootCertStore>,
    now: Mutex<Now>,
    looks: Looks,
}

#[derive(Debug)]
struct Now {
    files: Files,
    config: Arc<ClientConfig>,
    /// What was said last of files that cannot be used.
    said: Option<BadFile>,
}

/// What the files held.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Files {
    roots: Option<Pem>,
    identity: Option<(Pem, Pem)>,
}

impl ClientTls {
    /// Reads the files. `protocols` are those of ALPN.
    ///
    /// # Errors
    ///
    /// When one of them cannot be used.
    pub fn new(
        trust: Trust,
        identity: Option<(PemFile, PemFile)>,
        protocols: &[&[u8]],
    ) -> Result<Self, BadFile> {
        let mut system = RootCertStore::empty();
        if let Trust::Name(Roots::System) | Trust::Chain(Roots::System) = trust {
            system.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if system.is_empty() {
                return Err(BadFile {
                    name: "the machine's list of trusted certificates",
                    problem: Problem::NoCertificate,
                });
            }
        }
        let protocols: Vec<_> = protocols.iter().map(|name| name.to_vec()).collect();
        let system = Arc::new(system);
        let files = Files::read(&trust, identity.as_ref())?;
        let config = build(&trust, &system, &files, &protocols)?;
        Ok(Self {
            trust,
            identity,
            protocols,
            system,
            now: Mutex::new(Now {
                files,
                config,
                said: None,
            }),
            looks: Looks::default(),
        })
    }

    /// For a new connection: as the files have it now, or had it when they could
    /// last be used.
    pub async fn current(self: &Arc<Self>) -> Arc<ClientConfig> {
        let tls = Arc::clone(self);
        if self.looks.look(move || tls.look()).await.is_err() {
            self.now().tell(BadFile {
                name: "one of the TLS files",
                problem: Problem::Hangs,
            });
        }
        Arc::clone(&self.now().config)
    }

    /// Whether there is a certificate to show to those who ask for one.
    #[must_use]
    pub fn has_identity(&self) -> bool {
        self.identity.is_some()
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn trust(&self) -> &Trust {
        &self.trust
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        // This may hang, so nothing is locked meanwhile.
        let files = Files::read(&self.trust, self.identity.as_ref());
        let mut now = self.now();
        match files.and_then(|files| self.follow(files, &mut now)) {
            Ok(()) => now.said = None,
            Err(bad) => now.tell(bad),
        }
    }

    fn follow(&self, files: Files, now: &mut Now) -> Result<(), BadFile> {
        if files != now.files {
            now.config = build(&self.trust, &self.system, &files, &self.protocols)?;
            now.files = files;
        }
        Ok(())
    }
}

impl Now {
    /// Once, until something else is the matter.
    fn tell(&mut self, bad: BadFile) {
        if self.said.replace(bad) != Some(bad) {
            tracing::warn!(error = %bad, "a TLS file cannot be used: what it held before stays");
        }
    }
}

impl Files {
    fn read(trust: &Trust, identity: Option<&(PemFile, PemFile)>) -> Result<Self, BadFile> {
        let roots = match trust {
            Trust::Name(Roots::File(file)) | Trust::Chain(Roots::File(file)) => Some(file.read()?),
            _ => None,
        };
        let identity = match identity {
            Some((certificate, key)) => Some((certificate.read()?, key.read()?)),
            None => None,
        };
        Ok(Self { roots, identity })
    }
}

fn build(
    trust: &Trust,
    system: &Arc<RootCertStore>,
    files: &Files,
    protocols: &[Vec<u8>],
) -> Result<Arc<ClientConfig>, BadFile> {
    let provider = provider();
    let roots = match &files.roots {
        Some(file) => Arc::new(file.roots()?),
        None => Arc::clone(system),
    };
    let any_name = |roots| {
        let provider = Arc::clone(&provider);
        Arc::new(AnyName { roots, provider })
    };
    let verifier: Arc<dyn ServerCertVerifier> = match trust {
        // It refuses an empty store alone, and revocation lists, of which there are none.
        Trust::Name(_) => WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|_| no_certificate(files))?,
        Trust::Chain(_) => any_name(Some(roots)),
        Trust::Anybody => any_name(None),
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|_| no_certificate(files))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match &files.identity {
        Some((certificate, key)) => {
            let (certified, _) = identity(certificate, key)?;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = protocols.to_vec();
    Ok(Arc::new(config))
}

/// For what cannot happen to stores that were checked to hold something.
fn no_certificate(files: &Files) -> BadFile {
    match &files.roots {
        Some(file) => file.bad(Problem::NoCertificate),
        None => BadFile {
            name: "TLS",
            problem: Problem::NoCertificate,
        },
    }
}
