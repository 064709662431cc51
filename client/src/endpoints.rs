//! The servers to talk to, from the text that names them.

use std::{sync::Arc, time::Duration};

use fencepost_tls::ClientTls;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::connect::{Trouble, connect_lazy, server_name};

/// How long a connection attempt may take before the next server is tried.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A connection that is waited for is probed this often, so that one which leads
/// nowhere any longer is given up well within a usual lease.
const PING_INTERVAL: Duration = Duration::from_secs(3);
/// How long such a probe waits for its answer: a slow connection is better than
/// none.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// Calls given up on whose late answers are known as such. h2 ends a connection, and all
/// its calls, after a thousand answers in its lifetime to calls that it has forgotten.
const REMEMBERED: usize = 10_000;
/// Longer than a connection may say nothing.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// Why a list of endpoints cannot be used.
///
/// It tells which one by number and not by its text, which may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {position}: {problem}")]
#[non_exhaustive]
pub struct EndpointsError {
    /// Which of the comma-separated endpoints, from 1.
    pub position: usize,
    /// What is wrong with it.
    pub problem: EndpointProblem,
}

/// What is wrong with an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointProblem {
    /// Nothing there.
    #[error("empty; it should look like http://127.0.0.1:50051")]
    Empty,
    /// Not a URL with a host.
    #[error("not a URL; it should look like http://127.0.0.1:50051")]
    NotAUrl,
    /// Another scheme than `http` or `https`.
    #[error("the scheme must be http or https; it should look like http://127.0.0.1:50051")]
    Scheme,
    /// Something else than a port where a port belongs.
    #[error(
        "the port must be a number from 1 to 65535; it should look like http://127.0.0.1:50051"
    )]
    Port,
    /// A user name, a password, a path or a query, which would be ignored.
    #[error("must have nothing but a host and a port; it should look like http://127.0.0.1:50051")]
    MoreThanAnAddress,
}

/// One server, and how to connect to it.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    /// As it was written.
    pub(crate) name: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) is_secure: bool,
}

impl Address {
    /// Connects with the first call. `tls` is there when any address is secure.
    pub(crate) fn connect_lazy(
        &self,
        connect_timeout: Duration,
        tls: Option<&Arc<ClientTls>>,
        trouble: &Trouble,
    ) -> Channel {
        let tls = tls.filter(|_| self.is_secure);
        connect_lazy(&self.endpoint, connect_timeout, tls, trouble)
    }
}

/// Each endpoint, in their order. Nothing is connected yet.
pub(crate) fn parse(endpoints: &str) -> Result<Vec<Address>, EndpointsError> {
    let numbered = endpoints.split(',').zip(1..);
    numbered
        .map(|(text, position)| {
            parse_one(text.trim()).map_err(|problem| EndpointsError { position, problem })
        })
        .collect()
}

fn parse_one(text: &str) -> Result<Address, EndpointProblem> {
    if text.is_empty() {
        return Err(EndpointProblem::Empty);
    }
    let uri: Uri = text.parse().map_err(|_| EndpointProblem::NotAUrl)?;
    let authority = uri.authority().ok_or(EndpointProblem::NotAUrl)?;
    let is_secure = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return Err(EndpointProblem::Scheme),
    };
    // The parser drops what follows a '#'.
    let more = authority.as_str().contains('@') || text.contains('#');
    if more || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(EndpointProblem::MoreThanAnAddress);
    }
    if server_name(&uri).is_none() {
        return Err(EndpointProblem::NotAUrl);
    }
    // It takes what is no port for none.
    let port = &authority.as_str()[authority.host().len()..];
    if !port.is_empty() && !is_port(port) {
        return Err(EndpointProblem::Port);
    }
    let name = uri.to_string();
    let endpoint = if is_secure {
        let port = authority.port_u16().unwrap_or(443);
        let plain = format!("http://{}:{port}", authority.host());
        let plain = Endpoint::from_shared(plain).map_err(|_| EndpointProblem::NotAUrl)?;
        plain.origin(uri)
    } else {
        Endpoint::from(uri)
    };
    let endpoint = endpoint
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_LIMIT)
        .http2_max_concurrent_reset_streams(REMEMBERED)
        .http2_reset_stream_duration(REMEMBERED_FOR);
    Ok(Address {
        name,
        endpoint,
        is_secure,
    })
}

/// With its colon.
fn is_port(text: &str) -> bool {
    let digits = text.strip_prefix(':').unwrap_or_default();
    let all = digits.bytes().all(|byte| byte.is_ascii_digit());
    all && digits.parse().is_ok_and(|port: u16| port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lists() {
        let count = |text| parse(text).map(|addresses| addresses.len());
        for (text, servers) in [
            ("http://127.0.0.1:50051", 1),
            (" http://a:1 , http://[::1]:2/ ", 2),
            ("https://a:1,https://[::1]", 2),
            ("http://a_b.c-d.:65535", 1),
        ] {
            assert_eq!(count(text), Ok(servers), "{text}");
        }
        use EndpointProblem::{Empty, MoreThanAnAddress, NotAUrl, Port, Scheme};
        for (text, position, problem) in [
            ("", 1, Empty),
            ("http://a:1,", 2, Empty),
            ("http://a:1,127.0.0.1:50051", 2, Scheme),
            ("localhost", 1, Scheme),
            ("ftp://a:1", 1, Scheme),
            ("http://a b", 1, NotAUrl),
            ("http://", 1, NotAUrl),
            ("http://:50051", 1, NotAUrl),
            ("https://:50051", 1, NotAUrl),
            ("http://.:1", 1, NotAUrl),
            ("http://::1:50051", 1, NotAUrl),
            ("http://fe80::1", 1, NotAUrl),
            ("http://[::1:50051", 1, NotAUrl),
            ("http://[a]:1", 1, NotAUrl),
            ("http://[127.0.0.1]:1", 1, NotAUrl),
            ("http://[::1]1", 1, Port),
            ("http://127.0.0.256:1", 1, NotAUrl),
            ("/a", 1, NotAUrl),
            ("http://a:notaport", 1, Port),
            ("https://a:1,https://a:notaport", 2, Port),
            ("http://a:", 1, Port),
            ("http://a:0", 1, Port),
            ("http://a:70000", 1, Port),
            ("http://a:+1", 1, Port),
            ("http://a:-1", 1, Port),
            ("http://[::1]:x", 1, Port),
            ("http://u:secret@a:1", 1, MoreThanAnAddress),
            ("http://a:1/path", 1, MoreThanAnAddress),
            ("http://a:1?x=1", 1, MoreThanAnAddress),
            ("http://a:1#x", 1, MoreThanAnAddress),
        ] {
            let error = Err(EndpointsError { position, problem });
            assert_eq!(count(text), error, "{text}");
        }
    }
}
