//! Blocks that more than one kind uses: references to secrets, TLS, transforms, back-off, broker logins.

use queuebox_core::template::Column;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    crd::{exactly_one, together},
    value::{DurationText, POSITIVE_DURATION_PATTERN},
};

/// Name of an object in the same namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NameRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// A key of a Secret or ConfigMap in the same namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the Secret or ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key in it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Where a secret value comes from: exactly one of the members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = exactly_one(&["secretKeyRef", "env", "file"])))]
pub struct SecretRef {
    /// Key of a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// Name of an environment variable.
    #[schemars(length(min = 1, max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// Path of a file.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// Where certificates come from: exactly one of the members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = exactly_one(&["secretKeyRef", "configMapKeyRef", "env", "file"])))]
pub struct CaRef {
    /// Key of a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// Key of a ConfigMap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
    /// Name of an environment variable.
    #[schemars(length(min = 1, max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// Path of a file.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A private CA and a client certificate, PEM text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = together("certFrom", "keyFrom")))]
pub struct TlsSpec {
    /// Certificates that the peer's is checked against, in place of the public ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_from: Option<CaRef>,
    /// Our certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_from: Option<SecretRef>,
    /// Key of our certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_from: Option<SecretRef>,
}

/// What a failed transform means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
pub enum OnError {
    /// The attempt fails; at a source the message is refused.
    #[default]
    Fail,
    /// The stage hands its input on.
    Skip,
    /// The row is dead at once; at a source as `Fail`.
    Dead,
}

/// A JSONata expression that reshapes the payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransformSpec {
    /// JSONata.
    #[schemars(length(min = 1, max = 16384))]
    pub expression: String,
    /// Longest time of one evaluation. Default 100ms.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// Deepest nesting of one evaluation. Default 100.
    #[schemars(range(min = 1, max = 10000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// What a failure means. Default Fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_error: Option<OnError>,
}

/// Delays between attempts: they double from `initial` to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct BackoffSpec {
    /// Delay before the second attempt.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial: Option<DurationText>,
    /// Longest delay.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<DurationText>,
}

/// A column of the outbox row that holds an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ColumnName {
    /// `aggregate_type`.
    AggregateType,
    /// `topic`.
    Topic,
    /// `key`.
    Key,
}

impl From<ColumnName> for Column {
    fn from(name: ColumnName) -> Self {
        match name {
            ColumnName::AggregateType => Self::AggregateType,
            ColumnName::Topic => Self::Topic,
            ColumnName::Key => Self::Key,
        }
    }
}

/// How a Kafka connection is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum SecurityProtocol {
    /// No TLS, no login.
    #[default]
    Plaintext,
    /// TLS.
    Ssl,
    /// Login without TLS.
    SaslPlaintext,
    /// Login and TLS.
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

    /// Needs user and password.
    pub fn is_sasl(self) -> bool {
        matches!(self, Self::SaslPlaintext | Self::SaslSsl)
    }
}

/// What stands in for a missing idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub enum IdempotencyKeyFallback {
    /// SHA-256 of the body.
    #[default]
    Digest,
    /// Topic, partition and offset, or stream and sequence.
    Position,
}

/// A switch that is on by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
pub enum AutoOrOff {
    /// On.
    #[default]
    Auto,
    /// Off.
    Off,
}
