//! NATS as a source (JetStream only) and as a destination (JetStream by default).
//!
//! ```text
//!   NatsDestination::publish ──► destination (subject, headers, limits) ──► JetStream acknowledgement, or a plain write
//!   NatsSource::run          ──► link, durable, pull ──► Intake of the engine ──► ack, or nak and a pause
//! ```
//!
//! Recovery is our own: a client whose connection is lost is thrown away, and the next one is opened with the credentials
//! and certificates of that moment. The client library can reconnect by itself, but it keeps the certificates, and it sends
//! what was queued meanwhile although its outcome is reported already.
//!
//! Invariants:
//! - A publish is `Ok` only after the stream's acknowledgement; without JetStream after it was written (contract 7.5).
//! - A received message is acknowledged only after the intake stored it (contract 6.7).
//! - Every wait ends: connecting within [`config::CONNECT_TIMEOUT`], publishing within the destination's time-out.

pub mod config;
mod destination;
pub mod fault;
mod link;
mod source;

pub use config::{ConnectionConfig, DestinationConfig, Login, SourceConfig, TlsConfig};
pub use destination::NatsDestination;
pub use fault::{Error, classify};
pub use queuebox_core::Secret;
pub use source::NatsSource;
