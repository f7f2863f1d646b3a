//! D34: whoever scales the Deployment is put right, whoever scales the Relay is followed.

use std::sync::Arc;

use queuebox_testkit::eventually;
use serde_json::json;

use crate::{
    scaling::{FakeWorker, keep_pods_running, scaled_relay},
    support::{PATIENCE, World, shop_relay},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_scale_of_the_deployment_is_put_back() {
    let world = Arc::new(World::new().await);
    let worker = FakeWorker::start().await;
    worker.says(0, 0, "Up");
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    world.apply("Relay", "shop", scaled_relay(&worker, json!({"maxReplicas": 4}))).await;
    let _operator = world.operator().await;
    let pods = keep_pods_running(world.clone());
    world.condition("relays", "shop", "ScalingActive", "True", "BuiltIn").await;
    let before = world.until("deployments", "shop-relay", "one worker", |it| it["spec"]["replicas"] == 1).await;
    let generation = before["metadata"]["generation"].as_i64().unwrap();
    let scale = json!({"spec": {"replicas": 5}});
    let path = format!("{}/scale", world.path("deployments", "shop-relay"));
    eventually("somebody scales the Deployment", PATIENCE, || async {
        let mut asked = world.kubernetes.api("GET", &path, None).await;
        asked["spec"] = scale["spec"].clone();
        world.kubernetes.try_api("PUT", &path, Some(asked)).await.ok()
    })
    .await;
    let after = world
        .until("deployments", "shop-relay", "the number is put back", |it| {
            it["spec"]["replicas"] == 1 && it["metadata"]["generation"].as_i64() > Some(generation)
        })
        .await;
    assert_eq!(after["metadata"]["generation"].as_i64(), Some(generation + 2), "one change there, one back");
    pods.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scale_of_the_relay_is_followed_and_stays() {
    let world = World::new().await;
    world.shop().await;
    let operator = world.operator().await;
    world.until("deployments", "shop-relay", "one worker", |it| it["spec"]["replicas"] == 1).await;
    let path = format!("{}/scale", world.path("relays", "shop"));
    // As kubectl does: again where somebody wrote between the look and the write.
    eventually("the Relay is scaled", PATIENCE, || async {
        let mut scale = world.kubernetes.api("GET", &path, None).await;
        scale["spec"]["replicas"] = json!(5);
        world.kubernetes.try_api("PUT", &path, Some(scale)).await.ok()
    })
    .await;
    world.until("deployments", "shop-relay", "five workers", |it| it["spec"]["replicas"] == 5).await;
    let labelled = json!({
        "apiVersion": "queuebox.io/v1alpha1", "kind": "Relay",
        "metadata": {"name": "shop", "labels": {"team": "a"}}, "spec": shop_relay(json!({})),
    });
    world.kubernetes.api("PATCH", &world.path("relays", "shop"), Some(labelled)).await;
    operator.stop().await;
    let operator = world.operator().await;
    world.until("relays", "shop", "the label is seen", |it| it["status"]["replicas"] == 5).await;
    operator.reconciled(5).await;
    assert_eq!(world.get("relays", "shop").await.unwrap()["spec"]["replicas"], 5);
    assert_eq!(world.get("deployments", "shop-relay").await.unwrap()["spec"]["replicas"], 5);
}
