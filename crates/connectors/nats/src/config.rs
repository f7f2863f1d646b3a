//! What a NATS connector is built from: plain values, checked by whoever reads manifests.
//!
//! Secrets are asked for at each connection, so that a rotated one is used from the next connection on.

use std::time::Duration;

use queuebox_core::{Secret, template::Address};

/// A connection is up within this time, over all servers of the list, or the attempt has failed.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two pings of a silent server. Three without an answer end the connection.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);

/// PEM texts of a `tls` block (contract 10.2), read anew for each connection.
#[derive(Debug, Clone, Default)]
pub struct TlsConfig {
    /// `caFrom`: one or more CA certificates. They replace the system's roots.
    pub ca: Option<Secret>,
    /// `certFrom`: our certificate, with its chain.
    pub cert: Option<Secret>,
    /// `keyFrom`: its private key.
    pub key: Option<Secret>,
}

impl TlsConfig {
    /// There is a `tls` block.
    pub(crate) fn is_set(&self) -> bool {
        self.ca.is_some() || self.cert.is_some() || self.key.is_some()
    }
}

/// Who logs in. All values are taken as they are, not percent-decoded.
#[derive(Debug, Clone, Default)]
pub enum Login {
    /// The server asks nobody, or only for a certificate.
    #[default]
    None,
    /// `username` and `passwordFrom`.
    Password {
        /// Name of the user.
        username: String,
        /// Its password.
        password: Secret,
    },
    /// `tokenFrom`.
    Token(Secret),
}

/// How to reach the servers and log in.
#[derive(Debug, Clone)]
pub struct ConnectionConfig {
    /// `servers`: comma separated, each `host`, `host:port` or `nats://host:port`; `tls://` demands TLS.
    pub servers: String,
    /// Credentials.
    pub login: Login,
    /// A block that is not empty demands TLS.
    pub tls: TlsConfig,
    /// Shown in the server's list of connections, such as `queuebox shop/orders`.
    pub name: String,
}

/// `Destination.spec.nats` (contract 13.3).
#[derive(Debug, Clone)]
pub struct DestinationConfig {
    /// Servers and login.
    pub connection: ConnectionConfig,
    /// `subject` or `subjectFrom`.
    pub subject: Address,
    /// Wait for the acknowledgement of a stream; otherwise written = sent.
    pub jetstream: bool,
    /// From the call until the acknowledgement.
    pub timeout: Duration,
    /// `Destination.spec.headers`; a row header of the same name wins.
    pub headers: Vec<(String, String)>,
}

/// `Source.spec.nats` (contract 13.2).
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Servers and login.
    pub connection: ConnectionConfig,
    /// Stream, which must exist.
    pub stream: String,
    /// Durable pull consumer; made when it is missing.
    pub durable: String,
    /// Filter of a durable that is made here. One that exists must have the same.
    pub filter_subject: Option<String>,
    /// Of a durable that is made here. One that exists keeps its own.
    pub ack_wait: Duration,
    /// Messages per pull, and so the most that are unacknowledged at a time.
    pub batch_size: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_never_prints_its_secret() {
        assert!(!format!("{:?}", Login::Token(Secret::fixed("canary-7731"))).contains("canary"));
    }
}
