//! RabbitMQ as a source and as a destination.
//!
//! ```text
//!   RabbitDestination::publish ──► destination (address, properties, limits) ──► session ──► pipe (one confirm per row)
//!   RabbitSource::run          ──► link, consumer ──► Intake of the engine ──► ack, or nack with requeue and a pause
//! ```
//!
//! Recovery is our own: a connection or channel that failed is thrown away and opened anew, with the credentials and
//! certificates of that moment. The client library can also recover by itself, but it replays publishes whose outcome is
//! already reported, and it keeps the old credentials.
//!
//! Invariants:
//! - A publish is `Ok` only after its own confirm, and never when the broker returned it (contract 7.5).
//! - A received message is acknowledged only after the intake stored it (contract 6.7).
//! - Every wait ends: connecting within [`config::CONNECT_TIMEOUT`], publishing within the destination's time-out.

pub mod config;
mod destination;
pub mod fault;
mod link;
mod pipe;
mod source;
mod values;

pub use config::{BrokerUrl, ConnectionConfig, DeliveryMode, DestinationConfig, ExchangeType, SourceConfig, TlsConfig};
pub use destination::RabbitDestination;
pub use fault::{Error, classify};
pub use queuebox_core::Secret;
pub use source::RabbitSource;
