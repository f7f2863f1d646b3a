//! The operator's own metrics. Labels hold kinds and fixed words only, so that their number does not grow with the cluster.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use prometheus::{Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

/// All of them. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    /// This replica leads.
    pub leader: IntGauge,
    /// Relays in the watched namespaces.
    pub relays: IntGauge,
    /// Plans that were carried out, by `outcome`: `ok`, `error`.
    pub reconciles: IntCounterVec,
    /// Time of one, without the waiting before.
    pub reconcile_seconds: Histogram,
    /// Writes, by `what`: `object`, `status`, `delete`.
    pub writes: IntCounterVec,
    /// Rounds of asking workers.
    pub polls: IntCounter,
    synced: Arc<AtomicBool>,
}

impl Metrics {
    /// All at zero.
    ///
    /// # Errors
    /// Two metrics of one name, which a test excludes.
    pub fn new(version: &str) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            registry: Registry::new(),
            leader: IntGauge::new("queuebox_operator_leader", "1 = this replica leads")?,
            relays: IntGauge::new("queuebox_operator_relays", "Relays in the watched namespaces")?,
            reconciles: IntCounterVec::new(
                Opts::new("queuebox_operator_reconciles_total", "Namespaces that were reconciled"),
                &["outcome"],
            )?,
            reconcile_seconds: Histogram::with_opts(HistogramOpts::new(
                "queuebox_operator_reconcile_duration_seconds",
                "Time to reconcile one namespace",
            ))?,
            writes: IntCounterVec::new(
                Opts::new("queuebox_operator_writes_total", "Writes to the API server"),
                &["what"],
            )?,
            polls: IntCounter::new("queuebox_operator_polls_total", "Rounds of asking all workers")?,
            synced: Arc::default(),
        };
        let info = IntGauge::with_opts(
            Opts::new("queuebox_operator_info", "Always 1").const_label("version", version.to_owned()),
        )?;
        info.set(1);
        for outcome in ["ok", "error"] {
            metrics.reconciles.with_label_values(&[outcome]);
        }
        for what in ["object", "status", "delete"] {
            metrics.writes.with_label_values(&[what]);
        }
        let registry = &metrics.registry;
        registry.register(Box::new(info))?;
        registry.register(Box::new(metrics.leader.clone()))?;
        registry.register(Box::new(metrics.relays.clone()))?;
        registry.register(Box::new(metrics.reconciles.clone()))?;
        registry.register(Box::new(metrics.reconcile_seconds.clone()))?;
        registry.register(Box::new(metrics.writes.clone()))?;
        registry.register(Box::new(metrics.polls.clone()))?;
        Ok(metrics)
    }

    /// Everything was seen once.
    pub fn set_synced(&self) {
        self.synced.store(true, Ordering::SeqCst);
    }

    /// Whether everything was seen once.
    pub fn was_synced(&self) -> bool {
        self.synced.load(Ordering::SeqCst)
    }

    /// As text.
    pub fn encode(&self) -> String {
        let mut text = Vec::new();
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }
}
