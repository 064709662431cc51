//! A client's network, which can be gone for the client alone.

use crate::{Server, proxy::Proxy};

/// Two proxies, one after the other: the near one can swallow all that the client
/// says and hears while the far one shows the server that it has gone.
#[derive(Debug)]
pub struct Network {
    near: Proxy,
    far: Proxy,
}

impl Network {
    /// All passes, for now.
    pub async fn to(server: &Server) -> Self {
        let far = Proxy::start(server.grpc()).await;
        let near = Proxy::start(far.address()).await;
        Self { near, far }
    }

    /// What the client is to call.
    pub fn url(&self) -> String {
        format!("http://{}", self.near.address())
    }

    /// From now on the client hears nothing. The server sees it go, and renews
    /// no longer: so there is another holder as early as can be.
    pub async fn swallow(&self) {
        self.near.black_hole();
        self.far.cut().await;
    }

    /// The server sees the client go, which may come back.
    pub async fn cut(&self) {
        self.far.cut().await;
    }

    /// All passes again, on new connections.
    pub async fn heal(&self) {
        self.near.reset().await;
        self.near.forward().await;
    }
}
