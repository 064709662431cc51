//! Calls over a bare HTTP/2 connection.
//!
//! A generated client keeps deadlines by itself and answers them itself. Here
//! the headers go out as written, and what comes back is what the server said.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use prost::Message;
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::{Code, Status};

/// A bare HTTP/2 connection. Dropping it closes it.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    requests: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

impl Wire {
    /// Connects to a server.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address)
            .await
            .expect("the server accepts");
        let (requests, connection) = h2::client::handshake(stream)
            .await
            .expect("the server speaks HTTP/2");
        let driver = tokio::spawn(async move {
            // A broken connection shows at the call that is under way.
            let _ = connection.await;
        });
        Self {
            address,
            requests,
            driver,
        }
    }

    /// Calls `method` of the lock service with these headers beside the usual
    /// ones. The first message of the answer is returned still encoded.
    ///
    /// # Errors
    ///
    /// The status that the server answers.
    pub async fn call(
        &mut self,
        method: &str,
        headers: &[(&str, &str)],
        message: &impl Message,
    ) -> Result<Bytes, Status> {
        let service = fencepost_proto::v1::LOCK_SERVICE;
        let mut request = Request::post(format!("http://{}/{service}/{method}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).expect("headers are well formed");

        let body = message.encode_to_vec();
        let length = u32::try_from(body.len()).expect("a message below 4 GiB");
        let frame = [&[0][..], &length.to_be_bytes(), &body].concat();

        let broken = |error: h2::Error| Status::unavailable(format!("HTTP/2: {error}"));
        let mut requests = self.requests.clone().ready().await.map_err(broken)?;
        let (answer, mut stream) = requests.send_request(request, false).map_err(broken)?;
        stream.send_data(frame.into(), true).map_err(broken)?;
        let (head, mut body) = answer.await.map_err(broken)?.into_parts();
        let mut bytes = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.map_err(broken)?;
            let _ = body.flow_control().release_capacity(data.len());
            bytes.extend_from_slice(&data);
        }
        let trailers = body.trailers().await.map_err(broken)?;
        status(&head.headers, trailers.as_ref())?;
        Ok(Bytes::from(bytes).slice(5..))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The status in the trailers or, when there was no message, in the headers.
fn status(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> Result<(), Status> {
    let status = trailers
        .and_then(Status::from_header_map)
        .or_else(|| Status::from_header_map(headers))
        .unwrap_or_else(|| Status::unknown("no grpc-status in the answer"));
    match status.code() {
        Code::Ok => Ok(()),
        _ => Err(status),
    }
}
