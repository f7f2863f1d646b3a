//! The objects of one Relay: everything that its workers need to run, written out as it is applied.
//!
//! Invariants:
//! - Workers have no access to the Kubernetes API: no token is mounted, no Role exists.
//! - Pods fit the restricted Pod Security Standard.
//! - A Secret that is missing keeps no pod from starting: every projected source is optional.

use std::collections::BTreeSet;

use queuebox_api::{
    Reference,
    checked::{PodSpec, Relay},
    condition::RESTARTED_AT_ANNOTATION,
    spec::{API_VERSION, relay::PodBlocks},
};
use serde_json::{Map, Value, json};

use super::{
    Settings,
    group::{Configuration, FILE},
    names,
    seen::{Seen, sorted},
};

/// Where the manifests are mounted.
pub const MANIFESTS: &str = "/etc/queuebox/manifests";
/// Where values of Secrets and ConfigMaps are mounted, as `NAME/KEY`.
pub const SECRETS: &str = "/etc/queuebox/secrets";
/// User and group of the image.
const USER: i64 = 65_532;
/// Beyond the drain time-out: what a worker gets to close its connections.
const GRACE_S: u64 = 15;

/// Kinds that the operator makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owned {
    /// Configuration of the workers.
    ConfigMap,
    /// Identity of the workers.
    ServiceAccount,
    /// The workers.
    Deployment,
    /// Of the data port, and of the management port.
    Service,
    /// How many workers may be away.
    PodDisruptionBudget,
    /// Who may reach them.
    NetworkPolicy,
}

impl Owned {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::ConfigMap,
        Self::ServiceAccount,
        Self::Deployment,
        Self::Service,
        Self::PodDisruptionBudget,
        Self::NetworkPolicy,
    ];

    /// Group, version, kind and plural.
    pub fn names(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
            Self::ServiceAccount => ("", "v1", "ServiceAccount", "serviceaccounts"),
            Self::Deployment => ("apps", "v1", "Deployment", "deployments"),
            Self::Service => ("", "v1", "Service", "services"),
            Self::PodDisruptionBudget => ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
            Self::NetworkPolicy => ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
        }
    }
}

/// An object as it is wanted.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// Its kind.
    pub kind: Owned,
    /// Its name.
    pub name: String,
    /// UID of the Relay that owns it.
    pub owner: String,
    /// All of it.
    pub value: Value,
    /// Of a Deployment: its workers would be replaced for no change of the Relay's.
    pub upgrade: Option<Upgrade>,
}

/// A rollout that only the operator's own version or options ask for. A few of them are under way at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct Upgrade {
    /// What is applied until its turn comes: the same workers in the number that is wanted. `None` = nothing.
    pub meanwhile: Option<Value>,
}

/// One Relay on its way to objects.
pub struct Workload<'a> {
    /// The Relay as it is now.
    pub seen: &'a Seen,
    /// What its workers run.
    pub configuration: &'a Configuration,
    /// Workers.
    pub replicas: i32,
    /// The operator's options.
    pub settings: &'a Settings,
    /// The Deployment as it stands.
    pub deployment: Option<&'a Seen>,
}

impl Workload<'_> {
    fn relay(&self) -> &Relay {
        &self.configuration.relay
    }

    fn pod(&self) -> &PodSpec {
        &self.relay().pod
    }

    /// Everything that is to be there, in the order in which it is applied.
    pub fn objects(&self) -> Vec<Desired> {
        let mut objects = vec![self.config_map()];
        if self.pod().service_account_name.is_none() {
            objects.push(self.service_account());
        }
        objects.push(self.management_service());
        if self.relay().sources.iter().any(|source| source.connector.kind() == "http") {
            objects.push(self.data_service());
        }
        objects.extend(self.budget());
        // Before the pods, so that none is open for a moment.
        objects.extend(self.network_policy());
        objects.push(self.deployment());
        objects
    }

    fn labels(&self) -> Value {
        json!({
            (names::APP_LABEL): names::APP,
            (names::MANAGED_BY): names::MANAGER,
            (names::RELAY_LABEL): names::short(self.seen.name()),
        })
    }

    fn selector(&self) -> Value {
        json!({(names::RELAY_LABEL): names::short(self.seen.name())})
    }

    /// Fills in metadata; the digest of all that is wanted is part of it, so that a field that is wanted no more is noticed.
    fn object(&self, kind: Owned, name: String, annotations: &[(&str, String)], mut body: Value) -> Desired {
        let (group, version, word, _) = kind.names();
        let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        let mut labels = self.labels();
        if let (Owned::ConfigMap, Some(labels)) = (kind, labels.as_object_mut()) {
            labels.insert(names::CONFIG_LABEL.to_owned(), json!(self.configuration.hash));
        }
        let mut notes: Map<String, Value> =
            annotations.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        let applied = names::digest(&json!([labels, notes, sorted(&body)]).to_string(), 16);
        notes.insert(names::APPLIED_ANNOTATION.to_owned(), json!(applied));
        let value = json!({
            "apiVersion": api_version,
            "kind": word,
            "metadata": {
                "name": name,
                "namespace": self.seen.namespace(),
                "labels": labels,
                "annotations": notes,
                "ownerReferences": [{
                    "apiVersion": API_VERSION, "kind": "Relay", "name": self.seen.name(), "uid": self.seen.uid(),
                    "controller": true, "blockOwnerDeletion": false,
                }],
            },
        });
        if let (Some(body), Value::Object(head)) = (body.as_object_mut(), &value) {
            for (index, (field, part)) in head.iter().enumerate() {
                body.shift_insert(index, field.clone(), part.clone());
            }
        }
        Desired { kind, name, owner: self.seen.uid().to_owned(), value: body, upgrade: None }
    }

    fn rendering(&self) -> (&'static str, String) {
        (names::RENDERING_ANNOTATION, self.configuration.number.to_string())
    }

    fn config_map(&self) -> Desired {
        let name = names::config_map(self.seen.name(), &self.configuration.hash);
        let body = json!({"immutable": true, "data": {(FILE): self.configuration.text}});
        self.object(Owned::ConfigMap, name, &[self.rendering()], body)
    }

    fn service_account(&self) -> Desired {
        let body = json!({"automountServiceAccountToken": false});
        self.object(Owned::ServiceAccount, names::workload(self.seen.name()), &[], body)
    }

    fn data_service(&self) -> Desired {
        let body = json!({"spec": {
            "type": "ClusterIP",
            "selector": self.selector(),
            "ports": [{"name": "data", "port": self.relay().http.port, "targetPort": "data", "protocol": "TCP"}],
        }});
        self.object(Owned::Service, names::workload(self.seen.name()), &[], body)
    }

    fn management_service(&self) -> Desired {
        let port = self.relay().http.management_port;
        let body = json!({"spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": self.selector(),
            "ports": [{"name": "management", "port": port, "targetPort": "management", "protocol": "TCP"}],
        }});
        self.object(Owned::Service, names::management(self.seen.name()), &[], body)
    }

    /// From the Relay as it is now: the budget is no part of what workers run.
    fn budget(&self) -> Option<Desired> {
        let disruption = self.seen.at("/spec/disruption");
        if disruption.get("enabled").and_then(Value::as_bool) == Some(false) {
            return None;
        }
        let away = disruption.get("maxUnavailable").and_then(Value::as_i64).unwrap_or(1);
        let body = json!({"spec": {
            "maxUnavailable": away,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": self.selector()},
        }});
        Some(self.object(Owned::PodDisruptionBudget, names::workload(self.seen.name()), &[], body))
    }

    /// From the Relay as it is now, like the budget. What goes out is not restricted: nobody here knows where the database is.
    fn network_policy(&self) -> Option<Desired> {
        let policy = self.seen.at("/spec/networkPolicy");
        if policy.get("enabled").and_then(Value::as_bool) != Some(true) {
            return None;
        }
        let peers = |field: &str| policy.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
        let port = |name: &str| json!([{"port": name, "protocol": "TCP"}]);
        let mut watchers = vec![json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.settings.operator_namespace}},
            "podSelector": {"matchLabels": {names::COMPONENT_LABEL: names::OPERATOR}},
        })];
        watchers.extend(peers("managementFrom"));
        let senders = peers("dataFrom");
        let data = if senders.is_empty() {
            json!({"ports": port("data")})
        } else {
            json!({"ports": port("data"), "from": senders})
        };
        let body = json!({"spec": {
            "podSelector": {"matchLabels": self.selector()},
            "policyTypes": ["Ingress"],
            "ingress": [data, {"ports": port("management"), "from": watchers}],
        }});
        Some(self.object(Owned::NetworkPolicy, names::workload(self.seen.name()), &[], body))
    }

    fn deployment(&self) -> Desired {
        let template = self.template();
        let digest = names::digest(&sorted(&template).to_string(), 16);
        let mut desired = self.deployment_of(template, digest.clone());
        desired.upgrade = self.deployment.filter(|live| self.is_upgrade(live, &digest)).map(|live| Upgrade {
            meanwhile: (live.number("/spec/replicas") != i64::from(self.replicas)
                || super::asked_for(live) != self.replicas)
                .then(|| {
                    let known = live.annotation(names::TEMPLATE_ANNOTATION).unwrap_or_default().to_owned();
                    self.deployment_of(live.at("/spec/template").clone(), known).value
                }),
        });
        desired
    }

    /// Other pods are wanted, and neither the manifests nor a restart on demand are why.
    fn is_upgrade(&self, live: &Seen, digest: &str) -> bool {
        let metadata = live.at("/spec/template/metadata");
        let text = |group: &str, name: &str| metadata.get(group).and_then(|it| it.get(name)).and_then(Value::as_str);
        live.annotation(names::TEMPLATE_ANNOTATION) != Some(digest)
            && text("labels", names::CONFIG_LABEL) == Some(self.configuration.hash.as_str())
            && live.annotation(names::RENDERING_ANNOTATION) == Some(self.configuration.number.to_string().as_str())
            && text("annotations", RESTARTED_AT_ANNOTATION) == self.seen.annotation(RESTARTED_AT_ANNOTATION)
    }

    fn deployment_of(&self, template: Value, digest: String) -> Desired {
        let body = json!({"spec": {
            "replicas": self.replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": 600,
            "selector": {"matchLabels": self.selector()},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "25%"}},
            "template": template,
        }});
        let notes = [
            self.rendering(),
            (names::REPLICAS_ANNOTATION, self.replicas.to_string()),
            (names::TEMPLATE_ANNOTATION, digest),
        ];
        self.object(Owned::Deployment, names::workload(self.seen.name()), &notes, body)
    }

    // ---- Pods -------------------------------------------------------------------------------------------------------

    fn template(&self) -> Value {
        let pod = self.pod();
        // What selects pods, and what they are told apart by, cannot be given away.
        let mut labels: Map<String, Value> =
            pod.labels.iter().flatten().map(|(name, value)| (name.clone(), json!(value))).collect();
        if let Value::Object(own) = self.labels() {
            labels.extend(own);
        }
        labels.insert(names::CONFIG_LABEL.to_owned(), json!(self.configuration.hash));
        let mut annotations: Map<String, Value> =
            pod.annotations.iter().flatten().map(|(name, value)| (name.clone(), json!(value))).collect();
        if let Some(at) = self.seen.annotation(RESTARTED_AT_ANNOTATION) {
            annotations.insert(RESTARTED_AT_ANNOTATION.to_owned(), json!(at));
        }
        annotations.insert("kubectl.kubernetes.io/default-container".to_owned(), json!("worker"));
        json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": self.pod_spec()})
    }

    fn pod_spec(&self) -> Value {
        let pod = self.pod();
        let account = pod.service_account_name.clone().unwrap_or_else(|| names::workload(self.seen.name()));
        let mut security = json!({
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        });
        if let Some(given) = &pod.security_context {
            overlay(&mut security, &given.0);
        }
        let mut spec = json!({
            "serviceAccountName": account,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": self.relay().drain_timeout.as_secs() + GRACE_S,
            "securityContext": security,
            "containers": [self.container()],
            "volumes": self.volumes(),
            "topologySpreadConstraints": self.spread(),
        });
        let pull: Vec<Value> = match &pod.image_pull_secrets {
            Some(given) => given.iter().map(|it| json!({"name": it.name})).collect(),
            None => self.settings.image_pull_secrets.iter().map(|name| json!({"name": name})).collect(),
        };
        let optional = [
            ("imagePullSecrets", (!pull.is_empty()).then(|| json!(pull))),
            ("nodeSelector", pod.node_selector.as_ref().map(|it| json!(it))),
            ("tolerations", pod.tolerations.as_ref().map(|it| it.0.clone())),
            ("affinity", pod.affinity.as_ref().map(|it| it.0.clone())),
            ("priorityClassName", pod.priority_class_name.as_ref().map(|it| json!(it))),
        ];
        for (field, value) in optional {
            if let Some(value) = value {
                spec[field] = value;
            }
        }
        spec
    }

    fn spread(&self) -> Value {
        if let Some(given) = &self.pod().topology_spread_constraints {
            return given.0.clone();
        }
        let over = |key: &str| {
            json!({
                "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": self.selector()},
            })
        };
        json!([over("kubernetes.io/hostname"), over("topology.kubernetes.io/zone")])
    }

    fn container(&self) -> Value {
        let pod = self.pod();
        let http = &self.relay().http;
        let resources = pod.resources.as_ref().map_or_else(
            || json!({"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}),
            |given| given.0.clone(),
        );
        let mut mounts = vec![
            json!({"name": "manifests", "mountPath": MANIFESTS, "readOnly": true}),
            json!({"name": "tmp", "mountPath": "/tmp"}),
        ];
        if !projected(&self.configuration.references).is_empty() {
            mounts.push(json!({"name": "secrets", "mountPath": SECRETS, "readOnly": true}));
        }
        mounts.extend(blocks(pod.extra_volume_mounts.as_ref()));
        let mut container = json!({
            "name": "worker",
            "image": pod.image.as_deref().unwrap_or(&self.settings.worker_image),
            "imagePullPolicy": self.settings.worker_image_pull_policy,
            "args": self.arguments(),
            "ports": [
                {"name": "data", "containerPort": http.port, "protocol": "TCP"},
                {"name": "management", "containerPort": http.management_port, "protocol": "TCP"},
            ],
            "livenessProbe": probe("/livez", 10, 6),
            "readinessProbe": probe("/readyz", 2, 1),
            "resources": resources,
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": mounts,
        });
        let env = blocks(pod.env.as_ref());
        if !env.is_empty() {
            container["env"] = json!(env);
        }
        container
    }

    fn arguments(&self) -> Value {
        let version = format!("{}/{}", self.configuration.number, self.configuration.hash);
        let log = self.pod().log_level.as_deref().unwrap_or("info");
        json!([
            "run",
            "-f",
            MANIFESTS,
            "--secrets",
            SECRETS,
            "--relay",
            self.seen.name(),
            "--cluster",
            "--config-version",
            version,
            "--log",
            log,
            "--log-format",
            "json",
        ])
    }

    fn volumes(&self) -> Value {
        let map = names::config_map(self.seen.name(), &self.configuration.hash);
        let mut volumes = vec![
            json!({"name": "manifests", "configMap": {"name": map}}),
            json!({"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}),
        ];
        let sources = projected(&self.configuration.references);
        if !sources.is_empty() {
            // Readable for the group, which is the pod's fsGroup.
            volumes.push(json!({"name": "secrets", "projected": {"defaultMode": 0o440, "sources": sources}}));
        }
        volumes.extend(blocks(self.pod().extra_volumes.as_ref()));
        json!(volumes)
    }
}

fn probe(path: &str, period_seconds: u32, failure_threshold: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": "management", "scheme": "HTTP"},
        "periodSeconds": period_seconds, "timeoutSeconds": 5, "failureThreshold": failure_threshold,
    })
}

/// Members of `given` win; blocks are merged.
fn overlay(base: &mut Value, given: &Value) {
    match (base.as_object_mut(), given.as_object()) {
        (Some(members), Some(given)) => {
            for (name, value) in given {
                overlay(members.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        _ => *base = given.clone(),
    }
}

fn blocks(given: Option<&PodBlocks>) -> Vec<Value> {
    given.and_then(|given| given.0.as_array().cloned()).unwrap_or_default()
}

/// One source per Secret and ConfigMap, each key as the file `NAME/KEY`. Where a Secret and a ConfigMap share a name and a key the
/// file is the Secret's: the API server refuses one path twice.
fn projected(references: &BTreeSet<Reference>) -> Vec<Value> {
    let mut paths = BTreeSet::new();
    let mut sources: Vec<(&str, &str, Vec<Value>)> = Vec::new();
    // Secrets sort before ConfigMaps.
    for reference in references {
        let (kind, name, key) = match reference {
            Reference::SecretKey { name, key } => ("secret", name.as_str(), key),
            Reference::ConfigMapKey { name, key } => ("configMap", name.as_str(), key),
            Reference::Env(_) | Reference::File(_) => continue,
        };
        let path = format!("{name}/{key}");
        if !paths.insert(path.clone()) {
            continue;
        }
        let item = json!({"key": key, "path": path});
        match sources.last_mut().filter(|(last, last_name, _)| (*last, *last_name) == (kind, name)) {
            Some((_, _, items)) => items.push(item),
            None => sources.push((kind, name, vec![item])),
        }
    }
    let source =
        |(kind, name, items): (&str, &str, Vec<Value>)| json!({kind: {"name": name, "items": items, "optional": true}});
    sources.into_iter().map(source).collect()
}
