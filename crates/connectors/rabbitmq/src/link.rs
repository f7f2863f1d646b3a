//! One connection to the broker: where it is, who logs in, under which certificates, and how it is thrown away.
//!
//! Invariants:
//! - Opening ends within [`CONNECT_TIMEOUT`], also at a peer that accepts and says nothing.
//! - A link that is dropped closes its socket, so that neither a task nor a thread nor a connection of the broker outlives
//!   it.

use std::{
    net::{Shutdown, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use lapin::{
    Channel, Connection, ConnectionProperties, ErrorKind,
    tcp::{AsyncTcpStream, RustlsConnector, RustlsConnectorConfig},
    uri::{AMQPScheme, AMQPUri},
};
use queuebox_core::Secret;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::time::timeout;

use crate::{
    config::{BrokerUrl, CONNECT_TIMEOUT, ConnectionConfig, HEARTBEAT_S, TlsConfig},
    fault::Error,
};

/// How long a clean close may take before the socket is closed under it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Names of the phases of connecting, for error texts.
const PHASES: [&str; 4] = ["resolving its name", "connecting", "agreeing on TLS", "logging in"];

/// An open connection.
pub(crate) struct Link {
    connection: Connection,
    /// Host and port, for error texts.
    pub(crate) peer: String,
    socket: Arc<Socket>,
}

impl Link {
    /// Connects and logs in with the credentials and certificates of this moment.
    pub(crate) async fn open(config: &ConnectionConfig) -> Result<Self, Error> {
        let uri = uri(config)?;
        let peer = format!("{}:{}", uri.authority.host, uri.authority.port);
        let tls = match uri.scheme {
            AMQPScheme::AMQPS => Some(connector(&config.tls)?),
            AMQPScheme::AMQP => None,
        };
        let socket = Arc::new(Socket::default());
        // Dropped on every way out but the good one, and then the thread of the client library reads the end of its stream.
        let mut guard = CloseOnDrop(Some(socket.clone()));
        match timeout(CONNECT_TIMEOUT, dial(&uri, tls, &config.name, socket.clone())).await {
            Ok(Ok(connection)) => {
                guard.0 = None;
                Ok(Self { connection, peer, socket })
            }
            Ok(Err(error)) => Err(refused(&error, &uri, peer, socket.phase())),
            Err(_) => Err(Error::Unreachable {
                peer,
                phase: socket.phase(),
                reason: format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
            }),
        }
    }

    /// Opens a channel within `limit`.
    pub(crate) async fn channel(&self, limit: Duration) -> Result<Channel, String> {
        self.within(limit, self.connection.create_channel()).await
    }

    /// Awaits an operation for at most `limit`; its failure as the broker's words.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        operation: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, String> {
        match timeout(limit, operation).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(words(&error)),
            Err(_) => Err(format!("no answer within {} ms", limit.as_millis())),
        }
    }

    /// Still usable, as far as is known.
    pub(crate) fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// The broker takes nothing from publishers at the moment.
    pub(crate) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// Largest frame, in bytes; headers must fit into one.
    pub(crate) fn frame_max(&self) -> usize {
        usize::try_from(self.connection.configuration().frame_max()).unwrap_or(usize::MAX)
    }

    /// Says goodbye to the broker; the socket closes in any case.
    pub(crate) async fn close(&self) {
        let _ = timeout(CLOSE_TIMEOUT, self.connection.close(200, "OK".into())).await;
        self.socket.close();
    }

    /// Closes the socket at once. Whatever is under way on this link fails.
    pub(crate) fn abandon(&self) {
        self.socket.close();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.socket.close();
    }
}

/// A second handle on the connection's socket. The client library offers no way to give up a connection that is stuck.
#[derive(Default)]
struct Socket {
    stream: Mutex<State>,
    phase: AtomicU8,
}

#[derive(Default)]
enum State {
    #[default]
    None,
    Open(TcpStream),
    Closed,
}

impl Socket {
    fn close(&self) {
        let mut state = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Open(stream) = &*state {
            let _ = stream.shutdown(Shutdown::Both);
        }
        *state = State::Closed;
    }

    /// Takes over a handle; a socket that comes after [`Self::close`] is closed.
    fn keep(&self, stream: TcpStream) {
        let mut state = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Closed = *state {
            let _ = stream.shutdown(Shutdown::Both);
        } else {
            *state = State::Open(stream);
        }
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Relaxed);
    }

    fn phase(&self) -> &'static str {
        PHASES.get(usize::from(self.phase.load(Relaxed))).copied().unwrap_or("connecting")
    }
}

struct CloseOnDrop(Option<Arc<Socket>>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            socket.close();
        }
    }
}

async fn dial(
    uri: &AMQPUri,
    tls: Option<RustlsConnector>,
    name: &str,
    socket: Arc<Socket>,
) -> lapin::Result<Connection> {
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let runtime = lapin::runtime::default_runtime()?;
    // Written in place: the type of the runtime is known from the call only.
    let connecting = Connection::connector(
        uri.clone(),
        runtime,
        async move |uri, runtime| {
            socket.enter(0);
            let mut last = None;
            for address in tokio::net::lookup_host((uri.authority.host.as_str(), uri.authority.port)).await? {
                socket.enter(1);
                let stream = match AsyncTcpStream::connect(&runtime, address).await {
                    Ok(stream) => stream,
                    Err(error) => {
                        last = Some(error);
                        continue;
                    }
                };
                if let AsyncTcpStream::Plain(plain) = &stream {
                    socket.keep(plain.get_ref().as_fd().try_clone_to_owned()?.into());
                }
                let Some(connector) = &tls else {
                    socket.enter(3);
                    return Ok(stream);
                };
                socket.enter(2);
                let stream = stream.into_rustls(connector, &uri.authority.host).await?;
                socket.enter(3);
                return Ok(stream);
            }
            Err(last.unwrap_or_else(|| std::io::Error::other("the name has no address")).into())
        },
        properties,
    );
    connecting.await
}

/// The broker's answer to the login, told apart from a network that failed.
fn refused(error: &lapin::Error, uri: &AMQPUri, peer: String, phase: &'static str) -> Error {
    match error.kind() {
        ErrorKind::ProtocolError(protocol) if matches!(protocol.get_id(), 403 | 530) => Error::Login {
            peer,
            user: uri.authority.userinfo.username.clone(),
            vhost: uri.vhost.clone(),
            reason: words(error),
        },
        _ => Error::Unreachable { peer, phase, reason: words(error) },
    }
}

/// What the broker or the system said, without the wrapping of the client library.
pub(crate) fn words(error: &lapin::Error) -> String {
    match error.kind() {
        ErrorKind::ProtocolError(protocol) => protocol.get_message().to_string(),
        ErrorKind::IOError(io) => io.to_string(),
        _ => error.to_string(),
    }
}

/// Reply code of the broker, if the broker closed the channel or the connection.
pub(crate) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(protocol) => Some(protocol.get_id()),
        _ => None,
    }
}

fn current(secret: &Secret, field: &'static str) -> Result<Arc<str>, Error> {
    secret.current().map_err(|error| Error::Secret { field, reason: error.to_string() })
}

/// The URL with the separate credentials in place. Nothing of it appears in an error: it may hold a password.
fn uri(config: &ConnectionConfig) -> Result<AMQPUri, Error> {
    let text = match &config.url {
        BrokerUrl::Plain(url) => url.as_str().into(),
        BrokerUrl::Secret(secret) => current(secret, "urlFrom")?,
    };
    let url = url::Url::parse(text.trim()).map_err(|error| Error::Url(error.to_string()))?;
    if !matches!(url.scheme(), "amqp" | "amqps") {
        return Err(Error::Url("it does not begin with amqp:// or amqps://".to_owned()));
    }
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| Error::Url("it has no host".to_owned()))?;
    let mut uri: AMQPUri = text.trim().parse().map_err(|_| Error::Url("it is not well-formed".to_owned()))?;
    // The client library takes every host in brackets for localhost.
    uri.authority.host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    if let Some(username) = &config.username {
        uri.authority.userinfo.username.clone_from(username);
    }
    if let Some(password) = &config.password {
        uri.authority.userinfo.password = current(password, "passwordFrom")?.to_string();
    }
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    Ok(uri)
}

fn connector(tls: &TlsConfig) -> Result<RustlsConnector, Error> {
    let system = |error: std::io::Error| Error::Tls { field: "caFrom", reason: error.to_string() };
    let config = match &tls.ca {
        Some(ca) => {
            let mut config = RustlsConnectorConfig::default();
            config.add_parsable_certificates(certificates(&current(ca, "tls.caFrom")?, "caFrom")?);
            config
        }
        None => RustlsConnectorConfig::new_with_native_certs().map_err(system)?,
    };
    match (&tls.cert, &tls.key) {
        (None, None) => config.connector_with_no_client_auth().map_err(system),
        (Some(cert), Some(key)) => {
            let chain = certificates(&current(cert, "tls.certFrom")?, "certFrom")?;
            let key = PrivateKeyDer::from_pem_slice(current(key, "tls.keyFrom")?.as_bytes())
                .map_err(|error| Error::Tls { field: "keyFrom", reason: format!("no usable PEM: {error}") })?;
            config
                .connector_with_single_cert(chain, key)
                .map_err(|error| Error::Tls { field: "certFrom", reason: error.to_string() })
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

    fn config(url: &str) -> ConnectionConfig {
        ConnectionConfig {
            url: BrokerUrl::Secret(Secret::fixed(url)),
            username: None,
            password: None,
            tls: TlsConfig::default(),
            name: "test".to_owned(),
        }
    }

    #[test]
    fn virtual_hosts_and_hosts_are_read_as_the_uri_specification_says() {
        for (url, host, port, vhost) in [
            ("amqp://h", "h", 5672, "/"),
            ("amqp://h:1/", "h", 1, ""),
            ("amqps://h/%2f", "h", 5671, "/"),
            ("amqp://h/a%2Fb", "h", 5672, "a/b"),
            ("amqp://[::1]:1/x", "::1", 1, "x"),
        ] {
            let uri = uri(&config(url)).expect(url);
            assert_eq!(
                (uri.authority.host.as_str(), uri.authority.port, uri.vhost.as_str()),
                (host, port, vhost),
                "{url}"
            );
        }
    }

    #[test]
    fn d39_passwords_inside_urls() {
        let password = r#"p@s:s/w%o#r?d&[é]'" \`;=%41"#;
        let encoded = "p%40s%3As%2Fw%25o%23r%3Fd%26%5B%C3%A9%5D%27%22%20%5C%60%3B%3D%2541";
        let from_url = uri(&config(&format!("amqp://us%40er:{encoded}@h/v"))).expect("percent-encoded");
        assert_eq!(from_url.authority.userinfo.password, password);
        assert_eq!(from_url.authority.userinfo.username, "us@er");
        let separate = ConnectionConfig {
            username: Some("us@er".to_owned()),
            password: Some(Secret::fixed(password)),
            ..config("amqp://h/v")
        };
        assert_eq!(uri(&separate).expect("separate").authority.userinfo.password, password, "%41 is meant literally");
    }

    #[test]
    fn no_error_text_shows_the_url() {
        for url in ["amqp://u:canary-7731@:x/", "http://u:canary-7731@h", "canary-7731", "amqp://u:canary-7731@"] {
            let error = uri(&config(url)).expect_err(url);
            assert!(!error.to_string().contains("canary"), "{error}");
            assert!(!format!("{error:?}").contains("canary"), "{error:?}");
        }
    }
}
