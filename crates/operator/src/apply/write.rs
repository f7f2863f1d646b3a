//! Writes what differs, and nothing else.
//!
//! Invariants:
//! - An object that is as it is wanted is not written, so that a second reconcile writes nothing.
//! - An object of the same name that is not ours is never touched.
//! - What others add beside our fields stays; what they change of our fields is put back.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions},
    runtime::events::{Event as KubeEvent, EventType, Recorder, Reporter},
};
use queuebox_api::spec::API_VERSION;
use serde_json::{Value, json};

use super::cache::Watched;
use crate::plan::{
    Garbage, NewStatus,
    events::Event,
    names,
    seen::Seen,
    seen::sorted,
    workload::{Desired, Owned},
};

/// Digest of what was wanted and of what the API server made of it.
type Settled = (String, String);

/// Writes with the rights of a leader.
pub struct Writer {
    client: Client,
    recorder: Recorder,
    /// Where the API server writes a value in another form than it was given, comparing alone would write for ever.
    settled: Mutex<HashMap<(Owned, String, String), Settled>>,
}

/// Why an object was left alone.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The API server refused.
    #[error(transparent)]
    Kube(#[from] kube::Error),
    /// An object of this name belongs to an earlier Relay and is being collected.
    #[error("{0} of an earlier Relay of the same name is still there")]
    Leftover(String),
}

impl WriteError {
    /// What the API server says against the object itself: it would say so again.
    pub fn refusal(&self) -> Option<&str> {
        let Self::Kube(kube::Error::Api(status)) = self else { return None };
        // An apply with a value that cannot be read, such as a quantity that is none, is answered like a fault of the server.
        let is_unreadable = status.code == 500 && status.message.starts_with("failed to convert new object");
        (matches!(status.code, 400 | 403 | 422) || is_unreadable).then_some(status.message.as_str())
    }
}

impl Writer {
    /// Through a client behind the gate.
    pub fn new(client: Client, identity: &str) -> Self {
        let reporter = Reporter { controller: "queuebox.io/operator".to_owned(), instance: Some(identity.to_owned()) };
        Self { recorder: Recorder::new(client.clone(), reporter), client, settled: Mutex::default() }
    }

    fn api(&self, kind: Watched, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &kind.resource())
    }

    /// The owner of an object that the cache does not show: it may lack our label.
    ///
    /// # Errors
    /// The API server refused.
    pub async fn foreign_owner(&self, namespace: &str, desired: &Desired) -> Result<Option<String>, kube::Error> {
        let object = self.api(Watched::Owned(desired.kind), namespace).get_metadata_opt(&desired.name).await?;
        let Some(object) = object else { return Ok(None) };
        let owners = object.metadata.owner_references.unwrap_or_default();
        let owner = owners.into_iter().find(|owner| owner.controller == Some(true));
        match owner {
            Some(owner) if owner.uid == desired.owner => Ok(None),
            Some(owner) => Ok(Some(format!("{} {}", owner.kind, owner.name))),
            None => Ok(Some("nobody".to_owned())),
        }
    }

    /// Applies an object where it differs. Returns whether it was written.
    ///
    /// # Errors
    /// The API server refused, or an earlier owner's object is still there.
    pub async fn apply(&self, namespace: &str, desired: &Desired, live: Option<&Seen>) -> Result<bool, WriteError> {
        let key = (desired.kind, namespace.to_owned(), desired.name.clone());
        let wanted = names::digest(&desired.value.to_string(), 16);
        if let Some(live) = live {
            if live.controller() != Some(desired.owner.as_str()) {
                return Err(WriteError::Leftover(format!("{:?} {}", desired.kind, desired.name)));
            }
            if is_within(&desired.value, &live.0) || self.is_settled(&key, &wanted, &live.0) {
                return Ok(false);
            }
        }
        let params = PatchParams::apply(names::MANAGER).force();
        let api = self.api(Watched::Owned(desired.kind), namespace);
        let made = api.patch(&desired.name, &params, &Patch::Apply(&desired.value)).await?;
        let made = serde_json::to_value(&made).unwrap_or_default();
        self.settled.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (wanted, content(&made)));
        Ok(true)
    }

    fn is_settled(&self, key: &(Owned, String, String), wanted: &str, live: &Value) -> bool {
        let settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        settled.get(key).is_some_and(|(known, made)| known == wanted && *made == content(live))
    }

    /// Deletes an object, if it is still that one.
    ///
    /// # Errors
    /// The API server refused for another reason than that it is gone or another one.
    pub async fn delete(&self, namespace: &str, garbage: &Garbage) -> Result<(), WriteError> {
        let preconditions = Preconditions { uid: Some(garbage.uid.clone()), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        let key = (garbage.kind, namespace.to_owned(), garbage.name.clone());
        self.settled.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        match self.api(Watched::Owned(garbage.kind), namespace).delete(&garbage.name, &params).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a status.
    ///
    /// # Errors
    /// The API server refused for another reason than that the object is gone.
    pub async fn status(&self, namespace: &str, new: &NewStatus) -> Result<(), WriteError> {
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": new.kind.as_str(),
            "metadata": {"name": new.name, "namespace": namespace},
            "status": new.status,
        });
        let params = PatchParams::apply(names::MANAGER).force();
        let api = self.api(Watched::User(new.kind), namespace);
        match api.patch_status(&new.name, &params, &Patch::Apply(&body)).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Tells people. An event that cannot be written is lost, which harms nobody.
    pub async fn tell(&self, namespace: &str, event: &Event) {
        let about = ObjectReference {
            api_version: Some(API_VERSION.to_owned()),
            kind: Some(event.kind.as_str().to_owned()),
            name: Some(event.name.clone()),
            namespace: Some(namespace.to_owned()),
            uid: Some(event.uid.clone()),
            ..ObjectReference::default()
        };
        let told = KubeEvent {
            type_: if event.is_warning { EventType::Warning } else { EventType::Normal },
            reason: event.reason.clone(),
            note: Some(event.note.clone()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&told, &about).await {
            tracing::debug!(%error, reason = event.reason, "An event could not be written.");
        }
    }
}

/// Digest of an object without what changes by itself.
fn content(object: &Value) -> String {
    let mut object = sorted(object);
    if let Some(members) = object.as_object_mut() {
        members.shift_remove("status");
        if let Some(metadata) = members.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["resourceVersion", "managedFields", "generation", "creationTimestamp"] {
                metadata.shift_remove(field);
            }
            // Counted by the Deployment controller.
            if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
                annotations.shift_remove("deployment.kubernetes.io/revision");
            }
        }
    }
    names::digest(&object.to_string(), 16)
}

/// Every field that is wanted is there with that value. In lists whose items have names others may have added items.
fn is_within(wanted: &Value, live: &Value) -> bool {
    match (wanted, live) {
        (Value::Object(wanted), Value::Object(live)) => {
            wanted.iter().all(|(name, value)| live.get(name).is_some_and(|live| is_within(value, live)))
        }
        (Value::Array(wanted), Value::Array(live)) => {
            let name = |item: &Value| ["name", "mountPath", "uid"].into_iter().find_map(|key| item.get(key).cloned());
            if wanted.iter().all(|item| name(item).is_some()) {
                wanted.iter().all(|item| {
                    live.iter().find(|other| name(other) == name(item)).is_some_and(|other| is_within(item, other))
                })
            } else {
                wanted.len() == live.len() && wanted.iter().zip(live).all(|(wanted, live)| is_within(wanted, live))
            }
        }
        _ => wanted == live,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_add_is_no_difference_and_what_they_change_is() {
        let wanted = json!({"spec": {"replicas": 2, "containers": [{"name": "worker", "args": ["run"], "env": [{"name": "A", "value": "1"}]}]}});
        let mut live = json!({
            "metadata": {"uid": "u"},
            "spec": {"replicas": 2, "paused": false, "containers": [
                {"name": "sidecar"},
                {"name": "worker", "args": ["run"], "env": [{"name": "A", "value": "1"}, {"name": "B"}], "tty": false},
            ]},
        });
        assert!(is_within(&wanted, &live));
        live["spec"]["replicas"] = json!(5);
        assert!(!is_within(&wanted, &live));
        live["spec"]["replicas"] = json!(2);
        live["spec"]["containers"][1]["args"] = json!(["run", "--more"]);
        assert!(!is_within(&wanted, &live));
    }

    #[test]
    fn what_changes_by_itself_is_no_content() {
        let one =
            json!({"metadata": {"resourceVersion": "1", "generation": 1, "labels": {"a": "b"}}, "status": {"x": 1}});
        let two =
            json!({"status": {"x": 2}, "metadata": {"labels": {"a": "b"}, "resourceVersion": "2", "generation": 2}});
        assert_eq!(content(&one), content(&two));
        let three = json!({"metadata": {"labels": {"a": "c"}}});
        assert_ne!(content(&one), content(&three));
    }
}
