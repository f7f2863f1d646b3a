//! D35: deleting waits for nothing.

use queuebox_testkit::eventually;
use serde_json::json;

use crate::support::{PATIENCE, World, condition, hooks};

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_object_goes_at_once() {
    let world = World::new().await;
    world.shop().await;
    let broker = json!({"relayRef": {"name": "shop"}, "nats": {"servers": "192.0.2.1:4222", "stream": "s", "durable": "d"}, "topic": "t"});
    world.apply("Source", "unreachable", broker).await;
    let mut invalid = hooks("/never");
    invalid["transform"] = json!({"expression": "(1 +"});
    world.apply("Source", "never-valid", invalid).await;
    // Its Secret goes first.
    let mut signed = hooks("/signed");
    signed["http"]["auth"] = json!({"stripe": {"secretFrom": {"secretKeyRef": {"name": "stripe", "key": "whsec"}}}});
    world.apply("Source", "signed", signed).await;
    let secret = json!({"metadata": {"name": "stripe"}, "stringData": {"whsec": "one"}});
    world.kubernetes.api("POST", &world.path("secrets", ""), Some(secret)).await;
    let _operator = world.operator().await;
    world.condition("sources", "signed", "Accepted", "True", "Accepted").await;
    world.delete("secrets", "stripe").await;
    world.condition("sources", "hooks", "Accepted", "True", "Accepted").await;
    world.condition("sources", "never-valid", "Stalled", "True", "InvalidSpec").await;
    for name in ["signed", "hooks", "unreachable", "never-valid"] {
        let seen = world.get("sources", name).await.unwrap();
        assert!(seen["metadata"].get("finalizers").is_none(), "{seen}");
        world.delete("sources", name).await;
        assert!(world.get("sources", name).await.is_none(), "{name} is gone at once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_is_still_referred_to_may_go_and_its_relay_goes_on() {
    let world = World::new().await;
    world.shop().await;
    let operator = world.operator().await;
    let before = world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    world.delete("destinations", "out").await;
    assert!(world.get("destinations", "out").await.is_none());
    let relay = world.condition("relays", "shop", "Stalled", "True", "DestinationNotFound").await;
    assert_eq!(condition(&relay, "ResolvedRefs").unwrap()["status"], "False");
    operator.reconciled(3).await;
    let after = world.get("deployments", "shop-relay").await.unwrap();
    assert_eq!(before["spec"]["template"], after["spec"]["template"], "the last good state goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_goes_with_everything_in_it() {
    let world = World::new().await;
    world.shop().await;
    let _operator = world.operator().await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    let path = format!("/api/v1/namespaces/{}", world.namespace);
    world.kubernetes.api("DELETE", &path, None).await;
    eventually("the Relay and its workers are gone", PATIENCE, || async {
        let gone = world.list("relays").await.is_empty() && world.list("sources").await.is_empty();
        (gone && world.list("deployments").await.is_empty()).then_some(())
    })
    .await;
}
