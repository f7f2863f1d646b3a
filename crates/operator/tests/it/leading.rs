//! Several operators, one leader.

use queuebox_testkit::eventually;
use serde_json::{Value, json};

use crate::support::{Operator, PATIENCE, World, shop_relay};

pub async fn holder(world: &World) -> String {
    let lease = world.get("leases", "queuebox-operator").await;
    lease.and_then(|it| it["spec"]["holderIdentity"].as_str().map(str::to_owned)).unwrap_or_default()
}

async fn replica(world: &World, identity: &str) -> Operator {
    let kubeconfig = world.kubernetes.kubeconfig();
    world
        .operator_with(&kubeconfig, |options| {
            options.leader_election = true;
            options.identity = identity.to_owned();
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stops_hands_over_at_once() {
    let world = World::new().await;
    world.shop().await;
    let first = replica(&world, "first").await;
    eventually("the first one leads", PATIENCE, || async { (holder(&world).await == "first").then_some(()) }).await;
    let second = replica(&world, "second").await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    // Whoever stands by is ready, and answers.
    eventually("the second one is ready", PATIENCE, || async { (second.get("/readyz").await.0 == 200).then_some(()) })
        .await;
    first.stop().await;
    assert_ne!(holder(&world).await, "first", "it was given back before the process ended");
    eventually("the second one leads", PATIENCE, || async { (holder(&world).await == "second").then_some(()) }).await;
    world.apply("Relay", "shop", shop_relay(json!({"drainTimeout": "41s"}))).await;
    world
        .until("deployments", "shop-relay", "the second one works", |it| {
            it["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 56
        })
        .await;
    let transitions = world.get("leases", "queuebox-operator").await.unwrap()["spec"]["leaseTransitions"].clone();
    assert_eq!(transitions, json!(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_dies_is_followed_when_its_lease_ends() {
    let world = World::new().await;
    world.shop().await;
    let first = replica(&world, "first").await;
    eventually("the first one leads", PATIENCE, || async { (holder(&world).await == "first").then_some(()) }).await;
    let before = world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    first.kill();
    let _second = replica(&world, "second").await;
    eventually("the second one leads", PATIENCE, || async { (holder(&world).await == "second").then_some(()) }).await;
    world.apply("Relay", "shop", shop_relay(json!({"replicas": 2}))).await;
    let after = world.until("deployments", "shop-relay", "it works", |it| it["spec"]["replicas"] == 2).await;
    let template = |it: &Value| it["spec"]["template"].clone();
    assert_eq!(template(&before), template(&after), "a new leader rolls nothing");
}
