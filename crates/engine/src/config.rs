//! What the engine needs to know, already checked: plain values, no defaults to resolve, nothing that can be wrong. The catalog
//! builds it from checked manifests.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use queuebox_core::{pattern::Pattern, ports::Destination, retry::RetrySchedule, template::Template};

use crate::transform::Transform;

/// One Relay: its identity, its outbox and inbox settings, its routes and destinations.
#[derive(Clone)]
pub struct RelayConfig {
    /// UID of the Relay; in local runs `local/<namespace>/<name>`. Two Relays on the same tables stand by for each other.
    pub relay_uid: String,
    /// `<number>/<content hash>`: only a worker with the newest number, or an equal hash, may say `no_route` (contract 7.1).
    pub config_version: String,
    /// Name of this process: host or pod name. A random suffix is added at each registration.
    pub worker_name: String,
    /// The outbox's settings.
    pub outbox: OutboxConfig,
    /// Tested in order, the first match wins.
    pub routes: Vec<Route>,
    /// By name; every name in `routes` is here.
    pub destinations: BTreeMap<String, DestinationConfig>,
    /// Time from the stop signal to the end of everything.
    pub drain_timeout: Duration,
}

/// `Relay.spec.outbox` (contract 13.4).
#[derive(Debug, Clone)]
pub struct OutboxConfig {
    /// Longest idle wait.
    pub poll_interval: Duration,
    /// Rows per round trip.
    pub batch_size: u32,
    /// Unfinished publishes of this worker.
    pub max_in_flight: u32,
    /// Their payloads, in bytes.
    pub max_in_flight_bytes: u64,
    /// A larger payload is never loaded: dead `refused`.
    pub max_payload_bytes: u64,
    /// The lease (`claimTimeout`).
    pub lease: Duration,
    /// Crashes until a row is dead.
    pub max_crashes: i32,
    /// How often the gauges of the table are counted, at most.
    pub gauge_interval: Duration,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        Self {
            poll_interval: Duration::from_millis(100),
            batch_size: 500,
            max_in_flight: 512,
            max_in_flight_bytes: 64 << 20,
            max_payload_bytes: 16 << 20,
            lease: Duration::from_secs(30),
            max_crashes: 5,
            gauge_interval: Duration::from_secs(5),
        }
    }
}

/// One entry of `Relay.spec.routes`.
#[derive(Debug, Clone)]
pub struct Route {
    /// Any of these.
    pub topics: Vec<Pattern>,
    /// One, or several for a fan-out.
    pub destinations: Vec<String>,
    /// Runs on every attempt, before the destination's.
    pub transform: Option<Arc<Transform>>,
    /// Wins over the destination's routing key.
    pub routing_key: Option<Arc<Template>>,
}

/// A destination with the rules of its traffic (contract 13.3).
#[derive(Clone)]
pub struct DestinationConfig {
    /// The connector.
    pub port: Arc<dyn Destination>,
    /// Holds its rows.
    pub paused: bool,
    /// For the whole Relay; a worker uses its share of the lanes, at least 1.
    pub max_in_flight: u32,
    /// Publishes a second for the whole Relay, and how many at once.
    pub rate: Option<Rate>,
    /// When a failed row is tried again.
    pub schedule: RetrySchedule,
    /// Holds the destination after so many failures in a row.
    pub breaker: Option<BreakerConfig>,
    /// Runs on every attempt, after the route's.
    pub transform: Option<Arc<Transform>>,
}

/// `limits.requestsPerSecond` and `.burst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Publishes a second.
    pub per_second: u32,
    /// Publishes at once.
    pub burst: u32,
}

/// `breaker` (contract 7.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failures: u32,
    /// How long it stays open before a row probes.
    pub open_for: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 10, open_for: Duration::from_secs(10) }
    }
}
