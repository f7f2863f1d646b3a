//! A team: a namespace with a database, a receiver, and a Relay that serves them.

use std::{sync::Arc, time::Instant};

use queuebox_testkit::{self as testkit, Recorder};
use serde_json::{Value, json};

use super::{
    node::{HOST, Node, PATIENCE, note},
    prober::Prober,
};
use crate::support::Db;

/// The role that the workers log in as.
pub const ROLE: &str = "relay";

/// A namespace with everything that a Relay needs. It is deleted at the end.
#[derive(Debug)]
pub struct Team {
    pub node: Node,
    pub namespace: String,
    pub postgres: testkit::Postgres,
    pub db: Db,
    database: String,
    pub receiver: Arc<Recorder>,
    started: Instant,
    name: &'static str,
}

impl Team {
    /// A team on a node with the operator; nothing of its own is applied yet.
    pub async fn new(name: &'static str) -> Team {
        let node = Node::get().await;
        node.operator().await;
        Team::on(node, name).await
    }

    /// A team on this node, whatever runs there.
    pub async fn on(node: Node, name: &'static str) -> Team {
        let (addresses, rules) = (format!("127.0.0.1,{HOST}"), "host all all 0.0.0.0/0 scram-sha-256\n");
        let postgres = testkit::private_postgres_with(&[("listen_addresses", &addresses), ("pg_hba", rules)]).await;
        let database = postgres.fresh_database_name().await;
        postgres.psql(&database, &format!("CREATE ROLE {ROLE} LOGIN PASSWORD 'one'")).await;
        postgres
            .psql(
                &database,
                &format!("ALTER DATABASE {database} OWNER TO {ROLE}; GRANT ALL ON SCHEMA public TO {ROLE}"),
            )
            .await;
        let db = Db::postgres(postgres.url_of(&database)).await;
        let receiver = Arc::new(Recorder::start_at(HOST).await);
        let namespace = testkit::unique("team-");
        node.kubectl(&["create", "namespace", &namespace]).await;
        let enforce = "pod-security.kubernetes.io/enforce=restricted";
        node.kubectl(&["label", "namespace", &namespace, enforce]).await;
        Team { node, namespace, postgres, db, database, receiver, started: Instant::now(), name }
    }

    /// The Secret with the password of the database.
    pub fn secret(&self, password: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "shop-db"},
            "stringData": {"password": password, "unrelated": "a"},
        })
    }

    /// The Relay `shop`, with a patch to its `spec`.
    pub fn relay(&self, patch: Value) -> Value {
        let mut spec = json!({
            "database": {"postgres": {
                "host": HOST.to_string(), "port": self.postgres.port(), "database": self.database, "username": ROLE,
                "passwordFrom": {"secretKeyRef": {"name": "shop-db", "key": "password"}},
            }},
            "routes": [{"topics": ["**"], "destinations": ["receiver"]}],
            // The prober judges whether a message is lost, so none is to be given up on.
            "inbox": {"relay": {"maxAttempts": 1000}},
        });
        crate::support::merge(&mut spec, patch);
        custom("Relay", "shop", spec)
    }

    /// A Destination that sends to a path of the receiver.
    pub fn destination(&self, name: &str, path: &str) -> Value {
        let url = self.receiver.url_for(path);
        custom("Destination", name, json!({"http": {"url": url, "timeout": "10s"}}))
    }

    /// The HTTP Source `hooks`.
    pub fn source(&self) -> Value {
        let spec = json!({
            "relayRef": {"name": "shop"}, "topic": "hook.received", "idempotencyKeyPath": "$.id", "aggregateIdPath": "$.key",
            "http": {"path": "/hooks"},
        });
        custom("Source", "hooks", spec)
    }

    /// Secret, Relay, Destination and Source.
    pub fn manifests(&self, patch: Value) -> Vec<Value> {
        vec![self.secret("one"), self.relay(patch), self.destination("receiver", "/events"), self.source()]
    }

    /// Applies the manifests and waits until the Relay is ready.
    pub async fn start(&self, patch: Value) {
        self.node.apply(&self.namespace, &self.manifests(patch)).await;
        self.ready().await;
    }

    /// Applies objects.
    pub async fn apply(&self, objects: &[Value]) {
        self.node.apply(&self.namespace, objects).await;
    }

    /// Waits until the Relay is ready in its present generation.
    pub async fn ready(&self) -> Value {
        self.node.wait_condition(&self.namespace, "relay/shop", "Ready", "True").await
    }

    /// Waits until so many workers are ready and no other pod is left.
    pub async fn workers(&self, count: i64) {
        self.node
            .wait_object(&self.namespace, "deployment/shop-relay", |it| {
                let status = &it["status"];
                let number = |field: &str| status[field].as_i64().unwrap_or_default();
                number("readyReplicas") == count
                    && number("replicas") == count
                    && number("updatedReplicas") == count
                    && status["observedGeneration"] == it["metadata"]["generation"]
            })
            .await;
        testkit::eventually("stopped workers are gone", PATIENCE, || async {
            (self.pods().await.len() == usize::try_from(count).unwrap()).then_some(())
        })
        .await;
    }

    /// The worker pods.
    pub async fn pods(&self) -> Vec<Value> {
        self.node.list(&self.namespace, "pods", "queuebox.io/relay=shop").await
    }

    /// Starts the load: rows in the outbox, and requests to the Source when there is one.
    pub async fn probe(&self) -> Prober {
        let address = self.node.get_object(&self.namespace, "service/shop-relay").await;
        let address = address["spec"]["clusterIP"].as_str().unwrap().to_owned();
        Prober::start(self.db.clone(), self.receiver.clone(), format!("http://{address}:8080/inbox/hooks"))
    }

    /// Ends the load and judges; the journey is over.
    pub async fn finish(self, prober: Prober, duplicates_max: usize) {
        self.judge(prober, duplicates_max).await;
        self.leave().await;
    }

    /// Ends the load and judges.
    pub async fn judge(&self, prober: Prober, duplicates_max: usize) {
        let verdict = prober.finish(PATIENCE).await;
        note(self.name, self.started, &verdict.to_string());
        if verdict.lost + verdict.disorder > 0 || verdict.duplicates > duplicates_max {
            self.node.report(&self.namespace).await;
            panic!(
                "{}: {verdict}; at most {duplicates_max} duplicates are within the contract\n{:?}",
                self.name, verdict.examples
            );
        }
    }

    /// The journey is over.
    pub async fn leave(self) {
        self.db.close().await;
        // Its pods are to drain, which nobody has to wait for.
        self.node.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"]).await;
    }
}

/// An object of one of the three kinds.
pub fn custom(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "queuebox.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}
