//! TLS to a PostgreSQL, as libpq's parameters in its URL ask for it.
//!
//! The driver knows `sslmode` up to `require`, and neither verification nor files.
//! They are taken out of the URL here, and mean what they mean to libpq:
//!
//! | `sslmode` | TLS | the server's certificate |
//! |---|---|---|
//! | `disable` | no | |
//! | `prefer`, the default | if the server has it and it works | not looked at |
//! | `require` | yes | not looked at; with `sslrootcert` as `verify-ca` |
//! | `verify-ca` | yes | of a root in `sslrootcert` |
//! | `verify-full` | yes | and for the host's name |
//!
//! Unlike libpq's, a name is looked for in `subjectAltName` alone, no file has a
//! default place, and `allow` is refused. A Unix socket has no TLS, whatever is
//! asked for.

mod stream;
mod url;

use std::{error::Error as _, sync::Arc};

use tokio_postgres::{Client, Config, Connection, Error, Socket, config::SslMode};

pub use stream::{Handshake, NoHandshake, PostgresTls, Stream};
pub use url::{BadUrl, parse};

use crate::client::{ClientTls, Trust};

impl PostgresTls {
    /// Connects to the one host of `config`.
    ///
    /// # Errors
    ///
    /// As the driver's own; for `prefer` not when TLS alone has failed.
    pub async fn connect(
        &self,
        config: &Config,
    ) -> Result<(Client, Connection<Socket, Stream>), Error> {
        match config.connect(self.clone()).await {
            Err(error) if self.optional && is_handshake(&error) => {
                tracing::debug!(%error, "TLS does not work with this server, and is not asked for");
                let mut plain = config.clone();
                plain.ssl_mode(SslMode::Disable);
                plain.connect(self.clone()).await
            }
            connected => connected,
        }
    }

    fn new(client: Option<ClientTls>, optional: bool) -> Self {
        Self {
            client: client.map(Arc::new),
            optional,
        }
    }

    /// Whether the server on the other side is known to be the right one.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        let client = self.client.as_ref();
        client.is_some_and(|client| matches!(client.trust(), Trust::Name(_)))
    }
}

fn is_handshake(error: &Error) -> bool {
    error
        .source()
        .is_some_and(|source| source.downcast_ref::<NoHandshake>().is_some())
}
