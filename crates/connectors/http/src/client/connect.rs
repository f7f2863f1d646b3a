//! From a host name to a connection: resolve, check the addresses, connect, shake hands. Each step is a phase.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use url::{Host, Url};

use super::{
    ClientConfig, SendError, UrlError,
    address::{Resolve, is_private},
    chain,
    pool::Connection,
    progress::{Metered, Phase, Progress, Traffic},
    tls::Tls,
};

/// Addresses tried for one connection; a name with more is a mistake or an attack.
const ADDRESSES_MAX: usize = 16;
/// An answer's header block is refused beyond this.
const ANSWER_HEAD_BYTES_MAX: usize = 64 * 1024;

/// Opens connections to one origin.
pub(super) struct Opener {
    host: Host,
    port: u16,
    peer: String,
    server_name: Option<ServerName<'static>>,
    connect_timeout: Duration,
    block_private_addresses: bool,
    resolver: Arc<dyn Resolve>,
    tls: Tls,
}

impl Opener {
    pub(super) fn new(config: ClientConfig) -> Result<Self, UrlError> {
        let url: &Url = &config.url;
        let host = url.host().ok_or_else(|| UrlError("the url has no host".to_owned()))?.to_owned();
        let port = url.port_or_known_default().ok_or_else(|| UrlError("the url has no port".to_owned()))?;
        let server_name = match url.scheme() {
            "http" => None,
            "https" => Some(server_name(&host)?),
            other => return Err(UrlError(format!("{other} is not supported: a url begins with http or https"))),
        };
        Ok(Self {
            peer: format!("{host}:{port}"),
            host,
            port,
            server_name,
            connect_timeout: config.connect_timeout,
            block_private_addresses: config.block_private_addresses,
            resolver: config.resolver,
            tls: config.tls,
        })
    }

    /// Of the TLS files; a connection of an older one is not used again.
    pub(super) fn generation(&self) -> u64 {
        self.tls.generation()
    }

    /// Looks whether the TLS files have changed, so that kept connections with an old certificate are retired.
    pub(super) fn refresh(&self) {
        if self.server_name.is_some()
            && let Err(error) = self.tls.config()
        {
            tracing::warn!(peer = %self.peer, %error, "TLS files cannot be used; the next connection will fail");
        }
    }

    /// Opens a connection.
    pub(super) async fn open(&self, progress: &Progress) -> Result<Connection, SendError> {
        progress.enter(Phase::Resolving);
        let addresses = self.allowed_addresses().await?;
        progress.enter(Phase::Connecting);
        let tcp = self.connect(&addresses).await?;
        let traffic = Arc::new(Traffic::default());
        match &self.server_name {
            None => self.start(Metered::new(tcp, traffic.clone()), traffic, 0).await,
            Some(name) => {
                progress.enter(Phase::Handshake);
                let config = self.tls.config()?;
                let generation = self.tls.generation();
                let tls = TlsConnector::from(config)
                    .connect(name.clone(), tcp)
                    .await
                    .map_err(|error| SendError::Handshake { peer: self.peer.clone(), reason: chain(&error) })?;
                self.start(Metered::new(tls, traffic.clone()), traffic, generation).await
            }
        }
    }

    async fn allowed_addresses(&self) -> Result<Vec<SocketAddr>, SendError> {
        let mut addresses = match &self.host {
            Host::Ipv4(address) => vec![SocketAddr::new((*address).into(), self.port)],
            Host::Ipv6(address) => vec![SocketAddr::new((*address).into(), self.port)],
            Host::Domain(name) => self.lookup(name).await?,
        };
        if self.block_private_addresses {
            let private: Vec<_> = addresses.iter().filter(|a| is_private(a.ip())).map(|a| a.ip().to_string()).collect();
            addresses.retain(|address| !is_private(address.ip()));
            if addresses.is_empty() {
                return Err(SendError::Private { host: self.host.to_string(), addresses: private.join(", ") });
            }
        }
        addresses.truncate(ADDRESSES_MAX);
        Ok(addresses)
    }

    async fn lookup(&self, name: &str) -> Result<Vec<SocketAddr>, SendError> {
        let failed = |reason: String| SendError::Resolve { host: name.to_owned(), reason };
        let found = self.resolver.resolve(name, self.port).await.map_err(|error| failed(error.to_string()))?;
        if found.is_empty() { Err(failed("it has no address".to_owned())) } else { Ok(found) }
    }

    /// Tries the addresses in turn; each gets its share of what is left of the connect time.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<TcpStream, SendError> {
        let end = Instant::now() + self.connect_timeout;
        let mut failure = None;
        for (tried, address) in addresses.iter().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(addresses.len() - tried).unwrap_or(1);
            match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    // Without it small requests wait for the peer's delayed acknowledgement.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "TCP_NODELAY cannot be set");
                    }
                    return Ok(stream);
                }
                Ok(Err(error)) => {
                    failure = Some(SendError::Connect { peer: self.peer.clone(), reason: error.to_string() });
                }
                Err(_) => {
                    failure = Some(SendError::ConnectTimeout {
                        peer: self.peer.clone(),
                        limit_ms: self.connect_timeout.as_millis(),
                    });
                }
            }
        }
        Err(failure.unwrap_or_else(|| SendError::Resolve {
            host: self.host.to_string(),
            reason: "it has no address".to_owned(),
        }))
    }

    async fn start<S>(&self, stream: S, traffic: Arc<Traffic>, generation: u64) -> Result<Connection, SendError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(ANSWER_HEAD_BYTES_MAX)
            .handshake::<_, Full<bytes::Bytes>>(TokioIo::new(stream))
            .await
            .map_err(|error| SendError::Connect { peer: self.peer.clone(), reason: chain(&error) })?;
        let driver = tokio::spawn(async move {
            // Whoever waits for an answer on this connection gets the same error.
            if let Err(error) = connection.await {
                tracing::trace!(error = %chain(&error), "connection ended");
            }
        });
        Ok(Connection::new(sender, traffic, generation, AbortOnDropHandle::new(driver)))
    }
}

fn server_name(host: &Host) -> Result<ServerName<'static>, UrlError> {
    match host {
        Host::Domain(name) => {
            ServerName::try_from(name.clone()).map_err(|_| UrlError(format!("{name} is no host name for TLS")))
        }
        Host::Ipv4(address) => Ok(ServerName::from(std::net::IpAddr::from(*address))),
        Host::Ipv6(address) => Ok(ServerName::from(std::net::IpAddr::from(*address))),
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::TlsFiles;

    struct Fixed(Vec<SocketAddr>);

    #[async_trait]
    impl Resolve for Fixed {
        async fn resolve(&self, _host: &str, _port: u16) -> std::io::Result<Vec<SocketAddr>> {
            Ok(self.0.clone())
        }
    }

    fn opener(addresses: &[&str]) -> Opener {
        Opener::new(ClientConfig {
            url: "http://receiver.test:80/".parse().unwrap(),
            connect_timeout: Duration::from_secs(1),
            idle_max: 1,
            block_private_addresses: true,
            resolver: Arc::new(Fixed(addresses.iter().map(|address| address.parse().unwrap()).collect())),
            tls: Tls::new(TlsFiles::default(), false),
        })
        .unwrap()
    }

    /// Case D43: names with public and private addresses at the same time.
    #[tokio::test]
    async fn d43_only_the_public_addresses_of_a_name_are_tried() {
        let allowed = opener(&["203.0.113.10:80", "127.0.0.1:80", "[::1]:80"]).allowed_addresses().await.unwrap();
        assert_eq!(allowed, ["203.0.113.10:80".parse().unwrap()]);
        let error = opener(&["127.0.0.1:80", "[::ffff:10.0.0.1]:80"]).allowed_addresses().await.unwrap_err();
        assert!(error.to_string().contains("127.0.0.1, ::ffff:10.0.0.1"), "{error}");
    }
}
