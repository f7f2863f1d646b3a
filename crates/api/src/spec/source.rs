//! `Source`: a named entrance (contract 13.2).

#![allow(clippy::duplicated_attributes, reason = "each printer column has a name and a type")]

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    auth::InboundAuthSpec,
    common::{IdempotencyKeyFallback, NameRef, SecretRef, SecurityProtocol, TlsSpec, TransformSpec},
    status::SourceStatus,
};
use crate::{
    crd::{exactly_one, source_rules},
    value::{DurationText, OneOrMany, POSITIVE_DURATION_PATTERN},
};

/// A named entrance: messages are stored in the inbox of its Relay, once per idempotency key.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "queuebox.io",
    version = "v1alpha1",
    kind = "Source",
    plural = "sources",
    namespaced,
    status = "SourceStatus",
    shortname = "qbs",
    category = "queuebox",
    doc = "A named entrance: messages are stored in the inbox of its Relay, once per idempotency key.",
    printcolumn(name = "Type", type_ = "string", json_path = ".status.type"),
    printcolumn(name = "Relay", type_ = "string", json_path = ".spec.relayRef.name"),
    printcolumn(name = "Consumption", type_ = "string", json_path = ".status.consumption"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = source_rules()))]
pub struct SourceSpec {
    /// The Relay whose inbox stores the messages. Immutable.
    pub relay_ref: NameRef,
    /// Stops receiving. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// How messages leave the inbox: forwarded, or claimed by the application. Default push.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumption: Option<ConsumptionName>,
    /// Topic of forwarded messages, a template of source and eventType. Default {{ eventType }} for http, else {{ source }}.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// JSONPath or list of JSONPaths of the idempotency key. Default $.id for brokers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_path: Option<OneOrMany>,
    /// JSONPath or list of JSONPaths of the aggregate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregate_id_path: Option<OneOrMany>,
    /// JSONPath or list of JSONPaths of the event type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_path: Option<OneOrMany>,
    /// JSONata of the idempotency key.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_expression: Option<String>,
    /// JSONata of the aggregate.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregate_id_expression: Option<String>,
    /// JSONata of the event type.
    #[schemars(length(min = 1, max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_expression: Option<String>,
    /// Holds each message for so long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_delay: Option<DurationText>,
    /// Header with the time of publishing; needs initialDelay.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduled_at_header: Option<String>,
    /// JSONPath or list of JSONPaths of the time of publishing; needs initialDelay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduled_at_path: Option<OneOrMany>,
    /// Reshapes the body before it is stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<TransformSpec>,
    /// Drops messages by their headers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<FilterSpec>,
    /// Receives webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSourceSpec>,
    /// Reads a RabbitMQ queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rabbitmq: Option<RabbitMqSourceSpec>,
    /// Reads Kafka topics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kafka: Option<KafkaSourceSpec>,
    /// Reads a NATS JetStream stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats: Option<NatsSourceSpec>,
}

/// How messages leave the inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "lowercase")]
pub enum ConsumptionName {
    /// Forwarded to the outbox.
    #[default]
    Push,
    /// Claimed by the application's own worker.
    Pull,
}

/// Rules over headers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct FilterSpec {
    /// All of these match, or the message is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require: Option<Vec<FilterRuleSpec>>,
    /// One of these matches, and the message is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude: Option<Vec<FilterRuleSpec>>,
}

/// One rule: exactly one test of one header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = exactly_one(&["equals", "in", "matches", "exists"])))]
pub struct FilterRuleSpec {
    /// Name of the header, in any case.
    #[schemars(length(min = 1, max = 255))]
    pub header: String,
    /// The value is exactly this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub equals: Option<String>,
    /// The value is one of these.
    #[serde(rename = "in")]
    #[schemars(length(min = 1, max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_of: Option<Vec<String>>,
    /// The value matches this topic pattern.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matches: Option<String>,
    /// The header is there; only true.
    #[schemars(extend("enum" = [true]))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exists: Option<bool>,
}

/// Webhooks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpSourceSpec {
    /// Path behind the Relay's inbox.basePath; begins with a slash; unique in the Relay.
    #[schemars(length(min = 1, max = 1024), regex(pattern = "^/"))]
    pub path: String,
    /// Header with the idempotency key.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_header: Option<String>,
    /// Header with the event type.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_header: Option<String>,
    /// Header with the aggregate.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregate_id_header: Option<String>,
    /// Who may post. Without it anyone may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth: Option<InboundAuthSpec>,
    /// Limits requests per process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limit: Option<RateLimitSpec>,
}

/// A token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitSpec {
    /// Requests a minute.
    #[schemars(range(min = 1, max = 100_000_000))]
    pub requests_per_minute: u32,
}

/// Other names of the headers that brokers carry attributes in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct AttributeHeadersSpec {
    /// Default x-idempotency-key.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Default x-aggregate-id.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<String>,
    /// Default x-event-type.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
}

/// A RabbitMQ queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = exactly_one(&["url", "urlFrom"])))]
pub struct RabbitMqSourceSpec {
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
    /// Queue to read.
    #[schemars(length(min = 1, max = 255))]
    pub queue_name: String,
    /// Messages that may be unacknowledged. Default 10.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch_count: Option<u32>,
    /// Declares the queue, durable. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declare_queue: Option<bool>,
    /// Private CA and client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// A message must have its event type in a header or elsewhere before the topic may use it. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_from_header: Option<bool>,
    /// Other names of the attribute headers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attribute_headers: Option<AttributeHeadersSpec>,
    /// What stands in for a missing key: digest only. Default digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_fallback: Option<IdempotencyKeyFallback>,
}

/// Where a partition without a committed offset begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "lowercase")]
pub enum OffsetReset {
    /// With the oldest record.
    #[default]
    Earliest,
    /// With the next record.
    Latest,
}

/// Kafka topics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct KafkaSourceSpec {
    /// host:port, comma separated.
    #[schemars(length(min = 1))]
    pub bootstrap_servers: String,
    /// Consumer group.
    #[schemars(length(min = 1, max = 255))]
    pub group_id: String,
    /// Topics to read.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 249)))]
    pub topics: Vec<String>,
    /// Where a partition without a committed offset begins. Default earliest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_offset_reset: Option<OffsetReset>,
    /// Records that may be unacknowledged. Default 100.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_poll_records: Option<u32>,
    /// The record key is an origin of the idempotency key. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_from_record_key: Option<bool>,
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
    /// A message must have its event type in a header or elsewhere before the topic may use it. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_from_header: Option<bool>,
    /// Other names of the attribute headers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attribute_headers: Option<AttributeHeadersSpec>,
    /// What stands in for a missing key. Default digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_fallback: Option<IdempotencyKeyFallback>,
}

/// A NATS JetStream stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct NatsSourceSpec {
    /// Servers, comma separated, without credentials.
    #[schemars(length(min = 1))]
    pub servers: String,
    /// Stream to read.
    #[schemars(length(min = 1, max = 255))]
    pub stream: String,
    /// Durable consumer.
    #[schemars(length(min = 1, max = 255))]
    pub durable: String,
    /// Reads only these subjects.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter_subject: Option<String>,
    /// Redelivered when not acknowledged for so long. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack_wait: Option<DurationText>,
    /// Messages that may be unacknowledged. Default 100.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
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
    /// A message must have its event type in a header or elsewhere before the topic may use it. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type_from_header: Option<bool>,
    /// Other names of the attribute headers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attribute_headers: Option<AttributeHeadersSpec>,
    /// What stands in for a missing key. Default digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key_fallback: Option<IdempotencyKeyFallback>,
}
