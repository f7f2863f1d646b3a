//! What is to be written, worked out from what is there: pure, no I/O, no clock of its own.
//!
//! ```text
//!   Observed (objects of one namespace) ─► group ─► configuration of each Relay
//!   samples of the workers ──► replicas ─┐            │
//!                                        ├─► workload ─► desired objects, garbage
//!                                        └─► status ───► statuses ─► events on transitions
//! ```

pub mod conditions;
pub mod events;
pub mod group;
pub mod names;
pub mod replicas;
pub mod sample;
pub mod seen;
pub mod status;
pub mod workload;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use queuebox_api::{Kind, checked::Autoscaling, condition::RECONCILE_ANNOTATION, spec::relay::AutoscalingSpec};
use serde_json::{Value, json};

use self::{
    events::Event,
    group::{Given, Outcome},
    replicas::Decision,
    sample::{Sample, freshest},
    seen::Seen,
    status::{Downs, RelayView},
    workload::{Desired, Owned, Workload},
};

/// The operator's options that shape workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Image of the workers, where `spec.pod.image` says nothing.
    pub worker_image: String,
    /// `Always`, `IfNotPresent`, `Never`.
    pub worker_image_pull_policy: String,
    /// Secrets for pulling it, where `spec.pod.imagePullSecrets` says nothing.
    pub image_pull_secrets: Vec<String>,
    /// Where the operator runs: who may reach the management port of workers that have a NetworkPolicy.
    pub operator_namespace: String,
}

/// Everything of one namespace.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// The namespace.
    pub namespace: String,
    /// Relays.
    pub relays: Vec<Seen>,
    /// Sources.
    pub sources: Vec<Seen>,
    /// Destinations.
    pub destinations: Vec<Seen>,
    /// What the operator made, by its label.
    pub owned: BTreeMap<Owned, Vec<Seen>>,
    /// ReplicaSets of the workers.
    pub replica_sets: Vec<Seen>,
    /// Pods of the workers.
    pub pods: Vec<Seen>,
    /// What the workers said, by the UID of the Relay.
    pub samples: BTreeMap<String, Vec<Sample>>,
    /// Names that are taken by objects of others: why, by the UID of the Relay.
    pub taken: BTreeMap<String, String>,
    /// What the API server refused when it was last applied: why, by the UID of the Relay.
    pub refused: BTreeMap<String, String>,
}

impl Observed {
    fn owned(&self, kind: Owned) -> &[Seen] {
        self.owned.get(&kind).map(Vec::as_slice).unwrap_or_default()
    }
}

/// What the operator remembers of a namespace between two plans. Losing it delays, and never does harm.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// Scaling, by the UID of the Relay.
    scaling: BTreeMap<String, replicas::Memory>,
    /// Since when something is down, by Relay.
    downs: BTreeMap<String, Downs>,
}

/// A status that differs from the one that stands there.
#[derive(Debug, Clone, PartialEq)]
pub struct NewStatus {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object.
    pub name: String,
    /// All of the status.
    pub status: Value,
}

/// An object that is wanted no more.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Garbage {
    /// Its kind.
    pub kind: Owned,
    /// Its name.
    pub name: String,
    /// Its UID: another one of the same name is left alone.
    pub uid: String,
}

/// Everything that is to be written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Objects as they are to be, whether they are so already or not, in this order.
    pub desired: Vec<Desired>,
    /// Objects that are to go.
    pub garbage: Vec<Garbage>,
    /// Statuses that differ.
    pub statuses: Vec<NewStatus>,
    /// What people should hear of.
    pub events: Vec<Event>,
    /// Something depends on time: plan again before long even if nothing happens.
    pub again_soon: bool,
}

/// Works out what is to be written.
pub fn plan(observed: &Observed, settings: &Settings, memory: &mut Memory, now: Timestamp) -> Plan {
    let outcome = group::configure(&Given {
        namespace: &observed.namespace,
        relays: &observed.relays,
        sources: &observed.sources,
        destinations: &observed.destinations,
        config_maps: observed.owned(Owned::ConfigMap),
        deployments: observed.owned(Owned::Deployment),
    });
    memory.forget_others(observed);
    let mut plan = Plan::default();
    let views: Vec<RelayView<'_>> =
        observed.relays.iter().map(|relay| view(observed, relay, &outcome, memory, now)).collect();
    for view in &views {
        plan.again_soon |= view.autoscaling.is_some() || view.configuration.is_some();
        if let Some(event) = events::scaled(view) {
            plan.events.push(event);
        }
        let Some(configuration) = view.configuration.filter(|_| !view.hands_off && !view.seen.is_deleting()) else {
            continue;
        };
        let replicas = view.decision.replicas;
        let workload = Workload { seen: view.seen, configuration, replicas, settings, deployment: view.deployment };
        plan.desired.extend(workload.objects());
    }
    plan.garbage = garbage(observed, &views, &plan.desired);
    statuses(observed, &views, &outcome, memory, now, &mut plan);
    plan
}

impl Memory {
    fn forget_others(&mut self, observed: &Observed) {
        let uids: BTreeSet<&str> = observed.relays.iter().map(Seen::uid).collect();
        let names: BTreeSet<&str> = observed.relays.iter().map(Seen::name).collect();
        self.scaling.retain(|uid, _| uids.contains(uid.as_str()));
        self.downs.retain(|name, _| names.contains(name.as_str()));
    }
}

fn view<'a>(
    observed: &'a Observed,
    relay: &'a Seen,
    outcome: &'a Outcome,
    memory: &mut Memory,
    now: Timestamp,
) -> RelayView<'a> {
    let name = names::workload(relay.name());
    let deployment =
        observed.owned(Owned::Deployment).iter().find(|it| it.name() == name && it.controller() == Some(relay.uid()));
    let label = names::short(relay.name());
    let pods = observed.pods.iter().filter(|pod| pod.label(names::RELAY_LABEL) == Some(label.as_str())).collect();
    let samples = observed.samples.get(relay.uid()).map(Vec::as_slice).unwrap_or_default();
    let spec: Option<AutoscalingSpec> = serde_json::from_value(relay.at("/spec/autoscaling").clone()).ok();
    let decision = decide(relay, spec.as_ref(), deployment, samples, memory, now);
    RelayView {
        seen: relay,
        configuration: outcome.configurations.get(relay.name()),
        decision,
        deployment,
        pods,
        samples,
        autoscaling: spec.map(|spec| Autoscaling {
            min_replicas: spec.min_replicas.unwrap_or(1),
            max_replicas: spec.max_replicas,
            target_pending: spec.target_pending.unwrap_or(5_000),
            target_oldest_age: spec.target_oldest_age.map_or(std::time::Duration::from_secs(30), |it| it.0),
            has_target_oldest_age: spec.target_oldest_age.is_some(),
        }),
        name_taken: observed.taken.get(relay.uid()).cloned(),
        refused: observed.refused.get(relay.uid()).cloned(),
        hands_off: relay.annotation(RECONCILE_ANNOTATION) == Some("false"),
    }
}

fn decide(
    relay: &Seen,
    spec: Option<&AutoscalingSpec>,
    deployment: Option<&Seen>,
    samples: &[Sample],
    memory: &mut Memory,
    now: Timestamp,
) -> Decision {
    if relay.at("/spec/paused").as_bool() == Some(true) {
        return replicas::paused();
    }
    let Some(spec) = spec else {
        memory.scaling.remove(relay.uid());
        return replicas::fixed(relay.at("/spec/replicas").as_i64());
    };
    // Our own last word, not the present number: somebody else may have scaled the Deployment.
    let current = deployment.map_or(0, asked_for);
    let work = sample::work(samples, now);
    replicas::built_in(spec, current, work, memory.scaling.entry(relay.uid().to_owned()).or_default(), now)
}

/// How many workers the operator asked for last.
pub fn asked_for(deployment: &Seen) -> i32 {
    let written = deployment.annotation(names::REPLICAS_ANNOTATION).and_then(|it| it.parse().ok());
    written.unwrap_or_else(|| i32::try_from(deployment.number("/spec/replicas")).unwrap_or(0))
}

/// What belongs to a Relay and is wanted no more. What belongs to no Relay of this namespace is the garbage collector's.
fn garbage(observed: &Observed, views: &[RelayView<'_>], desired: &[Desired]) -> Vec<Garbage> {
    let wanted: BTreeSet<(Owned, &str)> = desired.iter().map(|it| (it.kind, it.name.as_str())).collect();
    let referred: BTreeSet<(&str, &str)> = observed
        .replica_sets
        .iter()
        .chain(&observed.pods)
        .filter_map(|it| Some((it.label(names::RELAY_LABEL)?, it.label(names::CONFIG_LABEL)?)))
        .collect();
    let mut garbage = Vec::new();
    for view in views.iter().filter(|view| view.configuration.is_some() && !view.hands_off) {
        let settled = view.deployment.is_some();
        for kind in Owned::ALL {
            for object in observed.owned(kind).iter().filter(|it| it.controller() == Some(view.seen.uid())) {
                let is_used = wanted.contains(&(kind, object.name()))
                    || (kind == Owned::ConfigMap
                        && object.label(names::CONFIG_LABEL).is_none_or(|hash| {
                            !settled || referred.contains(&(&*names::short(view.seen.name()), hash))
                        }));
                if !is_used && !object.is_deleting() {
                    garbage.push(Garbage { kind, name: object.name().to_owned(), uid: object.uid().to_owned() });
                }
            }
        }
    }
    garbage
}

fn statuses(
    observed: &Observed,
    views: &[RelayView<'_>],
    outcome: &Outcome,
    memory: &mut Memory,
    now: Timestamp,
    plan: &mut Plan,
) {
    let mut add = |kind: Kind, seen: &Seen, status: Value| {
        if !seen.is_deleting() && seen.status() != &seen::sorted(&status) && status != *seen.status() {
            plan.events.extend(events::transitions(kind, seen, &status));
            plan.statuses.push(NewStatus { kind, name: seen.name().to_owned(), status });
        }
    };
    for view in views {
        let downs = memory.downs.entry(view.seen.name().to_owned()).or_default();
        add(Kind::Relay, view.seen, status::relay(view, outcome, downs, now));
    }
    for seen in &observed.destinations {
        let users = outcome.used_by.get(seen.name());
        let users: Vec<&RelayView<'_>> =
            views.iter().filter(|view| users.is_some_and(|users| users.contains(view.seen.name()))).collect();
        add(Kind::Destination, seen, status::destination(seen, &users, outcome, &mut memory.downs, now));
    }
    for seen in &observed.sources {
        let relay = seen.text("/spec/relayRef/name");
        let view = views.iter().find(|view| view.seen.name() == relay);
        add(Kind::Source, seen, status::source(seen, view, outcome, &mut memory.downs, now));
    }
}

/// What KEDA's metrics-api scaler reads of a Relay; `None` where no worker has counted lately.
pub fn backlog(samples: &[Sample], now: Timestamp) -> Option<Value> {
    let (sample, outbox) = freshest(samples, now)?;
    let work = sample::work(samples, now)?;
    Some(json!({
        "pending": outbox.pending,
        "startable": work.rows,
        "startableLanes": work.lanes,
        "oldestAgeSeconds": work.oldest_age_seconds,
        "dead": outbox.dead,
        "observedAt": sample.at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    }))
}

#[cfg(test)]
mod tests;
