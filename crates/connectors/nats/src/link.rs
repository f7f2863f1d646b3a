//! One connection to a server of the list, and the signal that it is lost.
//!
//! Invariants:
//! - Opening ends within [`CONNECT_TIMEOUT`], also at a peer that accepts and says nothing.
//! - A link never comes back: the client library is kept from reconnecting, so what was sent on it has one outcome.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use async_nats::{
    Auth, AuthError, Client, ConnectErrorKind, ConnectOptions, Event, ServerAddr, ServerError,
    jetstream::{Context, context::ContextBuilder},
};
use queuebox_core::Secret;
use rand::seq::SliceRandom;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{CONNECT_TIMEOUT, ConnectionConfig, Login, PING_INTERVAL, TlsConfig},
    fault::Error,
};

/// Publishes on one connection without an acknowledgement, at most; more wait for their turn.
const UNACKNOWLEDGED_MAX: usize = 16_384;

/// Subjects remembered as forbidden, at most.
const FORBIDDEN_MAX: usize = 1000;

/// How long a clean close may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An open connection.
pub(crate) struct Link {
    pub(crate) client: Client,
    pub(crate) context: Context,
    shared: Arc<Shared>,
}

/// What the client library reports besides answers.
#[derive(Default)]
struct Shared {
    lost: CancellationToken,
    /// The one login of this link is done.
    once: AtomicBool,
    /// Subject to the server's words. The server tells only in passing that a publish was forbidden.
    forbidden: Mutex<HashMap<String, String>>,
}

impl Link {
    /// Connects to one of the servers, in random order, and logs in with the credentials of this moment. Requests to the
    /// JetStream API and acknowledgements are awaited for `patience`.
    pub(crate) async fn open(config: &ConnectionConfig, patience: Duration) -> Result<Self, Error> {
        let mut servers = servers(&config.servers)?;
        servers.shuffle(&mut rand::rng());
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let each = CONNECT_TIMEOUT / u32::try_from(servers.len()).unwrap_or(u32::MAX).max(1);
        let mut last = Error::Servers("it names no server".to_owned());
        for server in servers {
            let peer = format!("{}:{}", server.host(), server.port());
            let shared = Arc::new(Shared::default());
            let connecting = options(config, each, shared.clone())?;
            match timeout_at(deadline, connecting.connect(server)).await {
                Ok(Ok(client)) => return Ok(Self::on(client, shared, patience)),
                Ok(Err(error)) => last = refused(&error, config, peer),
                Err(_) => {
                    return Err(Error::Unreachable {
                        peer,
                        reason: format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
                    });
                }
            }
        }
        Err(last)
    }

    fn on(client: Client, shared: Arc<Shared>, patience: Duration) -> Self {
        shared.once.store(true, SeqCst);
        let context = ContextBuilder::new()
            .timeout(patience)
            .ack_timeout(patience)
            .max_ack_inflight(UNACKNOWLEDGED_MAX)
            .backpressure_on_inflight(true)
            .build(client.clone());
        Self { client, context, shared }
    }

    /// Still connected, as far as is known.
    pub(crate) fn is_up(&self) -> bool {
        !self.shared.lost.is_cancelled()
    }

    /// Resolves when the connection is lost.
    pub(crate) async fn lost(&self) {
        self.shared.lost.cancelled().await;
    }

    /// The server's words, if it said that publishing to this subject is forbidden. Says it once.
    pub(crate) fn forbidden(&self, subject: &str) -> Option<String> {
        self.shared.forbidden.lock().unwrap_or_else(PoisonError::into_inner).remove(subject)
    }

    /// Writes what is still to be written.
    pub(crate) async fn close(&self) {
        let _ = timeout(CLOSE_TIMEOUT, self.client.flush()).await;
    }
}

impl Shared {
    fn hear(&self, event: &Event) {
        match event {
            Event::Disconnected | Event::Closed => self.lost.cancel(),
            Event::ServerError(ServerError::Other(text)) => {
                if let Some(subject) = forbidden_subject(text) {
                    let mut forbidden = self.forbidden.lock().unwrap_or_else(PoisonError::into_inner);
                    if forbidden.len() >= FORBIDDEN_MAX {
                        forbidden.clear();
                    }
                    forbidden.insert(subject.to_owned(), text.clone());
                }
                tracing::warn!(error = %text, "the NATS server reports an error");
            }
            _ => {}
        }
    }
}

/// `Permissions Violation for Publish to "subject"`.
fn forbidden_subject(text: &str) -> Option<&str> {
    let start = "permissions violation for publish to \"";
    let (head, rest) = text.split_at_checked(start.len())?;
    if !head.eq_ignore_ascii_case(start) {
        return None;
    }
    rest.split_once('"').map(|(subject, _)| subject)
}

/// Nothing of the text appears in an error: somebody may have put a password there.
fn servers(list: &str) -> Result<Vec<ServerAddr>, Error> {
    let servers: Vec<ServerAddr> = list
        .split(',')
        .map(str::trim)
        .filter(|server| !server.is_empty())
        .enumerate()
        .map(|(at, server)| {
            server
                .parse()
                .ok()
                .filter(|server: &ServerAddr| !server.host().is_empty() && !server.is_websocket())
                .ok_or_else(|| Error::Servers(format!("entry {} is no address such as nats://host:4222", at + 1)))
        })
        .collect::<Result<_, _>>()?;
    if servers.is_empty() {
        return Err(Error::Servers("it names no server".to_owned()));
    }
    Ok(servers)
}

fn options(config: &ConnectionConfig, limit: Duration, shared: Arc<Shared>) -> Result<ConnectOptions, Error> {
    let auth = auth(&config.login)?;
    let (gate, ear) = (shared.clone(), shared);
    let mut options = ConnectOptions::with_auth_callback(move |_nonce| {
        // The client library tries once more when a connection is lost; it gets no credentials then.
        let answer = if gate.once.load(SeqCst) {
            Err(AuthError::new("a lost connection is not reused"))
        } else {
            Ok(auth.clone())
        };
        std::future::ready(answer)
    })
    .max_reconnects(1)
    .ignore_discovered_servers()
    .connection_timeout(limit)
    .ping_interval(PING_INTERVAL)
    .request_timeout(Some(CONNECT_TIMEOUT))
    .name(&config.name)
    .event_callback(move |event| {
        ear.hear(&event);
        std::future::ready(())
    });
    if config.tls.is_set() {
        options = options.require_tls(true);
    }
    if let Some(tls) = client_config(&config.tls)? {
        options = options.tls_client_config(tls);
    }
    Ok(options)
}

fn auth(login: &Login) -> Result<Auth, Error> {
    let mut auth = Auth::new();
    match login {
        Login::None => {}
        Login::Password { username, password } => {
            auth.username = Some(username.clone());
            auth.password = Some(current(password, "passwordFrom")?.to_string());
        }
        Login::Token(token) => auth.token = Some(current(token, "tokenFrom")?.to_string()),
    }
    Ok(auth)
}

fn refused(error: &async_nats::ConnectError, config: &ConnectionConfig, peer: String) -> Error {
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            let user = match &config.login {
                Login::None => "nobody (no credentials are configured)".to_owned(),
                Login::Password { username, .. } => format!("user \"{username}\""),
                Login::Token(_) => "a token".to_owned(),
            };
            Error::Login { peer, user, reason: error.kind().to_string() }
        }
        _ => Error::Unreachable { peer, reason: error.to_string() },
    }
}

fn current(secret: &Secret, field: &'static str) -> Result<Arc<str>, Error> {
    secret.current().map_err(|error| Error::Secret { field, reason: error.to_string() })
}

/// `None`: the defaults of the client library, which are the system's roots.
fn client_config(tls: &TlsConfig) -> Result<Option<ClientConfig>, Error> {
    if !tls.is_set() {
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    match &tls.ca {
        Some(ca) => {
            for certificate in certificates(&current(ca, "tls.caFrom")?, "caFrom")? {
                roots.add(certificate).map_err(|error| Error::Tls { field: "caFrom", reason: error.to_string() })?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Tls { field: "caFrom", reason: error.to_string() })?
        .with_root_certificates(roots);
    match (&tls.cert, &tls.key) {
        (None, None) => Ok(Some(builder.with_no_client_auth())),
        (Some(cert), Some(key)) => {
            let chain = certificates(&current(cert, "tls.certFrom")?, "certFrom")?;
            let key = PrivateKeyDer::from_pem_slice(current(key, "tls.keyFrom")?.as_bytes())
                .map_err(|error| Error::Tls { field: "keyFrom", reason: format!("no usable PEM: {error}") })?;
            let config = builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| Error::Tls { field: "certFrom", reason: error.to_string() })?;
            Ok(Some(config))
        }
        _ => Err(Error::Tls { field: "certFrom", reason: "certFrom and keyFrom belong together".to_owned() }),
    }
}

fn certificates(pem: &str, field: &'static str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| Error::Tls { field, reason: format!("no usable PEM: {error}") })?;
    if found.is_empty() {
        return Err(Error::Tls { field, reason: "no certificate in it".to_owned() });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_a_list_and_never_repeated_in_an_error() {
        let list = servers(" nats://a:1, b ,tls://[::1]:4333,").expect("three servers");
        let peers: Vec<_> = list.iter().map(|server| (server.host().to_owned(), server.port())).collect();
        assert_eq!(peers, [("a".to_owned(), 1), ("b".to_owned(), 4222), ("::1".to_owned(), 4333)]);
        for bad in ["", " , ", "http://u:canary-7731@h", "nats://u:canary-7731@:x", "ws://canary-7731"] {
            let error = servers(bad).expect_err(bad);
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
    }

    #[test]
    fn the_subject_of_a_forbidden_publish_is_read_from_the_servers_words() {
        assert_eq!(forbidden_subject("Permissions Violation for Publish to \"a.b\""), Some("a.b"));
        assert_eq!(forbidden_subject("permissions violation for publish to \"a.b\" using x"), Some("a.b"));
        assert_eq!(forbidden_subject("Permissions Violation for Subscription to \"a.b\""), None);
    }
}
