//! What the operator makes of a Relay, and that it makes it once.

use queuebox_testkit::eventually;
use serde_json::{Value, json};

use crate::support::{PATIENCE, World, condition, shop_relay};

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_becomes_workers_with_everything_they_need() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    let deployment = world.until("deployments", "shop-relay", "a Deployment", |it| it["status"]["replicas"] == 1).await;
    let template = &deployment["spec"]["template"];
    assert_eq!(template["spec"]["automountServiceAccountToken"], false);
    let container = &template["spec"]["containers"][0];
    assert_eq!(container["image"], "queuebox/queuebox:test");
    let hash = template["metadata"]["labels"]["queuebox.io/config"].as_str().unwrap();
    let map = world.get("configmaps", &format!("shop-relay-{hash}")).await.unwrap();
    assert_eq!(map["immutable"], true);
    let text = map["data"]["manifests.yaml"].as_str().unwrap();
    for word in ["kind: Relay", "kind: Destination", "kind: Source"] {
        assert!(text.contains(word), "{text}");
    }
    let management = world.get("services", "shop-relay-management").await.unwrap();
    assert_eq!(management["spec"]["clusterIP"], "None");
    assert!(world.get("services", "shop-relay").await.is_some(), "there is an HTTP source");
    assert!(world.get("serviceaccounts", "shop-relay").await.is_some());
    assert!(world.get("poddisruptionbudgets", "shop-relay").await.is_some());
    world.condition("relays", "shop", "Accepted", "True", "Accepted").await;
    let relay = world.condition("relays", "shop", "Ready", "False", "RollingOut").await;
    assert_eq!(relay["status"]["observedGeneration"], 1);
    assert_eq!(relay["status"]["selector"], "queuebox.io/relay=shop");
    world.condition("destinations", "out", "Accepted", "True", "Accepted").await;
    world.condition("sources", "hooks", "Accepted", "True", "Accepted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_is_put_back() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    world.until("deployments", "shop-relay", "a Deployment", |it| it["status"]["replicas"] == 1).await;
    let drifted = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "shop-relay"},
        "spec": {"template": {"spec": {"enableServiceLinks": true}}},
    });
    world.kubernetes.api("PATCH", &world.path("deployments", "shop-relay"), Some(drifted)).await;
    world
        .until("deployments", "shop-relay", "the field is put back", |it| {
            it["spec"]["template"]["spec"]["enableServiceLinks"] == false
        })
        .await;
    for (plural, name) in [("services", "shop-relay"), ("poddisruptionbudgets", "shop-relay")] {
        let before = world.get(plural, name).await.unwrap()["metadata"]["uid"].clone();
        world.delete(plural, name).await;
        world.until(plural, name, "it is made again", |it| it["metadata"]["uid"] != before).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_object_of_the_same_name_is_left_alone() {
    let world = World::new().await;
    let foreign = json!({"metadata": {"name": "shop-relay"}});
    world.kubernetes.api("POST", &world.path("serviceaccounts", ""), Some(foreign)).await;
    world.shop().await;
    let _operator = world.operator().await;
    let relay = world.condition("relays", "shop", "Stalled", "True", "NameTaken").await;
    assert!(condition(&relay, "Stalled").unwrap()["message"].as_str().unwrap().contains("ServiceAccount shop-relay"));
    assert!(world.get("deployments", "shop-relay").await.is_none());
    world.delete("serviceaccounts", "shop-relay").await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    world.condition("relays", "shop", "Stalled", "False", "NotStalled").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wanted_no_more_goes() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    world.until("services", "shop-relay", "the data Service", |_| true).await;
    world.delete("sources", "hooks").await;
    eventually("the data Service is gone", PATIENCE, || async {
        world.get("services", "shop-relay").await.is_none().then_some(())
    })
    .await;
    world.apply("Relay", "shop", shop_relay(json!({"disruption": {"enabled": false}}))).await;
    eventually("the budget is gone", PATIENCE, || async {
        world.get("poddisruptionbudgets", "shop-relay").await.is_none().then_some(())
    })
    .await;
    let maps = |list: Vec<Value>| {
        list.into_iter().filter(|it| it["metadata"]["labels"]["queuebox.io/relay"] == "shop").count()
    };
    assert!(maps(world.list("configmaps").await) <= 2);
    world.delete("relays", "shop").await;
    for plural in ["deployments", "services", "serviceaccounts", "configmaps"] {
        eventually("everything is collected", PATIENCE, || async {
            let left = world.list(plural).await;
            (!left.iter().any(|it| it["metadata"]["labels"]["queuebox.io/relay"] == "shop")).then_some(())
        })
        .await;
    }
}
