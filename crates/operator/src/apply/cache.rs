//! What the API server shows, kept up to date by watches: by namespace and kind, as compact JSON.
//!
//! Invariants:
//! - Only the three kinds are watched whole; everything else by the operator's label. Foreign objects cost nothing.
//! - Secrets are not watched, nor read in any other way.
//! - A namespace is told of each change once it can be seen here.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject},
    core::GroupVersionKind,
    runtime::{WatchStreamExt, watcher},
};
use queuebox_api::{Kind, spec};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use crate::plan::{Observed, names, seen::Seen, workload::Owned};

/// Kinds that are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Watched {
    /// What users write.
    User(Kind),
    /// What the operator makes.
    Owned(Owned),
    /// Made by the Deployments.
    ReplicaSet,
    /// Made by the ReplicaSets.
    Pod,
}

impl Watched {
    fn all() -> Vec<Self> {
        let mut all: Vec<Self> = Kind::ALL.into_iter().map(Self::User).collect();
        all.extend(Owned::ALL.into_iter().map(Self::Owned));
        all.extend([Self::ReplicaSet, Self::Pod]);
        all
    }

    /// Group, version, kind and plural.
    pub fn resource(self) -> ApiResource {
        let (group, version, kind, plural) = match self {
            Self::User(Kind::Relay) => (spec::GROUP, spec::VERSION, "Relay", "relays"),
            Self::User(Kind::Source) => (spec::GROUP, spec::VERSION, "Source", "sources"),
            Self::User(Kind::Destination) => (spec::GROUP, spec::VERSION, "Destination", "destinations"),
            Self::Owned(owned) => owned.names(),
            Self::ReplicaSet => ("apps", "v1", "ReplicaSet", "replicasets"),
            Self::Pod => ("", "v1", "Pod", "pods"),
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
    }

    fn config(self) -> watcher::Config {
        match self {
            Self::User(_) => watcher::Config::default(),
            _ => watcher::Config::default().labels(&format!("{}={}", names::MANAGED_BY, names::MANAGER)),
        }
    }

    /// What is kept of an object.
    fn kept(self, object: &Value) -> Value {
        let mut object = object.clone();
        if let Some(metadata) = object.pointer_mut("/metadata").and_then(Value::as_object_mut) {
            metadata.shift_remove("managedFields");
        }
        let at = |pointer: &str| object.pointer(pointer).cloned().unwrap_or(Value::Null);
        match self {
            Self::ReplicaSet => json!({"metadata": at("/metadata")}),
            Self::Pod => {
                let ports = at("/spec/containers/0/ports");
                let mut metadata = at("/metadata");
                if let Some(metadata) = metadata.as_object_mut() {
                    metadata.shift_remove("annotations");
                }
                json!({
                    "metadata": metadata,
                    "spec": {"containers": [{"ports": ports}]},
                    "status": {
                        "phase": at("/status/phase"),
                        "podIP": at("/status/podIP"),
                        "containerStatuses": waiting_only(&at("/status/containerStatuses")),
                    },
                })
            }
            _ => object,
        }
    }
}

/// The states of containers that wait; everything else of them changes without a meaning for us.
fn waiting_only(statuses: &Value) -> Value {
    let list = statuses.as_array().into_iter().flatten();
    json!(list.map(|status| json!({"state": {"waiting": status.pointer("/state/waiting")}})).collect::<Vec<_>>())
}

type Objects = BTreeMap<String, Arc<str>>;

#[derive(Default)]
struct Inner {
    namespaces: HashMap<String, HashMap<Watched, Objects>>,
    /// Watches that have not seen everything yet.
    missing: BTreeSet<(Watched, Option<String>)>,
}

/// The cache. Cheap to clone.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Mutex<Inner>>,
    changed: mpsc::UnboundedSender<String>,
    synced: watch::Sender<bool>,
}

impl Cache {
    /// Empty; `changed` is told the namespace of each change.
    pub fn new(changed: mpsc::UnboundedSender<String>) -> Self {
        Self { inner: Arc::default(), changed, synced: watch::Sender::new(false) }
    }

    /// Begins to watch: everywhere, or in these namespaces. What was known before is forgotten.
    pub fn start(&self, client: &Client, namespaces: &[String]) -> JoinSet<()> {
        let scopes: Vec<Option<String>> =
            if namespaces.is_empty() { vec![None] } else { namespaces.iter().cloned().map(Some).collect() };
        let watches: Vec<(Watched, Option<String>)> =
            Watched::all().into_iter().flat_map(|kind| scopes.iter().map(move |scope| (kind, scope.clone()))).collect();
        {
            let mut inner = self.lock();
            *inner = Inner { missing: watches.iter().cloned().collect(), ..Inner::default() };
            self.synced.send_replace(false);
        }
        let mut tasks = JoinSet::new();
        for (kind, scope) in watches {
            tasks.spawn(self.clone().watch(client.clone(), kind, scope));
        }
        tasks
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everything has been seen.
    pub fn synced(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// Follows one kind in one scope, for ever.
    async fn watch(self, client: Client, kind: Watched, scope: Option<String>) {
        let resource = kind.resource();
        let api: Api<DynamicObject> = match &scope {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        let mut stream = watcher(api, kind.config()).default_backoff().boxed();
        let mut listing: HashMap<String, Objects> = HashMap::new();
        while let Some(event) = stream.next().await {
            match event {
                Ok(watcher::Event::Init) => listing.clear(),
                Ok(watcher::Event::InitApply(object)) => {
                    let (namespace, name, text) = compact(kind, &object);
                    listing.entry(namespace).or_default().insert(name, text);
                }
                Ok(watcher::Event::InitDone) => self.replace(kind, scope.as_deref(), std::mem::take(&mut listing)),
                Ok(watcher::Event::Apply(object)) => {
                    let (namespace, name, text) = compact(kind, &object);
                    self.put(kind, namespace, name, Some(text));
                }
                Ok(watcher::Event::Delete(object)) => {
                    let (namespace, name, _) = compact(kind, &object);
                    self.put(kind, namespace, name, None);
                }
                Err(error) => tracing::warn!(kind = resource.kind, %error, "A watch failed; it is tried again."),
            }
        }
    }

    fn put(&self, kind: Watched, namespace: String, name: String, text: Option<Arc<str>>) {
        let mut inner = self.lock();
        let objects = inner.namespaces.entry(namespace.clone()).or_default().entry(kind).or_default();
        let is_news = match &text {
            Some(text) => objects.insert(name, text.clone()).is_none_or(|before| before != *text),
            None => objects.remove(&name).is_some(),
        };
        drop(inner);
        if is_news {
            let _ = self.changed.send(namespace);
        }
    }

    /// Takes over a whole list.
    fn replace(&self, kind: Watched, scope: Option<&str>, listing: HashMap<String, Objects>) {
        let mut touched: BTreeSet<String> = listing.keys().cloned().collect();
        let mut inner = self.lock();
        for (namespace, kinds) in &mut inner.namespaces {
            if scope.is_none_or(|scope| scope == namespace) && kinds.remove(&kind).is_some_and(|old| !old.is_empty()) {
                touched.insert(namespace.clone());
            }
        }
        for (namespace, objects) in listing {
            inner.namespaces.entry(namespace).or_default().insert(kind, objects);
        }
        inner.missing.remove(&(kind, scope.map(str::to_owned)));
        let synced = inner.missing.is_empty();
        // Under the lock: of two watches that end their lists together, the one that saw the other's missing must not speak last.
        self.synced.send_if_modified(|known| std::mem::replace(known, synced) != synced);
        drop(inner);
        for namespace in touched {
            let _ = self.changed.send(namespace);
        }
    }

    /// All namespaces with a Relay, Source or Destination.
    pub fn namespaces(&self) -> Vec<String> {
        let inner = self.lock();
        let has_own = |kinds: &HashMap<Watched, Objects>| {
            Kind::ALL.into_iter().any(|kind| kinds.get(&Watched::User(kind)).is_some_and(|objects| !objects.is_empty()))
        };
        inner.namespaces.iter().filter(|(_, kinds)| has_own(kinds)).map(|(namespace, _)| namespace.clone()).collect()
    }

    /// Number of Relays.
    pub fn count_relays(&self) -> usize {
        let inner = self.lock();
        inner.namespaces.values().filter_map(|kinds| kinds.get(&Watched::User(Kind::Relay))).map(BTreeMap::len).sum()
    }

    /// Everything of one namespace.
    pub fn observe(&self, namespace: &str) -> Observed {
        let kinds: HashMap<Watched, Vec<Arc<str>>> = {
            let inner = self.lock();
            let kinds = inner.namespaces.get(namespace);
            kinds.into_iter().flatten().map(|(kind, objects)| (*kind, objects.values().cloned().collect())).collect()
        };
        let parsed = |kind: Watched| -> Vec<Seen> {
            let texts = kinds.get(&kind).map(Vec::as_slice).unwrap_or_default();
            texts.iter().filter_map(|text| serde_json::from_str(text).ok()).map(Seen).collect()
        };
        Observed {
            namespace: namespace.to_owned(),
            relays: parsed(Watched::User(Kind::Relay)),
            sources: parsed(Watched::User(Kind::Source)),
            destinations: parsed(Watched::User(Kind::Destination)),
            owned: Owned::ALL.into_iter().map(|kind| (kind, parsed(Watched::Owned(kind)))).collect(),
            replica_sets: parsed(Watched::ReplicaSet),
            pods: parsed(Watched::Pod),
            ..Observed::default()
        }
    }

    /// Objects of one kind in one namespace.
    pub fn list(&self, namespace: &str, kind: Watched) -> Vec<Seen> {
        let texts: Vec<Arc<str>> = {
            let inner = self.lock();
            let objects = inner.namespaces.get(namespace).and_then(|kinds| kinds.get(&kind));
            objects.map(|objects| objects.values().cloned().collect()).unwrap_or_default()
        };
        texts.iter().filter_map(|text| serde_json::from_str(text).ok()).map(Seen).collect()
    }
}

fn compact(kind: Watched, object: &DynamicObject) -> (String, String, Arc<str>) {
    let mut value = serde_json::to_value(object).unwrap_or_default();
    // The items of a list come without them.
    let resource = kind.resource();
    value["apiVersion"] = json!(resource.api_version);
    value["kind"] = json!(resource.kind);
    let text = kind.kept(&value).to_string();
    (object.namespace().unwrap_or_default(), object.name_any(), text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists that end at the same time on many threads: the cache has seen everything in the end, and stays so.
    #[test]
    fn lists_that_end_together_leave_it_synced() {
        for _ in 0..200 {
            let (changed, _changes) = mpsc::unbounded_channel();
            let cache = Cache::new(changed);
            cache.lock().missing = Watched::all().into_iter().map(|kind| (kind, None)).collect();
            let barrier = std::sync::Barrier::new(Watched::all().len());
            std::thread::scope(|scope| {
                for kind in Watched::all() {
                    let (cache, barrier) = (&cache, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        cache.replace(kind, None, HashMap::new());
                    });
                }
            });
            assert!(*cache.synced().borrow());
        }
    }
}
