//! Apache Kafka as a destination and as a source.
//!
//! ```text
//!   KafkaDestination::publish ──► record (address, key, headers) ──► producer (librdkafka) ──► outcome by delivery report
//!   KafkaSource::run          ──► consumer thread ──► one batch per partition ──► Intake ──► offsets of the unbroken run
//! ```
//!
//! Nothing here reads manifests or files: configuration is plain structs, and secrets are asked for through [`Secret`]
//! whenever a client is made. What each error means stands in one table, [`fault::classify`].

mod client;
pub mod config;
pub mod destination;
pub mod fault;
pub mod source;

pub use config::{Cluster, DestinationConfig, OffsetReset, Sasl, SecurityProtocol, SourceConfig, Tls};
pub use destination::KafkaDestination;
pub use fault::{KafkaFault, classify};
pub use queuebox_core::Secret;
pub use source::KafkaSource;
