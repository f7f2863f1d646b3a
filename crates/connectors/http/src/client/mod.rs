//! One HTTP/1.1 exchange at a time over kept connections to one origin.
//!
//! Invariants:
//! - A request is written at most once. It moves to another connection only when hyper gives it back unwritten.
//! - Each connection's address is resolved and checked when it is opened, and that very address is used.
//! - Dropping a call closes its connection at once; a connection goes back to the pool only after a whole answer.
//!
//! hyper's connections are used directly, because the phases of an attempt, the address really used and "was anything
//! written?" are invisible behind a ready-made client.

pub(crate) mod address;
mod connect;
mod pool;
pub(crate) mod progress;
pub(crate) mod tls;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Uri, response};
use http_body_util::Full;
use hyper::body::Incoming;
use url::Url;

use self::{
    address::Resolve,
    connect::Opener,
    pool::{Connection, Pool},
    progress::Progress,
    tls::{Tls, TlsError},
};

/// How a [`Client`] reaches its origin.
pub(crate) struct ClientConfig {
    pub(crate) url: Url,
    /// Longest time for the TCP connection.
    pub(crate) connect_timeout: Duration,
    /// Kept connections without a request.
    pub(crate) idle_max: usize,
    pub(crate) block_private_addresses: bool,
    pub(crate) resolver: Arc<dyn Resolve>,
    /// Used for `https` only.
    pub(crate) tls: Tls,
}

/// Kept connections and TLS files are looked over this often.
const SWEEP_INTERVAL: Duration = Duration::from_secs(15);

/// A client of one URL.
pub(crate) struct Client {
    shared: Arc<Shared>,
    host: HeaderValue,
    target: Uri,
}

struct Shared {
    opener: Opener,
    pool: Pool,
    sweeping: AtomicBool,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error("the host name {host} cannot be resolved: {reason}")]
    Resolve { host: String, reason: String },
    #[error("{host} has only private addresses ({addresses}), and blockPrivateAddresses forbids them")]
    Private { host: String, addresses: String },
    #[error("no connection to {peer}: {reason}")]
    Connect { peer: String, reason: String },
    #[error("no connection to {peer} within {limit_ms} ms (half of the time-out)")]
    ConnectTimeout { peer: String, limit_ms: u128 },
    #[error("the TLS handshake with {peer} failed: {reason}")]
    Handshake { peer: String, reason: String },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the connection was lost: {reason}")]
    Lost { reason: String, began: bool },
}

/// A URL that no request can be sent to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UrlError(String);

/// The head of an answer, and the connection on which its body comes.
pub(crate) struct Answer {
    pub(crate) head: response::Parts,
    pub(crate) body: Incoming,
    connection: Connection,
}

impl Client {
    pub(crate) fn new(config: ClientConfig) -> Result<Self, UrlError> {
        let host = host_header(&config.url)?;
        let target = request_target(&config.url)?;
        let pool = Pool::new(config.idle_max);
        let shared = Shared { opener: Opener::new(config)?, pool, sweeping: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared), host, target })
    }

    /// Value of the `Host` header.
    pub(crate) fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// Path and query as they stand in the request line.
    pub(crate) fn target(&self) -> &Uri {
        &self.target
    }

    /// Sends `request` and waits for the head of its answer.
    pub(crate) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
        progress: &Progress,
    ) -> Result<Answer, SendError> {
        loop {
            let kept = self.shared.pool.take(self.shared.opener.generation());
            let fresh = kept.is_none();
            let mut connection = match kept {
                Some(connection) => connection,
                None => {
                    self.shared.sweep_from_now_on();
                    self.shared.opener.open(progress).await?
                }
            };
            if let Err(error) = connection.sender.ready().await {
                if fresh {
                    return Err(SendError::Lost { reason: chain(&error), began: false });
                }
                continue;
            }
            progress.begin(&connection.traffic);
            match connection.sender.try_send_request(request).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    return Ok(Answer { head, body, connection });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !fresh => {
                        progress.unsent();
                        request = unsent;
                    }
                    unsent => {
                        let began = unsent.is_none() && progress.began();
                        return Err(SendError::Lost { reason: chain(error.error()), began });
                    }
                },
            }
        }
    }

    /// Gives the connection of a completely read answer back for the next request.
    pub(crate) fn keep(&self, answer: Answer) {
        let Answer { head, connection, .. } = answer;
        self.shared.pool.give_back(connection, &head.headers, &self.shared.opener);
    }

    /// Closes the kept connections and keeps none from now on.
    pub(crate) fn close(&self) {
        self.shared.pool.close();
    }
}

impl Shared {
    fn sweep_from_now_on(self: &Arc<Self>) {
        if self.sweeping.swap(true, Relaxed) {
            return;
        }
        let shared = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(SWEEP_INTERVAL).await;
                match shared.upgrade() {
                    Some(shared) if !shared.pool.is_closed() => {
                        shared.opener.refresh();
                        shared.pool.prune(shared.opener.generation());
                    }
                    _ => return,
                }
            }
        });
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("host", &self.host).finish_non_exhaustive()
    }
}

fn host_header(url: &Url) -> Result<HeaderValue, UrlError> {
    let host = url.host_str().ok_or_else(|| UrlError("the url has no host".to_owned()))?;
    let text = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    HeaderValue::from_str(&text).map_err(|_| UrlError(format!("{host} is no host name")))
}

fn request_target(url: &Url) -> Result<Uri, UrlError> {
    let text = match url.query() {
        Some(query) => format!("{}?{query}", url.path()),
        None => url.path().to_owned(),
    };
    text.parse().map_err(|_| UrlError("the path of the url cannot stand in a request line".to_owned()))
}

/// An error with its causes, at most five.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    for _ in 0..4 {
        let Some(error) = cause else { break };
        let next = error.to_string();
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
