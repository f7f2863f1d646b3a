//! What a Relay's workers run: its manifests with those of its Sources and Destinations, each object at its present state where that
//! is valid, else at its last good one.
//!
//! ```text
//!   present objects ── check of the namespace ──► problems of each
//!   newest ConfigMap ── last good objects ──┐
//!                                           ├─► one group per Relay ── check ──► configuration (text, hash, number)
//!   valid present objects ──────────────────┘
//! ```
//!
//! Invariants:
//! - A configuration passed the checks that workers make, as a whole.
//! - Nothing of it depends on the number of workers: scaling and pausing roll no pod.
//! - The last good state is read back from the cluster, so it outlives the operator.

use std::collections::{BTreeMap, BTreeSet};

use queuebox_api::{Kind, Manifests, Problem, Target, check, checked, load::Object, problem::Reason, yaml};
use serde_json::{Value, json};

use super::{
    names,
    seen::{Seen, sorted},
};

/// Key of the ConfigMap; also the name of the file that workers read.
pub const FILE: &str = "manifests.yaml";
/// A larger configuration is refused: etcd takes 1.5 MiB at most, and the API server 1 MiB for a ConfigMap.
const RENDERED_BYTES_MAX: usize = 900 << 10;
/// Members of a Relay's spec that are the operator's business only.
const NOT_FOR_WORKERS: [&str; 5] = ["replicas", "autoscaling", "paused", "disruption", "networkPolicy"];

/// Kind and name within the namespace.
pub type Key = (Kind, String);

/// The configuration of one Relay.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// The manifests as `queuebox run -f` reads them.
    pub text: String,
    /// Content hash, ten hexadecimal digits.
    pub hash: String,
    /// How often the configuration was rendered anew.
    pub number: u64,
    /// The same, checked.
    pub relay: checked::Relay,
    /// Keys of Secrets and ConfigMaps that it refers to.
    pub references: BTreeSet<queuebox_api::Reference>,
    /// Objects that run at their last good state, since the present one cannot be used or is gone.
    pub last_good: BTreeSet<Key>,
}

/// What became of the objects of a namespace.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By Relay; absent where nothing can run.
    pub configurations: BTreeMap<String, Configuration>,
    /// Why an object is not used as it is.
    pub problems: BTreeMap<Key, Vec<Problem>>,
    /// Destinations that no route names.
    pub unreferenced: BTreeSet<String>,
    /// Relays that use a Destination, by Destination.
    pub used_by: BTreeMap<String, BTreeSet<String>>,
}

/// Everything of one namespace that configurations depend on.
pub struct Given<'a> {
    /// The namespace.
    pub namespace: &'a str,
    /// Relays.
    pub relays: &'a [Seen],
    /// Sources.
    pub sources: &'a [Seen],
    /// Destinations.
    pub destinations: &'a [Seen],
    /// ConfigMaps of the operator.
    pub config_maps: &'a [Seen],
    /// Deployments of the operator.
    pub deployments: &'a [Seen],
}

/// Makes the configurations of all Relays.
pub fn configure(given: &Given<'_>) -> Outcome {
    let objects = objects(given);
    let report = check(&Manifests { objects: objects.clone(), ..Manifests::default() }, Target::Cluster);
    let mut outcome = Outcome {
        unreferenced: report.unreferenced.iter().map(|(_, name)| name.clone()).collect(),
        ..Outcome::default()
    };
    for problem in report.problems {
        if let Some(kind) = Kind::parse(&problem.kind) {
            outcome.problems.entry((kind, problem.name.clone())).or_default().push(problem);
        }
    }
    for relay in given.relays {
        for destination in named(relay.spec()) {
            outcome.used_by.entry(destination).or_default().insert(relay.name().to_owned());
        }
    }
    let present: BTreeMap<Key, Object> =
        objects.into_iter().map(|object| ((object.kind, object.name.clone()), object)).collect();
    for relay in given.relays {
        let history = History::of(given, relay);
        if let Some(configuration) = group(given.namespace, relay, &present, &history, &mut outcome.problems) {
            outcome.configurations.insert(relay.name().to_owned(), configuration);
        }
    }
    outcome
}

/// Objects in the order of their age: of two that exclude each other the younger one is at fault.
fn objects(given: &Given<'_>) -> Vec<Object> {
    let mut list: Vec<(&str, Object)> = Vec::new();
    let kinds = [(Kind::Relay, given.relays), (Kind::Destination, given.destinations), (Kind::Source, given.sources)];
    for (kind, seen) in kinds {
        for object in seen {
            list.push((object.created(), as_object(kind, object)));
        }
    }
    list.sort_by(|(a, a_object), (b, b_object)| {
        (a_object.kind, *a, &a_object.name).cmp(&(b_object.kind, *b, &b_object.name))
    });
    list.into_iter().map(|(_, object)| object).collect()
}

fn as_object(kind: Kind, seen: &Seen) -> Object {
    let mut spec = sorted(seen.spec());
    if spec.is_null() {
        spec = json!({});
    }
    if kind == Kind::Relay
        && let Some(spec) = spec.as_object_mut()
    {
        spec.retain(|field, _| !NOT_FOR_WORKERS.contains(&field.as_str()));
    }
    Object {
        file: String::new(),
        kind,
        namespace: seen.namespace().to_owned(),
        name: seen.name().to_owned(),
        uid: (kind == Kind::Relay).then(|| seen.uid().to_owned()),
        spec,
        classic: false,
    }
}

/// Names of Destinations in the routes of a Relay's spec.
fn named(spec: &Value) -> BTreeSet<String> {
    let routes = spec.get("routes").and_then(Value::as_array).into_iter().flatten();
    routes
        .flat_map(|route| route.get("destinations").and_then(Value::as_array).into_iter().flatten())
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

// ---- What ran before ------------------------------------------------------------------------------------------------

/// Renderings of one Relay so far.
struct History {
    /// Number and hash of the newest.
    newest: Option<(u64, String)>,
    /// Its text.
    text: String,
    /// Its objects.
    objects: BTreeMap<Key, Object>,
    /// Highest number that anything bears.
    number_max: u64,
}

impl History {
    fn of(given: &Given<'_>, relay: &Seen) -> Self {
        let label = names::short(relay.name());
        let is_own = |object: &&Seen| {
            object.label(names::RELAY_LABEL) == Some(label.as_str()) && object.controller() == Some(relay.uid())
        };
        let newest = given.config_maps.iter().filter(is_own).max_by_key(|map| (rendering(map), map.name().to_owned()));
        let deployed = given.deployments.iter().filter(is_own).map(rendering).max().unwrap_or(0);
        let text = newest.map_or("", |map| map.at("/data").get(FILE).and_then(Value::as_str).unwrap_or_default());
        let mut manifests = Manifests::default();
        manifests.add_text("last good", text);
        let objects = manifests.objects.into_iter().map(|mut object| {
            object.file = String::new();
            ((object.kind, object.name.clone()), object)
        });
        Self {
            newest: newest.map(|map| (rendering(map), map.label(names::CONFIG_LABEL).unwrap_or_default().to_owned())),
            text: text.to_owned(),
            objects: objects.collect(),
            number_max: newest.map_or(0, rendering).max(deployed),
        }
    }

    /// The number of a rendering with this hash: new content counts up, and so does old content that comes back.
    fn number(&self, hash: &str) -> u64 {
        match &self.newest {
            Some((number, newest)) if newest == hash && *number >= self.number_max => *number,
            _ => self.number_max + 1,
        }
    }
}

fn rendering(object: &Seen) -> u64 {
    object.annotation(names::RENDERING_ANNOTATION).and_then(|number| number.parse().ok()).unwrap_or(0)
}

// ---- One group ------------------------------------------------------------------------------------------------------

/// The objects of one Relay on their way to a configuration.
struct Group<'a> {
    namespace: &'a str,
    relay: &'a Seen,
    present: &'a BTreeMap<Key, Object>,
    history: &'a History,
    chosen: BTreeMap<Key, Object>,
    last_good: BTreeSet<Key>,
}

fn group(
    namespace: &str,
    relay: &Seen,
    present: &BTreeMap<Key, Object>,
    history: &History,
    problems: &mut BTreeMap<Key, Vec<Problem>>,
) -> Option<Configuration> {
    let mut group = Group { namespace, relay, present, history, chosen: BTreeMap::new(), last_good: BTreeSet::new() };
    group.choose(problems);
    group.settle(problems).or_else(|| group.whole_last_good())
}

impl Group<'_> {
    /// Takes each object as it is where nothing is wrong with it, else as it was.
    fn choose(&mut self, problems: &BTreeMap<Key, Vec<Problem>>) {
        let relay = (Kind::Relay, self.relay.name().to_owned());
        // A Destination that was deleted stays as long as a route names it.
        let is_usable = problems.get(&relay).is_none_or(|found| {
            found.iter().all(|problem| problem.reason == Reason::DestinationNotFound)
                && named(self.relay.spec()).into_iter().all(|name| {
                    let key = (Kind::Destination, name);
                    self.present.contains_key(&key) || self.history.objects.contains_key(&key)
                })
        });
        self.take(&relay, is_usable);
        let destinations = self.chosen.get(&relay).map(|relay| named(&relay.spec)).unwrap_or_default();
        for name in destinations {
            let key = (Kind::Destination, name);
            self.take(&key, !problems.contains_key(&key));
        }
        let belongs = |object: &Object| {
            object.kind == Kind::Source
                && object.spec.pointer("/relayRef/name").and_then(Value::as_str) == Some(self.relay.name())
        };
        let sources: Vec<Key> =
            self.present.iter().filter(|(_, object)| belongs(object)).map(|(key, _)| key.clone()).collect();
        for key in sources {
            self.take(&key, !problems.contains_key(&key));
        }
    }

    fn take(&mut self, key: &Key, is_usable: bool) {
        if let Some(object) = self.present.get(key).filter(|_| is_usable) {
            self.chosen.insert(key.clone(), object.clone());
        } else {
            self.take_back(key);
        }
    }

    /// To the last good state; without one the object is left out.
    fn take_back(&mut self, key: &Key) {
        match self.history.objects.get(key) {
            Some(object) => {
                self.chosen.insert(key.clone(), object.clone());
                self.last_good.insert(key.clone());
            }
            None => {
                self.chosen.remove(key);
            }
        }
    }

    /// Checks what was chosen as a whole and takes objects back until nothing is wrong.
    fn settle(&mut self, problems: &mut BTreeMap<Key, Vec<Problem>>) -> Option<Configuration> {
        let relay = (Kind::Relay, self.relay.name().to_owned());
        loop {
            if !self.chosen.contains_key(&relay) {
                return None;
            }
            let mut objects: Vec<Object> = self.chosen.values().cloned().collect();
            objects.sort_by_key(|object| (object.kind, object.name.clone()));
            let report = check(&Manifests { objects: objects.clone(), ..Manifests::default() }, Target::Cluster);
            let faults: Vec<Problem> = report.problems.clone();
            if faults.is_empty() {
                return self.finish(&objects, report, problems);
            }
            let mut moved = false;
            for fault in faults {
                let Some(kind) = Kind::parse(&fault.kind) else { continue };
                let key = (kind, fault.name.clone());
                if !self.chosen.contains_key(&key) {
                    continue;
                }
                note(problems, &key, fault);
                if self.last_good.contains(&key) {
                    self.chosen.remove(&key);
                    self.last_good.remove(&key);
                } else {
                    self.take_back(&key);
                }
                moved = true;
            }
            if !moved {
                return None;
            }
            // A Relay that was taken back may name other Destinations.
            let destinations = self.chosen.get(&relay).map(|relay| named(&relay.spec)).unwrap_or_default();
            self.chosen.retain(|key, _| key.0 != Kind::Destination || destinations.contains(&key.1));
            for name in destinations {
                let key = (Kind::Destination, name);
                if !self.chosen.contains_key(&key) {
                    self.take(&key, !problems.contains_key(&key));
                }
            }
        }
    }

    fn finish(
        &self,
        objects: &[Object],
        report: queuebox_api::Report,
        problems: &mut BTreeMap<Key, Vec<Problem>>,
    ) -> Option<Configuration> {
        let text = render(objects);
        if text.len() > RENDERED_BYTES_MAX {
            let key = (Kind::Relay, self.relay.name().to_owned());
            let problem = Problem {
                file: String::new(),
                kind: key.0.as_str().to_owned(),
                namespace: self.namespace.to_owned(),
                name: key.1.clone(),
                path: String::new(),
                message: format!(
                    "the manifests of this Relay, its Sources and Destinations have {} KiB together, and 900 KiB are the most",
                    text.len() >> 10
                ),
                hint: Some("split the Relay, or shorten its expressions".to_owned()),
                reason: Reason::TooLarge,
            };
            note(problems, &key, problem);
            return None;
        }
        let hash = names::digest(&text, 10);
        let relay = report.relays.into_iter().find(|relay| relay.name == self.relay.name())?;
        let used = self.last_good.iter().filter(|key| self.chosen.contains_key(key)).cloned().collect();
        Some(Configuration {
            number: self.history.number(&hash),
            hash,
            text,
            relay,
            references: report.references.into_iter().map(|used| used.reference).collect(),
            last_good: used,
        })
    }

    /// Everything as it was, where no mixture of old and new passes.
    fn whole_last_good(&self) -> Option<Configuration> {
        let objects: Vec<Object> = self.history.objects.values().cloned().collect();
        let report = check(&Manifests { objects, ..Manifests::default() }, Target::Cluster);
        let relay = report.relays.into_iter().find(|relay| relay.name == self.relay.name())?;
        let hash = names::digest(&self.history.text, 10);
        Some(Configuration {
            number: self.history.number(&hash),
            text: self.history.text.clone(),
            hash,
            relay,
            references: report.references.into_iter().map(|used| used.reference).collect(),
            last_good: self.history.objects.keys().cloned().collect(),
        })
    }
}

fn note(problems: &mut BTreeMap<Key, Vec<Problem>>, key: &Key, problem: Problem) {
    let list = problems.entry(key.clone()).or_default();
    if !list.iter().any(|known| known.path == problem.path && known.reason == problem.reason) {
        list.push(problem);
    }
}

fn render(objects: &[Object]) -> String {
    let values: Vec<Value> = objects
        .iter()
        .map(|object| {
            let mut metadata = json!({"name": object.name, "namespace": object.namespace});
            if let (Some(uid), Some(metadata)) = (&object.uid, metadata.as_object_mut()) {
                metadata.insert("uid".to_owned(), json!(uid));
            }
            json!({
                "apiVersion": queuebox_api::spec::API_VERSION,
                "kind": object.kind.as_str(),
                "metadata": metadata,
                "spec": sorted(&object.spec),
            })
        })
        .collect();
    yaml::write_all(values.iter())
}
