//! The server's certificate and key, and the roots of its clients' certificates,
//! as files that are replaced under way.
//!
//! Their contents are looked at every second: no notice has to arrive, and a file
//! that is a link to a link, as a Kubernetes secret is, needs no special care. What
//! has changed is used for new connections. Those that are open keep what they
//! were made with, and so their streams and the locks on them.
//!
//! Files are written one after the other, so for a moment a key may not match its
//! certificate. What cannot be used changes nothing, and is an error only when it
//! stays so for some seconds: rubbish, or a file system that does not answer.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, UNIX_EPOCH},
};

use fencepost_tls::{BadFile, Facts, Looks, Pem, PemFile, Problem, identity, provider};
use tokio_rustls::rustls::{
    ServerConfig,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    sign::SingleCertAndKey,
};
use tokio_util::sync::CancellationToken;

use crate::metrics::TlsMetrics;

/// How often the files are looked at.
const PAUSE: Duration = Duration::from_secs(1);

/// How many looks in a row must find files that cannot be used.
const LOOKS: u32 = 3;

/// Which of them is not known.
const HANGS: BadFile = BadFile {
    name: "a file of --tls-cert, --tls-key or --tls-client-ca",
    problem: Problem::Hangs,
};

/// Where the files are.
#[derive(Debug, Clone)]
pub(crate) struct TlsFiles {
    pub(crate) certificate: PemFile,
    pub(crate) key: PemFile,
    /// When clients must have a certificate.
    pub(crate) client_ca: Option<PemFile>,
}

/// What they held.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Contents {
    certificate: Pem,
    key: Pem,
    client_ca: Option<Pem>,
}

/// TLS with what the files held when they could last be used.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    used: Mutex<Used>,
    looks: Looks,
}

#[derive(Debug)]
struct Used {
    contents: Contents,
    certificate: Facts,
    config: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files. A certificate that has expired, or is not valid yet, is used
    /// all the same: its successor will be as soon as it is there, or its time comes,
    /// without a start. And it is clients who judge it, by clocks of which this
    /// machine's may be the wrong one.
    pub(crate) fn new(files: TlsFiles) -> Result<Self, BadFile> {
        let used = Used::new(files.read()?)?;
        if let Some(problem) = used.certificate.untimely() {
            let bad = used.contents.certificate.bad(problem);
            tracing::warn!("{bad}; it is used, since there is no other, and clients may refuse it");
        }
        Ok(Self {
            files,
            used: Mutex::new(used),
            looks: Looks::default(),
        })
    }

    /// For a new connection.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&used.config)
    }

    /// Follows the files until `closing`.
    pub(crate) async fn follow(self: Arc<Self>, metrics: TlsMetrics, closing: CancellationToken) {
        self.tell(&metrics);
        let mut unusable = 0;
        let mut said = None;
        let follow = async {
            loop {
                tokio::time::sleep(PAUSE).await;
                let tls = Arc::clone(&self);
                let looked = self.looks.look(move || tls.look()).await;
                match looked.unwrap_or(Err(HANGS)) {
                    Ok(changed) => {
                        if said.is_some() && !changed {
                            tracing::info!("the TLS files can be used again");
                        }
                        (unusable, said) = (0, None);
                        metrics.unusable.set(0);
                        if changed {
                            self.tell(&metrics);
                        }
                    }
                    Err(bad) => {
                        unusable += 1;
                        if unusable >= LOOKS {
                            metrics.unusable.set(1);
                            if said.replace(bad) != Some(bad) {
                                metrics.reload_failures.inc();
                                tracing::warn!(
                                    error = %bad,
                                    "a TLS file cannot be used: the certificate before stays"
                                );
                            }
                        }
                    }
                }
            }
        };
        closing.run_until_cancelled(follow).await;
    }

    /// Whether the files have changed, and are used from now on.
    fn look(&self) -> Result<bool, BadFile> {
        let contents = self.files.read()?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if contents == used.contents {
            return Ok(false);
        }
        let new = Used::new(contents)?;
        // Of tomorrow's, a later look will find that it can be used.
        if let Some(problem) = new.certificate.untimely() {
            return Err(new.contents.certificate.bad(problem));
        }
        *used = new;
        Ok(true)
    }

    fn tell(&self, metrics: &TlsMetrics) {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let Facts { subject, ends, .. } = &used.certificate;
        let ends = ends.as_secs();
        metrics.expires.set(i64::try_from(ends).unwrap_or(i64::MAX));
        let ends = UNIX_EPOCH + Duration::from_secs(ends);
        let ends = humantime::format_rfc3339_seconds(ends);
        tracing::info!(subject, %ends, "new connections get this certificate");
    }
}

impl TlsFiles {
    fn read(&self) -> Result<Contents, BadFile> {
        let client_ca = self.client_ca.as_ref();
        Ok(Contents {
            certificate: self.certificate.read()?,
            key: self.key.read()?,
            client_ca: client_ca.map(PemFile::read).transpose()?,
        })
    }
}

impl Used {
    fn new(contents: Contents) -> Result<Self, BadFile> {
        let (certified, certificate) = identity(&contents.certificate, &contents.key)?;
        if !certificate.is_for_servers() {
            return Err(contents.certificate.bad(Problem::NotForServers));
        }
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|_| contents.key.bad(Problem::BadKey))?;
        let builder = match &contents.client_ca {
            Some(file) => {
                let roots = Arc::new(file.roots()?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|_| file.bad(Problem::NoCertificate))?;
                builder.with_client_cert_verifier(verifier)
            }
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
        config.alpn_protocols = vec![b"h2".to_vec()];
        // A session that goes on elsewhere would not show its certificate again,
        // which may have expired. Connections here live long: nothing is lost.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self {
            contents,
            certificate,
            config: Arc::new(config),
        })
    }
}
