//! The relay under test: manifests → check → catalog → worker, as `queuebox run` does it, with a [`Sink`] in front of the connector.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, anyhow, bail};
use queuebox_api::{Manifests, SecretResolver, Target, checked};
use queuebox_catalog::{Catalog, open_store};
use queuebox_core::ports::{Destination, Store, schema::MigrateOptions};
use queuebox_engine::{
    metrics::Metrics,
    worker::{Worker, keeper::fresh_seed},
};
use serde_json::{Value, json};

use crate::{
    report::histogram_quantile,
    sink::{Seen, Sink},
};

/// Topic of the messages that are measured; they go to the destination `sink`.
pub const TOPIC: &str = "bench";
/// Topic of messages for the destination `held`, which is paused.
pub const HELD_TOPIC: &str = "held";
/// Name of the source of the inbox rungs.
pub const SOURCE: &str = "bench";

/// What a rung wants of the relay.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// URL of the database.
    pub database: String,
    /// URL of RabbitMQ, where the rung uses it.
    pub rabbitmq: String,
    /// `spec` of the destination; `None` = the null sink.
    pub destination: Option<Value>,
    /// `spec` of the source, if the rung has one.
    pub source: Option<Value>,
    /// `spec.outbox.onSent: Delete`.
    pub deletes: bool,
}

/// A destination that nothing is sent to: the null sink takes its place, the held one is paused.
fn nowhere() -> Value {
    json!({ "http": { "url": "http://127.0.0.1:9/" } })
}

/// A checked Relay, and who answers its references.
pub struct Plan {
    relay: checked::Relay,
    secrets: Arc<dyn SecretResolver>,
    is_null: bool,
}

impl Plan {
    /// Checks the manifests of a wish.
    ///
    /// # Errors
    /// A manifest that is wrong, such as an address of the command line.
    pub fn new(wish: &Wish) -> anyhow::Result<Self> {
        let mut manifests = Manifests::default();
        let mut held = nowhere();
        held["paused"] = json!(true);
        let mut objects = vec![
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "bench" },
                    "stringData": { "database": wish.database, "rabbitmq": wish.rabbitmq } }),
            object("Relay", "bench", relay_spec(wish.deletes)),
            object("Destination", "sink", wish.destination.clone().unwrap_or_else(nowhere)),
            object("Destination", "held", held),
        ];
        objects.extend(wish.source.clone().map(|source| object("Source", SOURCE, source)));
        for object in objects {
            manifests.add_text("bench", &object.to_string());
        }
        let report = queuebox_api::check(&manifests, Target::Local);
        let relay = report.into_relay(None).map_err(|problems| anyhow!("the manifests of the rung:\n{problems}"))?;
        Ok(Self { relay, secrets: Arc::new(manifests.secrets), is_null: wish.destination.is_none() })
    }

    /// The catalog's own ports.
    pub fn catalog(&self) -> Catalog<'_> {
        Catalog::new(&self.relay, self.secrets.clone())
    }

    /// The connector of the destination `sink`, to publish past the outbox.
    ///
    /// # Errors
    /// It cannot be built.
    pub fn connector(&self) -> anyhow::Result<Arc<dyn Destination>> {
        let config = self.catalog().worker("1/bench".to_owned(), "bench".to_owned())?;
        Ok(config.relay.destinations.get("sink").context("no destination")?.port.clone())
    }

    /// Brings the tables up.
    ///
    /// # Errors
    /// The database.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        let store = open_store(&self.relay, &self.secrets).await.map_err(failed)?.store;
        store.migrate(MigrateOptions::default()).await.map_err(failed)?;
        store.close().await;
        Ok(())
    }

    /// Starts a worker whose deliveries `seen` counts.
    ///
    /// # Errors
    /// The database.
    pub async fn start(&self, seen: &Arc<Seen>) -> anyhow::Result<Running> {
        let store = open_store(&self.relay, &self.secrets).await.map_err(failed)?.store;
        store.check().await.map_err(failed)?;
        let mut config = self.catalog().worker("1/bench".to_owned(), "bench".to_owned())?;
        let relay = Arc::make_mut(&mut config.relay);
        let Some(sink) = relay.destinations.get_mut("sink") else { bail!("no destination") };
        let inner = (!self.is_null).then(|| sink.port.clone());
        sink.port = Arc::new(Sink::new(inner, seen.clone()));
        let metrics = Arc::new(Metrics::new(env!("CARGO_PKG_VERSION"))?);
        let worker = Worker::start(config, store.clone(), metrics.clone(), fresh_seed());
        Ok(Running { worker, store, metrics })
    }
}

fn failed(fault: queuebox_core::Fault) -> anyhow::Error {
    anyhow!("{}: {}", fault.code, fault.detail)
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "queuebox.io/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

fn relay_spec(deletes: bool) -> Value {
    json!({
        "database": { "postgres": { "urlFrom": { "secretKeyRef": { "name": "bench", "key": "database" } } } },
        "routes": [
            { "topics": [TOPIC], "destinations": ["sink"] },
            { "topics": [HELD_TOPIC], "destinations": ["held"] },
        ],
        "outbox": { "onSent": if deletes { "Delete" } else { "Keep" } },
    })
}

/// A running worker.
pub struct Running {
    /// It.
    pub worker: Worker,
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
}

impl Running {
    /// From the read of a row to its outcome: median and 99th percentile in ms.
    pub fn processing(&self) -> (Option<f64>, Option<f64>) {
        self.quantiles("queuebox_outbox_processing_duration_seconds")
    }

    /// One settle and read of the database: median and 99th percentile in ms.
    pub fn polls(&self) -> (Option<f64>, Option<f64>) {
        self.quantiles("queuebox_outbox_poll_duration_seconds")
    }

    fn quantiles(&self, histogram: &str) -> (Option<f64>, Option<f64>) {
        let scrape = self.metrics.encode();
        (histogram_quantile(&scrape, histogram, 0.5), histogram_quantile(&scrape, histogram, 0.99))
    }

    /// Ends it cleanly: what was delivered is settled when this returns.
    pub async fn stop(self) {
        self.worker.stop(Duration::from_secs(20)).await;
        self.store.close().await;
    }
}
