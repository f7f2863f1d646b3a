//! D37: while nothing changes nothing is written.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use crate::{
    rights::grant,
    scaling::{FakeWorker, keep_pods_running},
    support::{Operator, World, shop_relay},
};

/// Version of every object that the operator could write.
async fn versions(world: &World) -> BTreeMap<String, Value> {
    let mut versions = BTreeMap::new();
    for plural in [
        "relays",
        "sources",
        "destinations",
        "deployments",
        "configmaps",
        "services",
        "serviceaccounts",
        "poddisruptionbudgets",
        "networkpolicies",
        "events",
    ] {
        for object in world.list(plural).await {
            // The controllers behind Deployments and Services tell of themselves.
            if plural == "events" && object["reportingController"] != "queuebox.io/operator" {
                continue;
            }
            let name = object["metadata"]["name"].as_str().unwrap();
            versions.insert(format!("{plural}/{name}"), object["metadata"]["resourceVersion"].clone());
        }
    }
    versions
}

/// Many more evaluations, and not one write.
async fn nothing_is_written(world: &World, operator: &Operator) {
    let (writes, before) = (operator.writes().await, versions(world).await);
    operator.reconciled(8).await;
    assert_eq!(versions(world).await, before);
    assert_eq!(operator.writes().await, writes, "the operator did not even try");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_nothing_changes_nothing_is_written() {
    let world = Arc::new(World::new().await);
    world.shop().await;
    let operator = world.operator().await;
    let pods = keep_pods_running(world.clone());
    world.condition("sources", "hooks", "Ready", "True", "Ready").await;
    world.condition("destinations", "out", "Ready", "True", "Ready").await;
    let relay = world.condition("relays", "shop", "Ready", "True", "Ready").await;
    world.until("relays", "shop", "the pod is counted", |it| it["status"]["readyReplicas"] == 1).await;
    operator.settled().await;
    nothing_is_written(&world, &operator).await;
    // A new process knows nothing, and still finds nothing to write.
    operator.stop().await;
    let operator = world.operator().await;
    operator.settled().await;
    assert_eq!(operator.writes().await, 0.0);
    nothing_is_written(&world, &operator).await;
    // Another generation, and only what belongs to it moves.
    world.apply("Relay", "shop", shop_relay(json!({"replicas": 2}))).await;
    let after =
        world.until("relays", "shop", "the generation is seen", |it| it["status"]["observedGeneration"] == 2).await;
    let since = |it: &Value| crate::support::condition(it, "Ready").unwrap()["lastTransitionTime"].clone();
    assert_eq!(since(&relay), since(&after));
    pods.abort();
}

/// The operator reads no Secret: it is the workers that miss it, and that look for it in their own files.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_name_of_a_secret_is_told_once_and_asked_for_never() {
    let world = Arc::new(World::new().await);
    grant(&world, "operator").await;
    let kubeconfig = world.kubernetes.kubeconfig_for(&world.namespace, "operator").await;
    let worker = FakeWorker::start().await;
    worker.misses("secretKeyRef wrong/password");
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    let mut relay = shop_relay(json!({"http": {"managementPort": worker.port}}));
    relay["database"]["postgres"]["passwordFrom"]["secretKeyRef"]["name"] = json!("wrong");
    world.apply("Relay", "shop", relay).await;
    let operator = world.operator_with(&kubeconfig, |_| {}).await;
    let pods = keep_pods_running(world.clone());
    let told = world.condition("relays", "shop", "ResolvedRefs", "False", "SecretKeyMissing").await;
    assert_eq!(told["status"]["observedGeneration"], told["metadata"]["generation"]);
    let text = crate::support::condition(&told, "ResolvedRefs").unwrap()["message"].as_str().unwrap().to_owned();
    assert!(text.contains("wrong/password"), "{text}");
    operator.settled().await;
    let user = format!("system:serviceaccount:{}:operator", world.namespace);
    let requests = || {
        let log = world.kubernetes.audit_log();
        log.iter().filter(|entry| entry["user"]["username"] == user.as_str() && entry["verb"] != "watch").count()
    };
    let before = requests();
    nothing_is_written(&world, &operator).await;
    assert_eq!(requests(), before, "nothing is even asked");
    pods.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_relays_are_as_quiet_as_one() {
    let world = World::new().await;
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    for index in 0..50 {
        // No pods: fifty Deployments of none cost the shared control plane nothing.
        world.apply("Relay", &format!("shop-{index}"), shop_relay(json!({"replicas": 0}))).await;
    }
    let operator = world.operator().await;
    for index in 0..50 {
        world.condition("relays", &format!("shop-{index}"), "Ready", "True", "Ready").await;
    }
    operator.settled().await;
    nothing_is_written(&world, &operator).await;
}
