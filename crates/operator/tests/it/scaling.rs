//! Scaling and states by what workers say: the test plays the worker behind the pods' address.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{Json, Router, routing::get};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{World, shop_relay};

/// A `/status` that says what it is told to say.
pub struct FakeWorker {
    pub port: u16,
    status: Arc<Mutex<Option<Value>>>,
}

impl FakeWorker {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let status: Arc<Mutex<Option<Value>>> = Arc::default();
        let said = status.clone();
        let answer = get(move || {
            let status = said.lock().unwrap().clone();
            async move { status.map(Json).ok_or(axum::http::StatusCode::SERVICE_UNAVAILABLE) }
        });
        let router = Router::new().route("/status", answer);
        tokio::spawn(
            async move { axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await },
        );
        Self { port, status }
    }

    pub fn says(&self, rows: i64, lanes: u32, destination: &str) {
        *self.status.lock().unwrap() = Some(json!({
            "readiness": "Ready",
            "backlog": {"outbox": {
                "pending": rows, "dead": 2, "oldestDueAgeSeconds": 1.0,
                "startable": {"rows": rows, "lanes": lanes, "oldestAgeSeconds": 1.0, "more": false},
            }},
            "sources": [],
            "destinations": [{"name": "out", "state": destination, "detail": "refused", "failures": 9, "failingForSeconds": 90.0}],
        }));
    }

    /// As one says it that waits for a Secret of its database.
    pub fn misses(&self, reference: &str) {
        *self.status.lock().unwrap() = Some(json!({
            "readiness": "Starting", "backlog": null, "sources": [], "destinations": [],
            "database": {"failing": format!("waiting for {reference}"), "missing": [reference]},
        }));
    }

    pub fn is_silent(&self) {
        *self.status.lock().unwrap() = None;
    }
}

/// Gives the pods of the Relay the address of the fake worker, as a kubelet would.
pub async fn run_pods(world: &World) -> usize {
    let mut running = 0;
    for pod in world.list("pods").await {
        let name = pod["metadata"]["name"].as_str().unwrap();
        if pod["status"]["phase"] != "Running" {
            let mut pod = pod.clone();
            pod["status"] = json!({
                "phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}],
            });
            let path = format!("{}/status", world.path("pods", name));
            let _ = world.kubernetes.try_api("PUT", &path, Some(pod)).await;
        }
        running += 1;
    }
    running
}

/// Lets every pod run from now on.
pub fn keep_pods_running(world: Arc<World>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            run_pods(&world).await;
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        }
    })
}

pub fn scaled_relay(worker: &FakeWorker, autoscaling: Value) -> Value {
    // Both ports are the pod's; only the second is asked.
    shop_relay(json!({"http": {"managementPort": worker.port}, "autoscaling": autoscaling}))
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_follow_the_backlog_and_a_lost_metric_holds_them() {
    let world = Arc::new(World::new().await);
    let worker = FakeWorker::start().await;
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    let autoscaling = json!({"minReplicas": 1, "maxReplicas": 4, "targetPending": 100});
    world.apply("Relay", "shop", scaled_relay(&worker, autoscaling)).await;
    worker.says(0, 0, "Up");
    let operator = world.operator().await;
    let pods = keep_pods_running(world.clone());
    world.condition("relays", "shop", "ScalingActive", "True", "BuiltIn").await;
    world.condition("relays", "shop", "Ready", "True", "Ready").await;
    worker.says(1_000, 64, "Up");
    world.until("deployments", "shop-relay", "four workers", |it| it["spec"]["replicas"] == 4).await;
    let relay = world.condition("relays", "shop", "ScalingLimited", "True", "TooManyReplicas").await;
    assert_eq!(relay["spec"].get("replicas"), Some(&json!(1)), "the operator never writes the spec");
    world.condition("relays", "shop", "Ready", "True", "Ready").await;
    world.condition("relays", "shop", "DeadLettering", "True", "DeadRows").await;
    let (status, answer) = operator.get(&format!("/v1/namespaces/{}/relays/shop/backlog", world.namespace)).await;
    assert_eq!(status, 200, "{answer}");
    assert!(answer["startable"].as_i64().unwrap() >= 1_000 && answer["dead"] == 2, "{answer}");
    assert_eq!(operator.get(&format!("/v1/namespaces/{}/relays/none/backlog", world.namespace)).await.0, 404);
    worker.says(1_000, 64, "Down");
    world.condition("relays", "shop", "Delivering", "False", "DestinationFailing").await;
    world.condition("destinations", "out", "Delivering", "False", "DestinationFailing").await;
    worker.is_silent();
    world.condition("relays", "shop", "ScalingActive", "False", "MetricsUnavailable").await;
    let deployment = world.get("deployments", "shop-relay").await.unwrap();
    assert_eq!(deployment["spec"]["replicas"], 4, "held");
    pods.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_takes_all_workers_away_and_hands_off_means_off() {
    let world = Arc::new(World::new().await);
    world.shop().await;
    let _operator = world.operator().await;
    let pods = keep_pods_running(world.clone());
    world.condition("relays", "shop", "Ready", "True", "Ready").await;
    world.apply("Relay", "shop", shop_relay(json!({"paused": true}))).await;
    world.until("deployments", "shop-relay", "no worker", |it| it["spec"]["replicas"] == 0).await;
    world.condition("relays", "shop", "Paused", "True", "PausedBySpec").await;
    world.condition("relays", "shop", "Delivering", "Unknown", "Paused").await;
    world.condition("relays", "shop", "Ready", "True", "Paused").await;
    let annotated = json!({
        "apiVersion": "queuebox.io/v1alpha1", "kind": "Relay",
        "metadata": {"name": "shop", "annotations": {"queuebox.io/reconcile": "false"}},
        "spec": shop_relay(json!({"replicas": 3})),
    });
    world.kubernetes.api("PATCH", &world.path("relays", "shop"), Some(annotated)).await;
    world.condition("relays", "shop", "Paused", "True", "PausedByAnnotation").await;
    let deployment = world.get("deployments", "shop-relay").await.unwrap();
    assert_eq!(deployment["spec"]["replicas"], 0);
    world.apply("Relay", "shop", shop_relay(json!({"replicas": 3}))).await;
    world.until("deployments", "shop-relay", "three workers", |it| it["spec"]["replicas"] == 3).await;
    pods.abort();
}
