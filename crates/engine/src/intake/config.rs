//! What a source is told by its manifest: checked values only, no defaults of manifests in here.

use std::time::Duration;

use queuebox_core::{message::Consumption, template::Template};

use crate::{
    expression::{Bounds, Expression},
    filter::Filter,
    json::{self, Path},
    transform::Transform,
};

/// Where messages come from; decides the order of origins (contract 6.2) and what becomes of messages that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// The sender waits for an answer.
    Http,
    /// RabbitMQ.
    RabbitMq,
    /// Kafka.
    Kafka,
    /// NATS JetStream.
    Nats,
}

impl SourceKind {
    /// As in manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::RabbitMq => "rabbitmq",
            Self::Kafka => "kafka",
            Self::Nats => "nats",
        }
    }

    /// Is it a broker? Then there is nobody to answer: a message that cannot be used becomes a dead row.
    pub fn is_broker(self) -> bool {
        self != Self::Http
    }
}

/// Origins of one attribute.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    /// HTTP: the configured header. Brokers: the attribute header.
    pub header: Option<String>,
    /// On the original body.
    pub expression: Option<Expression>,
    /// In this order.
    pub paths: Vec<Path>,
}

/// The idempotency key of a broker message that has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyFallback {
    /// `sha256:` and the digest of the body's bytes.
    #[default]
    Digest,
    /// `topic/partition/offset` or `stream/sequence`.
    Position,
}

/// Origins of the publish time. Only with an `initial_delay`.
#[derive(Debug, Clone, Default)]
pub struct PublishTime {
    /// `scheduledAtHeader`.
    pub header: Option<String>,
    /// `scheduledAtPath`, in this order.
    pub paths: Vec<Path>,
}

/// What the database takes, as far as the intake has to know it beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreLimits {
    /// Bodies.
    pub json: json::Limits,
    /// Idempotency key, aggregate, event type.
    pub keys: KeyRule,
}

/// Which key values a database can hold without merging or cutting them (contract 2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyRule {
    /// At most 255 characters.
    #[default]
    Characters,
    /// At most 255 UTF-16 units, and no blank at the end (SQL Server).
    Utf16NoTrailingBlank,
}

/// One source.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Stored in `inbox.source`.
    pub name: String,
    /// Where messages come from.
    pub kind: SourceKind,
    /// Stored in each row.
    pub consumption: Consumption,
    /// Rendered at receipt for push rows.
    pub topic: Template,
    /// Origins of the idempotency key.
    pub idempotency_key: Origins,
    /// Origins of the aggregate.
    pub aggregate_id: Origins,
    /// Origins of the event type.
    pub event_type: Origins,
    /// Kafka: the record key is an origin of the idempotency key, before the fallback.
    pub idempotency_from_record_key: bool,
    /// Brokers: the last origin.
    pub key_fallback: KeyFallback,
    /// `initialDelay`; zero = none.
    pub initial_delay: Duration,
    /// With it `scheduled_at` = min(publish time, receipt) + delay.
    pub published_at: Option<PublishTime>,
    /// What is dropped.
    pub filter: Filter,
    /// The source stage.
    pub transform: Option<Transform>,
    /// Bounds of attribute expressions.
    pub expression_bounds: Bounds,
    /// HTTP: `inbox.storeTimeout`, in which an answer is due. Brokers: `inbox.storeRetryWindow`, for which a store that fails
    /// is tried again in place; zero = not at all.
    pub store_within: Duration,
    /// What the database takes.
    pub limits: StoreLimits,
}
