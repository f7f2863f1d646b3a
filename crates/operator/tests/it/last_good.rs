//! Last good, object by object: one team's mistake is that team's only.

use serde_json::{Value, json};

use crate::support::{World, condition, hooks, shop_relay};

/// The manifests that the Deployment's pods are to run.
async fn running(world: &World) -> String {
    let deployment = world.get("deployments", "shop-relay").await.unwrap();
    let hash = deployment["spec"]["template"]["metadata"]["labels"]["queuebox.io/config"].as_str().unwrap().to_owned();
    let map = world.get("configmaps", &format!("shop-relay-{hash}")).await.unwrap();
    map["data"]["manifests.yaml"].as_str().unwrap().to_owned()
}

fn version(deployment: &Value) -> u64 {
    deployment["metadata"]["annotations"]["queuebox.io/rendering"].as_str().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_change_leaves_its_object_as_it_was_and_others_go_on() {
    let world = World::new().await;
    world.shop().await;
    let operator = world.operator().await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    // Only the checks know that the expression is none.
    let broken = json!({"http": {"url": "http://out.example/new"}, "transform": {"expression": "(1 +"}});
    world.apply("Destination", "out", broken).await;
    world.condition("destinations", "out", "Stalled", "True", "InvalidSpec").await;
    assert!(running(&world).await.contains("http://out.example/events"));
    // Another operator reads the last good state back from the cluster.
    operator.stop().await;
    let _operator = world.operator().await;
    world.apply("Source", "second", hooks("/second")).await;
    world.condition("sources", "second", "Accepted", "True", "Accepted").await;
    world.until("deployments", "shop-relay", "the new source runs", |it| version(it) == 2).await;
    let text = running(&world).await;
    assert!(text.contains("/second") && text.contains("http://out.example/events"), "{text}");
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/new"}})).await;
    world.condition("destinations", "out", "Stalled", "False", "NotStalled").await;
    world.until("deployments", "shop-relay", "the mended destination runs", |it| version(it) == 3).await;
    assert!(running(&world).await.contains("http://out.example/new"));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_sources_with_one_path_the_younger_loses() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    let older = world.condition("sources", "hooks", "Accepted", "True", "Accepted").await;
    world.a_second_after(&older).await;
    world.apply("Source", "aaa", hooks("/hooks")).await;
    let source = world.condition("sources", "aaa", "Accepted", "False", "PathConflict").await;
    assert_eq!(condition(&source, "Stalled").unwrap()["status"], "True");
    world.condition("sources", "hooks", "Accepted", "True", "Accepted").await;
    assert!(!running(&world).await.contains("name: aaa"));
    world.delete("sources", "hooks").await;
    world.condition("sources", "aaa", "Accepted", "True", "Accepted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_content_that_comes_back_counts_as_new() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    let first = world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    assert_eq!(version(&first), 1);
    world.apply("Relay", "shop", shop_relay(json!({"drainTimeout": "40s"}))).await;
    world.until("deployments", "shop-relay", "the second rendering", |it| version(it) == 2).await;
    world.apply("Relay", "shop", shop_relay(json!({}))).await;
    let third = world.until("deployments", "shop-relay", "the third rendering", |it| version(it) == 3).await;
    let hash = |it: &Value| it["spec"]["template"]["metadata"]["labels"]["queuebox.io/config"].clone();
    assert_eq!(hash(&first), hash(&third));
    let arguments = third["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    assert!(arguments.contains(&format!("3/{}", hash(&third).as_str().unwrap())), "{arguments}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_relay_that_is_invalid_is_left_out() {
    let world = World::new().await;
    world.apply("Relay", "shop", shop_relay(json!({}))).await;
    world.apply("Destination", "idle", json!({"nats": {"servers": "n:4222", "subject": "s"}})).await;
    let _operator = world.operator().await;
    world.condition("relays", "shop", "ResolvedRefs", "False", "DestinationNotFound").await;
    world.condition("destinations", "idle", "Ready", "True", "NotReferenced").await;
    assert!(world.get("deployments", "shop-relay").await.is_none());
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    world.condition("relays", "shop", "ResolvedRefs", "True", "ResolvedRefs").await;
}
