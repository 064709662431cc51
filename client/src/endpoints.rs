//! The servers to talk to, from the text that names them.

use std::time::Duration;

use tonic::transport::{Endpoint, Uri};

/// How long a connection attempt may take before the next server is tried.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A connection that is waited for is probed this often, so that one which leads
/// nowhere any longer is given up well within a usual lease.
const PING_INTERVAL: Duration = Duration::from_secs(3);
/// How long such a probe waits for its answer: a slow connection is better than
/// none.
const PING_LIMIT: Duration = Duration::from_secs(5);

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
    /// Another scheme than `http`. TLS is for a proxy in front.
    #[error("the scheme must be http; it should look like http://127.0.0.1:50051")]
    Scheme,
    /// A user name, a password, a path or a query, which would be ignored.
    #[error("must have nothing but a host and a port; it should look like http://127.0.0.1:50051")]
    MoreThanAnAddress,
}

/// Each endpoint, in their order. Nothing is connected yet.
pub(crate) fn parse(
    endpoints: &str,
    connect_timeout: Duration,
) -> Result<Vec<Endpoint>, EndpointsError> {
    let numbered = endpoints.split(',').zip(1..);
    numbered
        .map(|(text, position)| {
            parse_one(text.trim())
                .map(|endpoint| endpoint.connect_timeout(connect_timeout))
                .map_err(|problem| EndpointsError { position, problem })
        })
        .collect()
}

fn parse_one(text: &str) -> Result<Endpoint, EndpointProblem> {
    if text.is_empty() {
        return Err(EndpointProblem::Empty);
    }
    let uri: Uri = text.parse().map_err(|_| EndpointProblem::NotAUrl)?;
    let authority = uri.authority().ok_or(EndpointProblem::NotAUrl)?;
    if uri.scheme_str() != Some("http") {
        return Err(EndpointProblem::Scheme);
    }
    if authority.as_str().contains('@') || !matches!(uri.path(), "" | "/") || uri.query().is_some()
    {
        return Err(EndpointProblem::MoreThanAnAddress);
    }
    if authority.host().is_empty() {
        return Err(EndpointProblem::NotAUrl);
    }
    Ok(Endpoint::from(uri)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_LIMIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lists() {
        let count = |text| parse(text, CONNECT_LIMIT).map(|endpoints| endpoints.len());
        assert_eq!(count("http://127.0.0.1:50051"), Ok(1));
        assert_eq!(count(" http://a:1 , http://[::1]:2/ "), Ok(2));
        let problem = |position, problem| Err(EndpointsError { position, problem });
        use EndpointProblem::{Empty, MoreThanAnAddress, NotAUrl, Scheme};
        assert_eq!(count(""), problem(1, Empty));
        assert_eq!(count("http://a:1,"), problem(2, Empty));
        assert_eq!(count("http://a:1,127.0.0.1:50051"), problem(2, Scheme));
        assert_eq!(count("https://a:1"), problem(1, Scheme));
        assert_eq!(count("http://a b"), problem(1, NotAUrl));
        assert_eq!(count("http://"), problem(1, NotAUrl));
        assert_eq!(count("/a"), problem(1, NotAUrl));
        assert_eq!(count("http://u:secret@a:1"), problem(1, MoreThanAnAddress));
        assert_eq!(count("http://a:1/path"), problem(1, MoreThanAnAddress));
        assert_eq!(count("http://a:1?x=1"), problem(1, MoreThanAnAddress));
    }
}
