//! A named entrance, and the intake behind all entrances.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

use crate::Fault;

/// A message as it came, before anything was read out of it.
#[derive(Debug, Clone, Default)]
pub struct Received {
    /// The body's bytes as received.
    pub body: Bytes,
    /// Headers in order, names as received, repeated ones repeated. Values as contract 6.3 says. Without the secret ones.
    pub headers: Vec<(String, String)>,
    /// HTTP: given or new, already in the answer. Brokers: the property of the protocol, if it has one.
    pub correlation_id: Option<String>,
    /// The broker's own id: AMQP `message_id`, `Nats-Msg-Id`.
    pub message_id: Option<String>,
    /// Kafka's record key as text.
    pub record_key: Option<String>,
    /// The broker's own time of publishing, microseconds since 1970.
    pub published_at_us: Option<i64>,
    /// `topic/partition/offset` or `stream/sequence`.
    pub position: Option<String>,
}

/// What the intake decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Stored and committed. A broker message that cannot be used is stored too, in state `dead`: acknowledge it.
    Stored(Uuid),
    /// Stored before. Acknowledge.
    Duplicate,
    /// Dropped by the filter. Acknowledge.
    Filtered,
    /// HTTP only: the sender's fault.
    Refused {
        /// What kind.
        kind: Refusal,
        /// For the sender; no secret.
        reason: String,
    },
    /// Not stored. Do not acknowledge; sending again is safe.
    Failed(Fault),
}

/// Kinds of refusal, for HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// 400 `Invalid JSON`.
    NotJson,
    /// 400 with the reason.
    BadAttribute,
    /// 422.
    Transform,
}

/// The way in, the same for HTTP and brokers: filter → attributes → transform → store (contract 6.1). The engine implements it,
/// one per source.
#[async_trait]
pub trait Intake: Send + Sync + 'static {
    /// Handles a batch; one answer per message, in order. Rows are stored in the order of the batch. Tries passing failures
    /// again in place, for as long as the source is configured to.
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission>;
}

/// State of a source, for readiness, status and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceHealth {
    /// Receiving.
    Up,
    /// Not receiving, and why, in words that name the queue, topic or stream. Redacted.
    Down(String),
}

/// A broker source: polls its broker and hands batches to the intake. HTTP sources are routes of the data port, not pollers.
///
/// Laws (tested by `queuebox_conformance::source`):
/// - A message is acknowledged only after the intake answered [`Admission::Stored`], `Duplicate` or `Filtered`.
/// - A failed store is given back as contract 6.7 says; nothing is acknowledged past it.
/// - `run` ends only when `stop` resolves, whatever the broker does, and then within a few seconds.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// `rabbitmq`, `kafka`, `nats`.
    fn kind(&self) -> &'static str;

    /// Receives until `stop` resolves. Reconnects by itself.
    async fn run(&self, intake: Arc<dyn Intake>, stop: futures::future::BoxFuture<'static, ()>);

    /// Receiving or not.
    fn health(&self) -> SourceHealth;
}
