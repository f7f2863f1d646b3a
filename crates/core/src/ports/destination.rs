//! A named exit.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

use crate::{Fault, template::Template};

/// One message on its way out. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// `outbox.id`, the same on every attempt; on the wire `X-Message-Id`.
    pub id: Uuid,
    /// The row's topic.
    pub topic: String,
    /// The row's key, never empty.
    pub key: Option<String>,
    /// For address templates.
    pub aggregate_type: Option<String>,
    /// The body, after the transforms.
    pub payload: Bytes,
    /// The row's headers, in order, names as written. A `traceparent` from the column stands here already.
    pub headers: Vec<(String, String)>,
    /// Failed attempts before this one; on the wire `X-Attempt`.
    pub attempt: i32,
    /// The route's `routingKey`, if it has one; wins over the destination's.
    pub routing_key: Option<Arc<Template>>,
    /// The publish must end within this time: the worker's lease ends then.
    pub time_left: Duration,
}

/// Something that takes messages.
///
/// Laws (tested by `queuebox_conformance::destination`):
/// - `Ok` only after the receiver took responsibility (2xx, confirm, acknowledgement).
/// - [`crate::Class::NotConnected`] only when the message was certainly not offered to the peer.
/// - [`crate::Class::Ambiguous`] whenever it may have arrived.
/// - Ends within the destination's time-out and `time_left`, whatever the peer does, and names the phase in which it ended.
/// - Many calls run at the same time; each has its own outcome. Dropping the future gives up waiting and leaks nothing.
/// - No secret in a fault's text.
#[async_trait]
pub trait Destination: Send + Sync + 'static {
    /// `http`, `rabbitmq`, `kafka`, `nats`: the metric label `destination_type`.
    fn kind(&self) -> &'static str;

    /// Publishes one message.
    async fn publish(&self, delivery: Delivery) -> Result<(), Fault>;

    /// Is the peer there, with everything that the manifest names (exchange, topic, stream)? Connects if need be. HTTP answers
    /// `Ok` without asking anybody.
    async fn probe(&self) -> Result<(), Fault>;

    /// Closes connections; publishes in flight end first.
    async fn close(&self) {}
}
