//! HTTP as a destination: one `POST` per attempt, and what its outcome means (contract 7.4, 7.5).
//!
//! Invariants:
//! - Exactly one request per attempt; redirects are never followed; only a 2xx completes.
//! - The whole attempt ends within its time-out, whatever the peer does, and its fault names the phase.
//! - No fault holds a secret: known values are cut out of what peers answer, then the text is redacted.

mod answer;
pub mod auth;
mod headers;
pub mod signing;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Method, Request, StatusCode, Version};
use http_body_util::Full;
use queuebox_core::{
    Class, Fault,
    ports::{Delivery, Destination},
};
use tokio::time::{Instant, timeout_at};
use url::Url;

pub use self::{
    answer::StatusRule,
    auth::{OAuth2, OutboundAuth, TokenCache},
    headers::HeaderError,
    signing::Signing,
};
pub use crate::client::UrlError;
use crate::{
    Resolve, Secret, SystemResolver, TlsFiles,
    client::{
        Answer, Client, ClientConfig, SendError,
        progress::{Phase, Progress},
        tls::{Tls, TlsError},
    },
};

/// A checked `Destination.spec.http`, with what the Relay adds to it.
#[derive(Clone)]
pub struct HttpDestinationConfig {
    /// Where every message is posted to.
    pub url: Url,
    /// Bounds the whole attempt; connecting may take half of it.
    pub timeout: Duration,
    /// `Destination.spec.headers`.
    pub headers: Vec<(String, String)>,
    /// Credential that is sent with each request.
    pub auth: Option<OutboundAuth>,
    /// Signature of each request.
    pub signing: Option<Signing>,
    /// Private CA and client certificate.
    pub tls: TlsFiles,
    /// Statuses that make the message dead at once.
    pub permanent_statuses: Vec<StatusRule>,
    /// So much of a failed answer is kept, in bytes.
    pub error_body_bytes_max: usize,
    /// Refuse private addresses, at each connection.
    pub block_private_addresses: bool,
    /// Connections kept without a request; the number of requests that run at the same time.
    pub idle_connections_max: usize,
    /// Access tokens; by default those of the process.
    pub tokens: TokenCache,
    /// Names to addresses.
    pub resolver: Arc<dyn Resolve>,
}

impl HttpDestinationConfig {
    /// The defaults of the manifest for `url`.
    pub fn new(url: Url) -> Self {
        Self {
            url,
            timeout: Duration::from_secs(30),
            headers: Vec::new(),
            auth: None,
            signing: None,
            tls: TlsFiles::default(),
            permanent_statuses: Vec::new(),
            error_body_bytes_max: 2048,
            block_private_addresses: false,
            idle_connections_max: 64,
            tokens: TokenCache::process(),
            resolver: Arc::new(SystemResolver),
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The destination's own URL.
    #[error("http.url: {0}")]
    Url(UrlError),
    /// The URL of the token endpoint.
    #[error("http.auth.oauth2.tokenUrl: {0}")]
    TokenUrl(UrlError),
    /// A configured header that HTTP cannot carry.
    #[error("headers: {0}")]
    Header(HeaderError),
}

/// A destination that is an HTTP endpoint.
#[derive(Debug)]
pub struct HttpDestination {
    client: Client,
    timeout: Duration,
    headers: headers::Base,
    auth: auth::Credential,
    signing: Option<Signing>,
    tls: TlsFiles,
    permanent: Vec<StatusRule>,
    error_body_bytes_max: usize,
    url: Url,
}

impl HttpDestination {
    /// Checks what can be checked without a connection.
    pub fn new(config: HttpDestinationConfig) -> Result<Self, ConfigError> {
        let client_config = |url: Url, tls: Tls| ClientConfig {
            url,
            connect_timeout: config.timeout / 2,
            idle_max: config.idle_connections_max,
            block_private_addresses: config.block_private_addresses,
            resolver: config.resolver.clone(),
            tls,
        };
        let client = Client::new(client_config(config.url.clone(), Tls::new(config.tls.clone(), false)))
            .map_err(ConfigError::Url)?;
        let auth = auth::Credential::new(config.auth.as_ref(), &config.tokens, |url| {
            Client::new(client_config(url, Tls::new(config.tls.clone(), true)))
        })?;
        let headers = headers::Base::new(client.host(), &config.headers).map_err(ConfigError::Header)?;
        Ok(Self {
            client,
            timeout: config.timeout,
            headers,
            auth,
            signing: config.signing,
            tls: config.tls,
            permanent: config.permanent_statuses,
            error_body_bytes_max: config.error_body_bytes_max,
            url: config.url,
        })
    }

    async fn attempt(&self, delivery: Delivery, deadline: Instant, budget: Duration) -> Result<(), Fault> {
        let progress = Progress::new();
        let exchanged = timeout_at(deadline, self.exchange(delivery, &progress)).await;
        let (answer, credential) = match exchanged {
            Ok(exchanged) => exchanged?,
            Err(_) => return Err(timed_out(&progress, budget)),
        };
        self.auth.answered(&credential, answer.head.status);
        self.judge(answer, deadline, budget).await
    }

    /// Up to the head of the answer.
    async fn exchange(&self, delivery: Delivery, progress: &Progress) -> Result<(Answer, auth::Used), Fault> {
        let credential = self.auth.current(progress).await?;
        let request = self.request(delivery, credential.header())?;
        let answer = self.client.send(request, progress).await.map_err(|error| classify(&error))?;
        Ok((answer, credential))
    }

    fn request(
        &self,
        delivery: Delivery,
        credential: Option<&(http::HeaderName, http::HeaderValue)>,
    ) -> Result<Request<Full<Bytes>>, Fault> {
        let mut headers = self.headers.of(&delivery, credential).map_err(|error| {
            Fault::refused("header", format!("{error}; HTTP cannot carry it. Correct the row or leave the header out"))
        })?;
        if let Some(signing) = &self.signing {
            signing.sign(&mut headers, &delivery.id, &delivery.payload)?;
        }
        let mut request = Request::new(Full::new(delivery.payload));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.client.target().clone();
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = headers;
        Ok(request)
    }

    async fn judge(&self, answer: Answer, deadline: Instant, budget: Duration) -> Result<(), Fault> {
        if answer.head.status.is_success() {
            self.finish(answer, deadline, budget).await
        } else {
            Err(self.fault(answer, deadline, budget).await)
        }
    }

    /// Reads a 2xx to its end.
    async fn finish(&self, mut answer: Answer, deadline: Instant, budget: Duration) -> Result<(), Fault> {
        match timeout_at(deadline, answer::read(&mut answer.body, 0)).await {
            Ok(body) => {
                if body.is_whole {
                    self.client.keep(answer);
                }
                Ok(())
            }
            // The end of the answer belongs to the attempt (contract 7.5), so nobody can say that it is complete.
            Err(_) => {
                let what = format!("{}, and no end of it", status_name(answer.head.status));
                Err(out_of_time(Class::Ambiguous, Phase::Reading, budget, &what))
            }
        }
    }

    /// Reads as much of another answer as helps.
    async fn fault(&self, mut answer: Answer, deadline: Instant, budget: Duration) -> Fault {
        let secrets = self.secrets();
        let rule = answer::Rule {
            permanent: &self.permanent,
            url: &self.url,
            secrets: secrets.iter().map(AsRef::as_ref).collect(),
            body_bytes_max: self.error_body_bytes_max,
        };
        let body = timeout_at(deadline, answer::read(&mut answer.body, rule.keep())).await.map_err(|_| {
            format!("its body did not end within {} ms; the time ended while {}", budget.as_millis(), Phase::Reading)
        });
        let fault = rule.fault(&answer.head, &body);
        if body.is_ok_and(|body| body.is_whole) {
            self.client.keep(answer);
        }
        fault
    }

    /// Values that we gave the peer, and that it may echo.
    fn secrets(&self) -> Vec<Arc<str>> {
        let mut known = self.auth.secrets();
        known.extend(self.signing.iter().flat_map(Signing::secrets));
        known
    }
}

#[async_trait]
impl Destination for HttpDestination {
    fn kind(&self) -> &'static str {
        "http"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        let budget = self.timeout.min(delivery.time_left);
        self.attempt(delivery, Instant::now() + budget, budget).await
    }

    /// Our own secrets can be read; the receiver is not asked, since a request would be a delivery.
    async fn probe(&self) -> Result<(), Fault> {
        self.auth.readable()?;
        if let Some(signing) = &self.signing {
            signing.readable()?;
        }
        self.tls.readable().map_err(|error| secret_fault(&error))
    }

    async fn close(&self) {
        self.client.close();
        self.auth.close();
    }
}

fn timed_out(progress: &Progress, budget: Duration) -> Fault {
    let class = if progress.began() { Class::Ambiguous } else { Class::Transient };
    out_of_time(class, progress.phase(), budget, "no answer")
}

fn out_of_time(class: Class, phase: Phase, budget: Duration, what: &str) -> Fault {
    let detail = format!("{what} within {} ms; the time ended while {phase}", budget.as_millis());
    Fault::new(class, "timeout", detail).tripping()
}

/// What a failed exchange means. Only what may have left this machine is ambiguous.
fn classify(error: &SendError) -> Fault {
    if let SendError::Tls(TlsError::Secret(error)) = error {
        return secret_fault(error);
    }
    let (class, code) = match error {
        SendError::Resolve { .. } => (Class::Transient, "resolve"),
        SendError::Private { .. } => (Class::Transient, "private_address"),
        SendError::Connect { .. } => (Class::Transient, "connect"),
        SendError::ConnectTimeout { .. } => (Class::Transient, "connect_timeout"),
        SendError::Handshake { .. } | SendError::Tls(_) => (Class::Transient, "tls"),
        SendError::Lost { began: true, .. } => (Class::Ambiguous, "connection_lost"),
        SendError::Lost { began: false, .. } => (Class::Transient, "connection_lost"),
    };
    let mut detail = error.to_string();
    if let SendError::ConnectTimeout { .. } = error {
        detail.push_str(&format!("; the time ended while {}", Phase::Connecting));
    }
    Fault::new(class, code, queuebox_core::redact::redact(&detail)).tripping()
}

/// Our own secret is not there: the message was never offered to anybody, so it waits without spending attempts (contract 7.5).
pub(crate) fn secret_fault(error: &crate::SecretError) -> Fault {
    Fault::not_connected("secret", error.to_string())
}

pub(crate) fn status_name(status: StatusCode) -> String {
    match status.canonical_reason() {
        Some(reason) => format!("HTTP {} {reason}", status.as_u16()),
        None => format!("HTTP {}", status.as_u16()),
    }
}

/// The current values of `secrets`; those that cannot be read are not known to anybody either.
pub(crate) fn values<'a>(secrets: impl IntoIterator<Item = &'a Secret>) -> Vec<Arc<str>> {
    secrets.into_iter().filter_map(|secret| secret.current().ok()).collect()
}
