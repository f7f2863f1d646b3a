//! What a Kafka source or destination is told: plain values, already checked by whoever reads the manifests (contract 13.2,
//! 13.3).
//!
//! Invariant: no `Debug` here prints a secret.

use std::time::Duration;

use queuebox_core::{
    Secret,
    template::{Address, Template},
};

/// `securityProtocol`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SecurityProtocol {
    /// `PLAINTEXT`.
    #[default]
    Plaintext,
    /// `SSL`.
    Ssl,
    /// `SASL_PLAINTEXT`.
    SaslPlaintext,
    /// `SASL_SSL`.
    SaslSsl,
}

impl SecurityProtocol {
    /// The word of the manifest.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plaintext => "PLAINTEXT",
            Self::Ssl => "SSL",
            Self::SaslPlaintext => "SASL_PLAINTEXT",
            Self::SaslSsl => "SASL_SSL",
        }
    }

    /// Reads the word of the manifest, in any case.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Plaintext, Self::Ssl, Self::SaslPlaintext, Self::SaslSsl]
            .into_iter()
            .find(|known| known.as_str().eq_ignore_ascii_case(word))
    }
}

/// Login by SASL.
#[derive(Debug, Clone)]
pub struct Sasl {
    /// `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`.
    pub mechanism: String,
    /// User name, taken as it is.
    pub username: String,
    /// Password, taken as it is.
    pub password: Secret,
}

/// Certificates, PEM text. Without `ca` the system's certificates decide.
#[derive(Debug, Clone, Default)]
pub struct Tls {
    /// Certificates that the broker's is checked against.
    pub ca: Option<Secret>,
    /// Our certificate; needs `key`.
    pub cert: Option<Secret>,
    /// The key of our certificate.
    pub key: Option<Secret>,
}

/// A Kafka cluster and how to log in.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// `host:port`, comma separated.
    pub bootstrap_servers: String,
    /// Plain, TLS, SASL or both.
    pub security_protocol: SecurityProtocol,
    /// Needed by the SASL protocols.
    pub sasl: Option<Sasl>,
    /// Used by the SSL protocols.
    pub tls: Tls,
    /// Further librdkafka properties, set last. No manifest reaches them: they are for tests and measurements.
    pub properties: Vec<(String, String)>,
}

/// `autoOffsetReset`: where a partition without a committed offset begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OffsetReset {
    /// With the oldest record.
    #[default]
    Earliest,
    /// With the next record.
    Latest,
}

impl OffsetReset {
    /// The word of the manifest.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Earliest => "earliest",
            Self::Latest => "latest",
        }
    }
}

/// One source: one consumer group over some topics.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Where.
    pub cluster: Cluster,
    /// `group.id`.
    pub group_id: String,
    /// At least one.
    pub topics: Vec<String>,
    /// Where a partition without a committed offset begins.
    pub auto_offset_reset: OffsetReset,
    /// At most so many records are with the intake at a time, all partitions together; at least 1.
    pub max_poll_records: u32,
}

/// One destination.
#[derive(Debug, Clone)]
pub struct DestinationConfig {
    /// Where.
    pub cluster: Cluster,
    /// `topic` or `topicFrom`.
    pub topic: Address,
    /// `keyTemplate`; a route's `routingKey` wins over it.
    pub key: Template,
    /// The manifest's `headers`.
    pub headers: Vec<(String, String)>,
    /// The whole budget of one attempt, from the call to the acknowledgement; 2 s or more.
    pub timeout: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_never_prints_its_value() {
        let sasl = Sasl { mechanism: "PLAIN".into(), username: "app".into(), password: Secret::fixed("canary-7731") };
        assert!(!format!("{sasl:?}").contains("canary"), "{sasl:?}");
    }

    #[test]
    fn protocols_are_read_in_any_case() {
        assert_eq!(SecurityProtocol::parse("sasl_ssl"), Some(SecurityProtocol::SaslSsl));
        assert_eq!(SecurityProtocol::parse("TLS"), None);
    }
}
