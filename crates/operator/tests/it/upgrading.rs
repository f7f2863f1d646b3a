//! An upgrade of the operator replaces the workers of a few Relays at a time.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::{
    scaling::keep_pods_running,
    support::{World, shop_relay},
};

const RELAYS: usize = 8;
const AT_ONCE: usize = 5;

fn image(deployment: &Value) -> &str {
    deployment["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap_or_default()
}

async fn with_image(world: &World, wanted: &str) -> Vec<Value> {
    world.list("deployments").await.into_iter().filter(|it| image(it).ends_with(wanted)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_replaced_a_few_relays_at_a_time() {
    let world = Arc::new(World::new().await);
    world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    for index in 0..RELAYS {
        world.apply("Relay", &format!("shop-{index}"), shop_relay(json!({}))).await;
    }
    let operator = world.operator().await;
    let pods = keep_pods_running(world.clone());
    for index in 0..RELAYS {
        world.condition("relays", &format!("shop-{index}"), "Ready", "True", "Ready").await;
    }
    operator.stop().await;
    // From now on no new pod becomes ready.
    pods.abort();
    let config = world.kubernetes.kubeconfig();
    let operator =
        world.operator_with(&config, |options| options.settings.worker_image = "queuebox/queuebox:next".into()).await;
    operator.settled().await;
    assert_eq!(with_image(&world, ":next").await.len(), AT_ONCE);
    // One that waits is scaled with the workers that it has, and one that its team changes waits no more.
    let waiting: Vec<String> = with_image(&world, ":test")
        .await
        .iter()
        .map(|it| it["metadata"]["name"].as_str().unwrap().trim_end_matches("-relay").to_owned())
        .collect();
    let deployment = |index: usize| format!("{}-relay", waiting[index]);
    world.apply("Relay", &waiting[0], shop_relay(json!({"replicas": 2}))).await;
    let scaled = world.until("deployments", &deployment(0), "it is scaled", |it| it["spec"]["replicas"] == 2).await;
    assert!(image(&scaled).ends_with(":test"), "{scaled:#}");
    world.apply("Relay", &waiting[1], shop_relay(json!({"drainTimeout": "40s"}))).await;
    world.until("deployments", &deployment(1), "its own change rolls", |it| image(it).ends_with(":next")).await;
    assert_eq!(with_image(&world, ":next").await.len(), AT_ONCE + 1);
    // Turns end with their rollouts.
    let pods = keep_pods_running(world.clone());
    for index in 0..RELAYS {
        let name = format!("shop-{index}-relay");
        world.until("deployments", &name, "everybody has the next image", |it| image(it).ends_with(":next")).await;
    }
    operator.settled().await;
    pods.abort();
}
