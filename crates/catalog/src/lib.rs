//! The one list of stores and connectors: builds ports from checked manifests.
//!
//! Adding a database or a broker touches its own folder and this crate. Nothing here connects to anything: a port is opened, and its
//! peer is reached when it is first used, so that a peer that is away hurts only itself.

mod destination;
mod secret;
mod source;
mod store;

use std::{collections::HashMap, sync::Arc, time::Duration};

use queuebox_api::{SecretResolver, checked};
use queuebox_core::ports::{Scope, outbox::PruneRule};
use queuebox_engine::{
    config::{OutboxConfig, RelayConfig, Route},
    expression::{Bounds, Expression},
    forward,
    intake::AdmissionLimits,
    retention::TableRetention,
    transform::{OnError, Transform},
    worker::WorkerConfig,
};

pub use self::{
    source::{BrokerSource, HttpSourceParts, Sources, inbound_auth},
    store::{Opened, open_store, refuse_fan_out},
};

/// Kinds of databases that this release serves.
pub const STORES: [&str; 2] = ["postgres", "sqlite"];
/// Kinds of sources and destinations that this release serves.
pub const CONNECTORS: [&str; 4] = ["http", "rabbitmq", "kafka", "nats"];

/// A checked value that cannot be opened after all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {name}: {reason}")]
pub struct CatalogError {
    /// `Relay`, `Source` or `Destination`.
    pub kind: &'static str,
    /// Name of the object.
    pub name: String,
    /// Field and reason; never a secret.
    pub reason: String,
}

impl CatalogError {
    fn new(kind: &'static str, name: &str, reason: impl Into<String>) -> Self {
        Self { kind, name: name.to_owned(), reason: reason.into() }
    }
}

/// Builds everything of one Relay.
pub struct Catalog<'a> {
    relay: &'a checked::Relay,
    secrets: Arc<dyn SecretResolver>,
}

impl<'a> Catalog<'a> {
    /// For this Relay, its secrets read through `secrets`.
    pub fn new(relay: &'a checked::Relay, secrets: Arc<dyn SecretResolver>) -> Self {
        Self { relay, secrets }
    }

    /// What the engine's worker does. `version` is `<number>/<content hash>` of the configuration, `worker_name` the host or pod.
    ///
    /// # Errors
    /// A destination that cannot be built.
    pub fn worker(&self, version: String, worker_name: String) -> Result<WorkerConfig, CatalogError> {
        let relay = self.relay;
        let mut destinations = std::collections::BTreeMap::new();
        for destination in &relay.destinations {
            destinations.insert(destination.name.clone(), destination::build(destination, relay, &self.secrets)?);
        }
        let mut routes = Vec::with_capacity(relay.routes.len());
        for route in &relay.routes {
            routes.push(Route {
                topics: route.topics.clone(),
                destinations: route.destinations.clone(),
                transform: optional_transform(route.transform.as_ref(), "Relay", &relay.name)?.map(Arc::new),
                routing_key: route.routing_key.clone().map(Arc::new),
            });
        }
        let config = RelayConfig {
            relay_uid: relay.uid(),
            config_version: version,
            worker_name,
            outbox: outbox(&relay.outbox),
            routes,
            destinations,
            drain_timeout: relay.drain_timeout,
        };
        Ok(WorkerConfig {
            relay: Arc::new(config),
            forward: relay.inbox.relay.as_ref().map(|inbox| self.forward(inbox)),
            admissions: AdmissionLimits {
                queued_bytes_max: usize::try_from(relay.inbox.max_bytes_in_flight).unwrap_or(usize::MAX),
                ..AdmissionLimits::default()
            },
            retention: retention(&relay.retention),
            inbox_gauge_interval: relay.inbox.pending_gauge_interval,
            tracer: None,
        })
    }

    fn forward(&self, inbox: &checked::InboxRelay) -> forward::RelayConfig {
        let topics: HashMap<_, _> =
            self.relay.sources.iter().filter_map(|source| Some((source.name.clone(), source.topic.clone()?))).collect();
        forward::RelayConfig {
            poll_interval: inbox.poll_interval,
            batch_size: inbox.batch_size,
            max_attempts: inbox.max_attempts,
            max_crashes: self.relay.inbox.max_crashes,
            topics,
        }
    }

    /// The Relay's sources.
    ///
    /// # Errors
    /// A source that cannot be built.
    pub fn sources(&self) -> Result<Sources, CatalogError> {
        source::build(self.relay, &self.secrets)
    }
}

fn outbox(outbox: &checked::Outbox) -> OutboxConfig {
    OutboxConfig {
        poll_interval: outbox.poll_interval,
        batch_size: outbox.batch_size,
        max_in_flight: outbox.max_in_flight,
        max_in_flight_bytes: outbox.max_in_flight_bytes,
        max_payload_bytes: outbox.max_payload_bytes,
        lease: outbox.claim_timeout,
        max_crashes: outbox.max_crashes,
        gauge_interval: outbox.pending_gauge_interval,
    }
}

fn retention(retention: &checked::Retention) -> Vec<(Scope, TableRetention)> {
    let tables = [(Scope::Outbox, &retention.outbox), (Scope::Inbox, &retention.inbox)];
    tables.into_iter().filter_map(|(scope, table)| Some((scope, table_retention(table.as_ref()?)))).collect()
}

/// A thousand years: no database holds times before its calendar.
const AGE_MAX: Duration = Duration::from_secs(1_000 * 365 * 86_400);

fn table_retention(table: &checked::TableRetention) -> TableRetention {
    let older = |age: Duration| PruneRule::OlderThan(u64::try_from(age.min(AGE_MAX).as_millis()).unwrap_or(u64::MAX));
    let (rule, dead_rule) = match table.keep {
        checked::Keep::Age { finished, dead } => (finished.map(older), dead.map(older)),
        checked::Keep::Count(count) => (Some(PruneRule::Beyond(count)), Some(PruneRule::Beyond(count))),
    };
    TableRetention { rule, dead_rule, cleanup_interval: table.cleanup_interval, batch_size: table.batch_size }
}

fn optional_transform(
    transform: Option<&checked::Transform>,
    kind: &'static str,
    name: &str,
) -> Result<Option<Transform>, CatalogError> {
    transform.map(|transform| build_transform(transform, kind, name)).transpose()
}

fn build_transform(transform: &checked::Transform, kind: &'static str, name: &str) -> Result<Transform, CatalogError> {
    let expression = Expression::compile(&transform.expression)
        .map_err(|error| CatalogError::new(kind, name, format!("transform.expression: {error}")))?;
    let on_error = match transform.on_error {
        checked::OnError::Fail => OnError::Fail,
        checked::OnError::Skip => OnError::Skip,
        checked::OnError::Dead => OnError::Dead,
    };
    let bounds = Bounds { timeout: transform.timeout, max_depth: transform.max_depth, ..Bounds::default() };
    Ok(Transform { expression, bounds, on_error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_that_is_not_given_prunes_nothing() {
        let keep = |finished, dead| {
            let keep = checked::Keep::Age { finished, dead };
            let kept =
                table_retention(&checked::TableRetention { keep, cleanup_interval: Duration::ZERO, batch_size: 1 });
            (kept.rule, kept.dead_rule)
        };
        let second = Duration::from_secs(1);
        assert_eq!(keep(None, Some(second)), (None, Some(PruneRule::OlderThan(1_000))));
        assert_eq!(keep(Some(second), None), (Some(PruneRule::OlderThan(1_000)), None));
        assert_eq!(keep(Some(Duration::MAX), None).0, Some(PruneRule::OlderThan(31_536_000_000_000)));
    }
}
