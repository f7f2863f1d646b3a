//! `Destination`: a named exit (contract 13.3).

#![allow(clippy::duplicated_attributes, reason = "each printer column has a name and a type")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    auth::{OutboundAuthSpec, SigningSpec},
    common::{AutoOrOff, BackoffSpec, ColumnName, SecretRef, SecurityProtocol, TlsSpec, TransformSpec},
    status::DestinationStatus,
};
use crate::{
    crd::{at_least_one, destination_rules, exactly_one, rule},
    value::{DurationText, POSITIVE_DURATION_PATTERN},
};

/// A named exit: messages are delivered there at least once.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "queuebox.io",
    version = "v1alpha1",
    kind = "Destination",
    plural = "destinations",
    namespaced,
    status = "DestinationStatus",
    shortname = "qbd",
    category = "queuebox",
    doc = "A named exit: messages are delivered there at least once.",
    printcolumn(name = "Type", type_ = "string", json_path = ".status.type"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(
        name = "Delivering",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Delivering\")].status"
    ),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = destination_rules()))]
pub struct DestinationSpec {
    /// Holds its rows. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Sent with each message; headers of the row win.
    #[schemars(extend("maxProperties" = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    /// Reshapes the payload on every attempt, after the route's transform.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<TransformSpec>,
    /// Bounds of the whole Relay; a worker uses its share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSpec>,
    /// Default: the Relay's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<BackoffSpec>,
    /// Longest pause that a receiver may ask for; 0s ignores it. Default 5m.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_max: Option<DurationText>,
    /// Holds the rows of a destination that fails again and again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub breaker: Option<BreakerSpec>,
    /// Posts to an HTTP endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpDestinationSpec>,
    /// Publishes to a RabbitMQ exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rabbitmq: Option<RabbitMqDestinationSpec>,
    /// Writes to a Kafka topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kafka: Option<KafkaDestinationSpec>,
    /// Publishes to NATS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats: Option<NatsDestinationSpec>,
}

/// Bounds of the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" =
    rule("!has(self.burst) || has(self.requestsPerSecond)", "burst needs requestsPerSecond")))]
pub struct LimitsSpec {
    /// Unfinished publishes. Default 64 for http, else the Relay's outbox.maxInFlight.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// Publishes a second.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<u32>,
    /// Publishes at once. Default: requestsPerSecond.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
}

/// Holds a destination after many failures in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct BreakerSpec {
    /// Auto or "Off" (in quotes). Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<AutoOrOff>,
    /// Failures in a row that open it. Default 10.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<u32>,
    /// Held for so long before one row probes. Default 10s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_for: Option<DurationText>,
}

/// An HTTP endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpDestinationSpec {
    /// Absolute http or https URL without credentials.
    #[schemars(length(min = 1))]
    pub url: String,
    /// Bounds the whole attempt. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// Credential that is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth: Option<OutboundAuthSpec>,
    /// Signature that is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signing: Option<SigningSpec>,
    /// Private CA and client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// Statuses that make a message dead at once: numbers from 300 to 599, or 4xx, 5xx.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permanent_statuses: Option<Vec<IntOrString>>,
}

/// Kind of a RabbitMQ exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeType {
    /// By routing key patterns.
    #[default]
    Topic,
    /// By equal routing keys.
    Direct,
    /// To every queue.
    Fanout,
}

impl ExchangeType {
    /// The word of the manifest and of the protocol.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Topic => "topic",
            Self::Direct => "direct",
            Self::Fanout => "fanout",
        }
    }
}

/// Whether a broker keeps a message on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryMode {
    /// On disk.
    #[default]
    Persistent,
    /// In memory.
    Transient,
}

/// A RabbitMQ exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" =
    exactly_one(&["url", "urlFrom"]).and(at_least_one(&["exchange", "exchangeFrom"]))))]
pub struct RabbitMqDestinationSpec {
    /// amqp:// or amqps:// without credentials.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// URL with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url_from: Option<SecretRef>,
    /// User.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_from: Option<SecretRef>,
    /// Private CA and client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// Exchange, a template.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange: Option<String>,
    /// Column that holds the exchange; wins over exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange_from: Option<ColumnName>,
    /// Default topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange_type: Option<ExchangeType>,
    /// Declares the exchange, durable. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declare_exchange: Option<bool>,
    /// Routing key, a template. Default {{ topic }}.
    #[schemars(length(max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_key: Option<String>,
    /// Default persistent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delivery_mode: Option<DeliveryMode>,
    /// Time until the confirm. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
}

/// A Kafka topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = at_least_one(&["topic", "topicFrom"])))]
pub struct KafkaDestinationSpec {
    /// host:port, comma separated.
    #[schemars(length(min = 1))]
    pub bootstrap_servers: String,
    /// Topic, a template.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Column that holds the topic; wins over topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic_from: Option<ColumnName>,
    /// Record key, a template of key and topic. Default {{ key }}.
    #[schemars(length(max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_template: Option<String>,
    /// The whole budget of one attempt, 2s or more. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// Default PLAINTEXT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_protocol: Option<SecurityProtocol>,
    /// PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
    #[schemars(length(min = 1, max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sasl_mechanism: Option<String>,
    /// User.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sasl_username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sasl_password_from: Option<SecretRef>,
    /// Private CA and client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
}

/// A NATS subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = at_least_one(&["subject", "subjectFrom"])))]
pub struct NatsDestinationSpec {
    /// Servers, comma separated, without credentials.
    #[schemars(length(min = 1))]
    pub servers: String,
    /// Subject, a template.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// Column that holds the subject; wins over subject.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject_from: Option<ColumnName>,
    /// Waits for the acknowledgement of JetStream; without it loss is possible. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jet_stream: Option<bool>,
    /// Time until the acknowledgement. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// User.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_from: Option<SecretRef>,
    /// Token in place of user and password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_from: Option<SecretRef>,
    /// Private CA and client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
}
