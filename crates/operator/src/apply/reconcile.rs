//! One namespace: look, plan, write.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, PoisonError},
};

use jiff::Timestamp;

use super::{
    cache::Cache,
    gate::{Gate, NotLeader},
    metrics::Metrics,
    poll::Samples,
    write::{WriteError, Writer},
};
use crate::plan::{self, Memory, Observed, Plan, Settings, seen::Seen, workload::Owned};

/// Why a namespace is to be reconciled again.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// Somebody else leads.
    #[error(transparent)]
    NotLeader(#[from] NotLeader),
    /// Some writes failed; the others were made.
    #[error("{0}")]
    Writes(String),
}

/// Reconciles namespaces.
pub struct Reconciler {
    cache: Cache,
    samples: Samples,
    writer: Writer,
    settings: Settings,
    metrics: Metrics,
    gate: Gate,
    memories: Mutex<HashMap<String, Memory>>,
}

impl Reconciler {
    /// See the fields.
    pub fn new(
        cache: Cache,
        samples: Samples,
        writer: Writer,
        settings: Settings,
        metrics: Metrics,
        gate: Gate,
    ) -> Self {
        Self { cache, samples, writer, settings, metrics, gate, memories: Mutex::default() }
    }

    /// Looks, plans, writes. Returns whether the plan depends on time.
    ///
    /// # Errors
    /// What could not be written. One object's refusal keeps no other from being written.
    pub async fn reconcile(&self, namespace: &str) -> Result<bool, Failed> {
        let timer = self.metrics.reconcile_seconds.start_timer();
        let mut observed = self.cache.observe(namespace);
        observed.samples = self.samples.of(namespace);
        let mut plan = self.plan(&observed);
        let taken = self.taken(&observed, &plan).await?;
        if !taken.is_empty() {
            observed.taken = taken;
            plan = self.plan(&observed);
            plan.desired.retain(|it| !observed.taken.contains_key(&it.owner));
        }
        let outcome = self.write(&observed, &plan).await;
        self.metrics.relays.set(i64::try_from(self.cache.count_relays()).unwrap_or(i64::MAX));
        timer.observe_duration();
        outcome.map(|()| plan.again_soon || !observed.taken.is_empty())
    }

    fn plan(&self, observed: &Observed) -> Plan {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = memories.entry(observed.namespace.clone()).or_default();
        let plan = plan::plan(observed, &self.settings, memory, Timestamp::now());
        if observed.relays.is_empty() {
            memories.remove(&observed.namespace);
        }
        plan
    }

    /// Relays whose names are taken by objects of others. Asked only about what is not known to be ours.
    async fn taken(&self, observed: &Observed, plan: &Plan) -> Result<BTreeMap<String, String>, Failed> {
        let mut taken = BTreeMap::new();
        for desired in &plan.desired {
            if live(observed, desired.kind, &desired.name).is_some() {
                continue;
            }
            self.may_write()?;
            let owner = self.writer.foreign_owner(&observed.namespace, desired).await;
            if let Some(owner) = owner.map_err(|error| Failed::Writes(error.to_string()))? {
                let (_, _, kind, _) = desired.kind.names();
                let text = format!(
                    "the {kind} {} is there already and belongs to {owner}: delete or rename one",
                    desired.name
                );
                taken.insert(desired.owner.clone(), text);
            }
        }
        Ok(taken)
    }

    fn may_write(&self) -> Result<(), NotLeader> {
        if self.gate.is_open() { Ok(()) } else { Err(NotLeader) }
    }

    async fn write(&self, observed: &Observed, plan: &Plan) -> Result<(), Failed> {
        let namespace = observed.namespace.as_str();
        let mut faults: BTreeSet<String> = BTreeSet::new();
        let mut failed_owners: BTreeSet<&str> = BTreeSet::new();
        let count = |what: &str| self.metrics.writes.with_label_values(&[what]).inc();
        for desired in &plan.desired {
            // A Deployment whose ConfigMap is not there would only start pods that cannot.
            if failed_owners.contains(desired.owner.as_str()) {
                continue;
            }
            self.may_write()?;
            match self.writer.apply(namespace, desired, live(observed, desired.kind, &desired.name)).await {
                Ok(true) => count("object"),
                Ok(false) => {}
                Err(error) => {
                    failed_owners.insert(&desired.owner);
                    faults.insert(text(&error));
                }
            }
        }
        for garbage in &plan.garbage {
            self.may_write()?;
            match self.writer.delete(namespace, garbage).await {
                Ok(()) => count("delete"),
                Err(error) => drop(faults.insert(text(&error))),
            }
        }
        for status in &plan.statuses {
            self.may_write()?;
            match self.writer.status(namespace, status).await {
                Ok(()) => count("status"),
                Err(error) => drop(faults.insert(text(&error))),
            }
        }
        for event in &plan.events {
            self.may_write()?;
            self.writer.tell(namespace, event).await;
        }
        if faults.is_empty() { Ok(()) } else { Err(Failed::Writes(faults.into_iter().collect::<Vec<_>>().join("; "))) }
    }
}

fn text(error: &WriteError) -> String {
    error.to_string()
}

fn live<'o>(observed: &'o Observed, kind: Owned, name: &str) -> Option<&'o Seen> {
    observed.owned.get(&kind)?.iter().find(|it| it.name() == name)
}
