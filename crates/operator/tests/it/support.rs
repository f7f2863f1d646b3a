//! A namespace of its own for each test, with an operator that watches it.

use std::{path::Path, time::Duration};

use queuebox_operator::{Error, Options, Settings, run_in};
use queuebox_testkit::{self as testkit, Kubernetes, eventually};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Long enough for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A namespace on the shared control plane, with the CRDs in place.
pub struct World {
    pub kubernetes: Kubernetes,
    pub namespace: String,
}

/// A running operator; ends with the test.
pub struct Operator {
    pub port: u16,
    stop: CancellationToken,
    task: JoinHandle<Result<(), Error>>,
}

impl World {
    pub async fn new() -> Self {
        Self::on(testkit::kubernetes().await).await
    }

    pub async fn on(kubernetes: Kubernetes) -> Self {
        install_crds(&kubernetes).await;
        let namespace = kubernetes.fresh_namespace().await;
        Self { kubernetes, namespace }
    }

    /// Starts an operator for this namespace alone.
    pub async fn operator(&self) -> Operator {
        self.operator_with(&self.kubernetes.kubeconfig(), |_| {}).await
    }

    pub async fn operator_with(&self, kubeconfig: &Path, change: impl FnOnce(&mut Options)) -> Operator {
        let config = client_config(kubeconfig).await;
        let port = testkit::free_port();
        let mut options = Options {
            namespaces: vec![self.namespace.clone()],
            settings: Settings {
                worker_image: "queuebox/queuebox:test".to_owned(),
                worker_image_pull_policy: "IfNotPresent".to_owned(),
                image_pull_secrets: Vec::new(),
                operator_namespace: self.namespace.clone(),
            },
            leader_election: false,
            lease_namespace: self.namespace.clone(),
            lease_name: "queuebox-operator".to_owned(),
            identity: testkit::unique("operator-"),
            listen: ([127, 0, 0, 1], port).into(),
            poll_interval: Duration::from_millis(500),
        };
        change(&mut options);
        let stop = CancellationToken::new();
        let task = tokio::spawn(run_in(config, options, stop.clone()));
        Operator { port, stop, task }
    }

    /// Path of objects of the three kinds, or of one of them.
    pub fn path(&self, plural: &str, name: &str) -> String {
        let base = match plural {
            "relays" | "sources" | "destinations" => "/apis/queuebox.io/v1alpha1",
            "deployments" | "replicasets" => "/apis/apps/v1",
            "poddisruptionbudgets" => "/apis/policy/v1",
            "networkpolicies" => "/apis/networking.k8s.io/v1",
            "events" => "/apis/events.k8s.io/v1",
            "leases" => "/apis/coordination.k8s.io/v1",
            _ => "/api/v1",
        };
        let path = format!("{base}/namespaces/{}/{plural}", self.namespace);
        if name.is_empty() { path } else { format!("{path}/{name}") }
    }

    /// Server-side apply of a Relay, Source or Destination.
    pub async fn apply(&self, kind: &str, name: &str, spec: Value) -> Value {
        self.try_apply(kind, name, spec).await.unwrap()
    }

    pub async fn try_apply(&self, kind: &str, name: &str, spec: Value) -> Result<Value, String> {
        let object = json!({
            "apiVersion": "queuebox.io/v1alpha1", "kind": kind,
            "metadata": {"name": name, "namespace": self.namespace}, "spec": spec,
        });
        let path = self.path(&format!("{}s", kind.to_lowercase()), name);
        self.kubernetes.try_api("PATCH", &path, Some(object)).await.map_err(|error| error.to_string())
    }

    pub async fn get(&self, plural: &str, name: &str) -> Option<Value> {
        self.kubernetes.try_api("GET", &self.path(plural, name), None).await.ok()
    }

    pub async fn list(&self, plural: &str) -> Vec<Value> {
        let answer = self.kubernetes.api("GET", &self.path(plural, ""), None).await;
        answer["items"].as_array().cloned().unwrap_or_default()
    }

    pub async fn delete(&self, plural: &str, name: &str) {
        self.kubernetes.api("DELETE", &self.path(plural, name), None).await;
    }

    /// Waits until the object is as it should be, and returns it.
    pub async fn until(&self, plural: &str, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let is = &is;
        eventually(what, PATIENCE, || async move { self.get(plural, name).await.filter(|object| is(object)) }).await
    }

    /// Waits for a condition with this status and reason.
    pub async fn condition(&self, plural: &str, name: &str, kind: &str, status: &str, reason: &str) -> Value {
        let what = format!("{plural}/{name} says {kind}={status} {reason}");
        self.until(plural, name, &what, |object| {
            condition(object, kind).is_some_and(|it| it["status"] == status && it["reason"] == reason)
        })
        .await
    }

    /// Waits until what is made from now on is younger than this object: creation times have whole seconds.
    pub async fn a_second_after(&self, object: &Value) {
        let path = format!("{}?dryRun=All", self.path("configmaps", ""));
        let before = &object["metadata"]["creationTimestamp"];
        eventually("the API server's next second", PATIENCE, || async {
            let made = json!({"metadata": {"name": "now"}});
            let now = self.kubernetes.api("POST", &path, Some(made)).await;
            (now["metadata"]["creationTimestamp"].as_str() > before.as_str()).then_some(())
        })
        .await;
    }

    /// The usual three: a Relay `shop` on PostgreSQL, a Destination `out`, a Source `hooks`.
    pub async fn shop(&self) {
        self.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
        self.apply("Relay", "shop", shop_relay(json!({}))).await;
        self.apply("Source", "hooks", hooks("/hooks")).await;
    }
}

pub fn hooks(path: &str) -> Value {
    json!({"relayRef": {"name": "shop"}, "topic": "hook", "idempotencyKeyPath": "$.id", "http": {"path": path}})
}

/// The spec of the usual Relay, with changes.
pub fn shop_relay(changes: Value) -> Value {
    let mut spec = json!({
        "database": {"postgres": {
            "host": "db.example", "database": "shop", "username": "shop",
            "passwordFrom": {"secretKeyRef": {"name": "shop-db", "key": "password"}},
        }},
        "routes": [{"topics": ["**"], "destinations": ["out"]}],
    });
    for (name, value) in changes.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec
}

pub fn condition<'o>(object: &'o Value, kind: &str) -> Option<&'o Value> {
    object["status"]["conditions"].as_array()?.iter().find(|it| it["type"] == kind)
}

/// A client's configuration of a kubeconfig.
pub async fn client_config(kubeconfig: &Path) -> kube::Config {
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).unwrap();
    kube::Config::from_custom_kubeconfig(kubeconfig, &kube::config::KubeConfigOptions::default()).await.unwrap()
}

/// Applies the definitions and waits until the API server serves them.
async fn install_crds(kubernetes: &Kubernetes) {
    for kind in queuebox_api::Kind::ALL {
        let crd = queuebox_api::crd::crd(kind);
        let name = crd["metadata"]["name"].as_str().unwrap().to_owned();
        let path = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}");
        kubernetes.api("PATCH", &path, Some(crd)).await;
        let (kubernetes, path) = (&kubernetes, &path);
        eventually("the definition is established", PATIENCE, || async move {
            let crd = kubernetes.api("GET", path, None).await;
            condition(&crd, "Established").filter(|it| it["status"] == "True").map(drop)
        })
        .await;
    }
}

impl Operator {
    pub async fn get(&self, path: &str) -> (u16, Value) {
        let answer = reqwest::get(format!("http://127.0.0.1:{}{path}", self.port)).await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json().await.unwrap_or(Value::Null))
    }

    /// As on SIGTERM.
    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// As on `kill -9`: nothing is given back.
    pub fn kill(self) {
        self.task.abort();
    }
}

impl Operator {
    /// A number of the operator's own metrics, summed over its labels.
    async fn metric(&self, name: &str) -> f64 {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.port)).await.unwrap().text().await.unwrap();
        let own = text.lines().filter(|line| line.starts_with(name) && !line.starts_with('#'));
        own.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Writes so far.
    pub async fn writes(&self) -> f64 {
        self.metric("queuebox_operator_writes_total").await
    }

    /// Waits for so many more reconciles.
    pub async fn reconciled(&self, more: u32) {
        let name = "queuebox_operator_reconciles_total";
        let wanted = self.metric(name).await + f64::from(more);
        eventually("more reconciles", PATIENCE, || async { (self.metric(name).await >= wanted).then_some(()) }).await;
    }

    /// Waits until a few reconciles in a row have written nothing.
    pub async fn settled(&self) {
        eventually("nothing more to write", PATIENCE, || async {
            let before = self.writes().await;
            self.reconciled(3).await;
            (self.writes().await == before).then_some(())
        })
        .await;
    }
}
