//! What both directions share: the client library's properties, its log, and secrets that change.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
};

use queuebox_core::{Secret, redact::redact};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};

use crate::{
    config::{Cluster, SecurityProtocol},
    fault::KafkaFault,
};

/// Tells whether secrets have changed since a client was made from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

/// Properties of a client for `cluster` with the secrets of this moment.
pub(crate) fn properties(cluster: &Cluster) -> Result<(ClientConfig, Fingerprint), KafkaFault> {
    let mut config = ClientConfig::new();
    config.set_log_level(RDKafkaLogLevel::Info);
    let mut hasher = DefaultHasher::new();
    for (property, value) in [
        ("bootstrap.servers", cluster.bootstrap_servers.as_str()),
        ("client.id", "queuebox"),
        ("security.protocol", &cluster.security_protocol.as_str().to_ascii_lowercase()),
        ("socket.keepalive.enable", "true"),
        // A connection that nobody answers on is given up, so that a frozen broker is noticed.
        ("socket.timeout.ms", "20000"),
        ("socket.connection.setup.timeout.ms", "10000"),
        // Contract 7.5: reconnect from 1 s, with the library's own jitter; 10 s keeps a recovered broker in use within 15 s.
        ("reconnect.backoff.ms", "1000"),
        ("reconnect.backoff.max.ms", "10000"),
        ("log.connection.close", "false"),
    ] {
        config.set(property, value);
    }
    for (property, secret) in secrets(cluster) {
        let value = secret.current().map_err(|reason| KafkaFault::Client {
            servers: cluster.bootstrap_servers.clone(),
            // The property comes last: in front of a colon its name would make a secret of the reason.
            reason: format!("{reason}; it is needed for {property}"),
        })?;
        value.hash(&mut hasher);
        if value.contains('\0') {
            let reason = format!("{property} has a NUL character");
            return Err(KafkaFault::Client { servers: cluster.bootstrap_servers.clone(), reason });
        }
        config.set(property, &*value);
    }
    if let Some(sasl) = sasl(cluster) {
        config.set("sasl.mechanisms", &sasl.mechanism).set("sasl.username", &sasl.username);
    }
    Ok((config, Fingerprint(hasher.finish())))
}

/// The secrets that the protocol uses, each with its property.
fn secrets(cluster: &Cluster) -> Vec<(&'static str, &Secret)> {
    let mut used = Vec::new();
    if let Some(sasl) = sasl(cluster) {
        used.push(("sasl.password", &sasl.password));
    }
    if matches!(cluster.security_protocol, SecurityProtocol::Ssl | SecurityProtocol::SaslSsl) {
        let pem = [
            ("ssl.ca.pem", &cluster.tls.ca),
            ("ssl.certificate.pem", &cluster.tls.cert),
            ("ssl.key.pem", &cluster.tls.key),
        ];
        used.extend(pem.into_iter().filter_map(|(property, secret)| Some((property, secret.as_ref()?))));
    }
    used
}

fn sasl(cluster: &Cluster) -> Option<&crate::config::Sasl> {
    let speaks_sasl = matches!(cluster.security_protocol, SecurityProtocol::SaslPlaintext | SecurityProtocol::SaslSsl);
    cluster.sasl.as_ref().filter(|_| speaks_sasl)
}

/// The fingerprint of this moment; `None` while a secret gives no value.
pub(crate) fn fingerprint(cluster: &Cluster) -> Option<Fingerprint> {
    let mut hasher = DefaultHasher::new();
    for (_, secret) in secrets(cluster) {
        secret.current().ok()?.hash(&mut hasher);
    }
    Some(Fingerprint(hasher.finish()))
}

/// Sets the properties that only tests and measurements give.
pub(crate) fn overrides(config: &mut ClientConfig, cluster: &Cluster) {
    for (property, value) in &cluster.properties {
        config.set(property, value);
    }
}

/// One line of the client library. What it calls errors are mostly reconnects, each of which it repeats; the state that
/// follows from them is logged once by whoever owns the client.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, text: &str) {
    let text = redact(text);
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
            tracing::error!(target: "librdkafka", facility, "{text}");
        }
        _ => tracing::debug!(target: "librdkafka", facility, "{text}"),
    }
}

/// Drops `T` on a thread of its own: the client library waits for its own threads then, which must not hold up the runtime.
#[derive(Debug)]
pub(crate) struct DropElsewhere<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> DropElsewhere<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<T: Send + 'static> Drop for DropElsewhere<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        // Where no thread can be made the closure, and the value with it, is dropped here.
        let _ = std::thread::Builder::new().name("kafka-close".into()).spawn(move || drop(value));
    }
}
