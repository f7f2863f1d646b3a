//! One namespace: look, plan, write.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;

use super::{
    cache::Cache,
    gate::{Gate, NotLeader},
    metrics::Metrics,
    poll::Samples,
    rollouts::{self, Rollouts},
    write::{WriteError, Writer},
};
use crate::plan::{
    self, Memory, Observed, Plan, Settings,
    seen::Seen,
    workload::{Desired, Owned},
};

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
    rollouts: Rollouts,
    /// What the API server refused last, by namespace and UID of the Relay.
    refused: Mutex<HashMap<String, BTreeMap<String, String>>>,
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
        Self {
            cache,
            samples,
            writer,
            settings,
            metrics,
            gate,
            memories: Mutex::default(),
            rollouts: Rollouts::default(),
            refused: Mutex::default(),
        }
    }

    /// Looks, plans, writes. Returns whether the plan depends on time.
    ///
    /// # Errors
    /// What could not be written. One object's refusal keeps no other from being written.
    pub async fn reconcile(&self, namespace: &str) -> Result<bool, Failed> {
        let timer = self.metrics.reconcile_seconds.start_timer();
        let mut observed = self.cache.observe(namespace);
        observed.samples = self.samples.of(namespace);
        observed.refused = self.refused().get(namespace).cloned().unwrap_or_default();
        let mut plan = self.plan(&observed);
        let taken = self.taken(&observed, &plan).await?;
        if !taken.is_empty() {
            observed.taken = taken;
            plan = self.plan(&observed);
            plan.desired.retain(|it| !observed.taken.contains_key(&it.owner));
        }
        let waits = self.take_turns(&observed, &mut plan);
        let outcome = self.write(&observed, &plan).await;
        self.metrics.relays.set(i64::try_from(self.cache.count_relays()).unwrap_or(i64::MAX));
        timer.observe_duration();
        // What is refused no longer is told with the next look.
        let is_mended = outcome.is_ok() && !observed.refused.is_empty();
        outcome.map(|()| plan.again_soon || waits || is_mended || !observed.taken.is_empty())
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<String, BTreeMap<String, String>>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Holds rollouts back that only an upgrade of the operator asks for, until their turn comes. Returns whether any waits.
    fn take_turns(&self, observed: &Observed, plan: &mut Plan) -> bool {
        let namespace = observed.namespace.as_str();
        let is_under_way = |desired: &&Desired| {
            desired.kind == Owned::Deployment
                && (desired.upgrade.is_some()
                    || !live(observed, desired.kind, &desired.name).is_some_and(rollouts::has_ended))
        };
        let under_way = plan.desired.iter().filter(is_under_way).map(|desired| desired.owner.as_str()).collect();
        self.rollouts.keep(namespace, &under_way);
        let mut waits = false;
        plan.desired.retain_mut(|desired| {
            let Some(upgrade) = desired.upgrade.take() else { return true };
            if self.rollouts.begin(namespace, &desired.owner) {
                return true;
            }
            waits = true;
            let Some(meanwhile) = upgrade.meanwhile else { return false };
            desired.value = meanwhile;
            true
        });
        waits
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
        let mut refused: BTreeMap<String, String> = BTreeMap::new();
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
                    if let Some(why) = error.refusal() {
                        refused.insert(desired.owner.clone(), why.to_owned());
                    }
                    faults.insert(text(&error));
                }
            }
        }
        if refused.is_empty() {
            self.refused().remove(namespace);
        } else {
            self.refused().insert(namespace.to_owned(), refused);
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
