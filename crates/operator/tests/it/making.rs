//! What the operator makes of a Relay, and that it makes it once.

use std::collections::{BTreeMap, BTreeSet};

use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams},
};
use queuebox_operator::{
    Settings,
    apply::cache::Watched,
    plan::{self, Memory, Observed, seen::Seen, workload::Owned},
};
use queuebox_testkit::eventually;
use serde_json::{Value, json};

use crate::support::{PATIENCE, World, client_config, condition, hooks, shop_relay};

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

/// As the operator would see this namespace; no worker is asked.
async fn observed(world: &World) -> Observed {
    let seen = async |plural: &str| world.list(plural).await.into_iter().map(Seen).collect::<Vec<Seen>>();
    let mut owned = BTreeMap::new();
    for kind in Owned::ALL {
        owned.insert(kind, seen(kind.names().3).await);
    }
    Observed {
        namespace: world.namespace.clone(),
        relays: seen("relays").await,
        sources: seen("sources").await,
        destinations: seen("destinations").await,
        owned,
        replica_sets: seen("replicasets").await,
        pods: seen("pods").await,
        ..Observed::default()
    }
}

/// What a second application of an object would change.
fn version(object: &Value) -> (Value, Value) {
    (object["metadata"]["resourceVersion"].clone(), object["metadata"]["generation"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_applied_a_second_time_changes_nothing() {
    let world = World::new().await;
    // No pod, so that no controller writes meanwhile.
    world.shop().await;
    let pod = json!({
        "resources": {"requests": {"cpu": "0.5", "memory": "128Mi"}, "limits": {"memory": "1024Mi"}},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "env": [{"name": "A", "value": "1"}],
    });
    let relay = shop_relay(json!({"replicas": 0, "pod": pod, "networkPolicy": {"enabled": true}}));
    world.apply("Relay", "shop", relay.clone()).await;
    let operator = world.operator().await;
    world.condition("relays", "shop", "Ready", "True", "Ready").await;
    operator.settled().await;
    operator.stop().await;
    let config = client_config(&world.kubernetes.kubeconfig()).await;
    let client = kube::Client::try_from(config).unwrap();
    let settings = Settings {
        worker_image: "queuebox/queuebox:test".to_owned(),
        worker_image_pull_policy: "IfNotPresent".to_owned(),
        operator_namespace: world.namespace.clone(),
        ..Settings::default()
    };
    let plan = plan::plan(&observed(&world).await, &settings, &mut Memory::default(), jiff::Timestamp::now());
    assert_eq!((plan.statuses, plan.garbage, plan.events), (vec![], vec![], vec![]));
    let mut kinds = BTreeSet::new();
    for desired in plan.desired {
        kinds.insert(desired.kind);
        let (_, _, _, plural) = desired.kind.names();
        let before = world.get(plural, &desired.name).await.unwrap();
        let resource = Watched::Owned(desired.kind).resource();
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &world.namespace, &resource);
        let params = PatchParams::apply(plan::names::MANAGER).force();
        let after = api.patch(&desired.name, &params, &Patch::Apply(&desired.value)).await.unwrap();
        assert_eq!(version(&serde_json::to_value(after).unwrap()), version(&before), "{:#}", desired.value);
    }
    assert_eq!(kinds.len(), Owned::ALL.len(), "{kinds:?}");
    // What users apply is as stable: no default of the schema is taken back.
    for (plural, kind, name, spec) in [
        ("relays", "Relay", "shop", relay),
        ("sources", "Source", "hooks", hooks("/hooks")),
        ("destinations", "Destination", "out", json!({"http": {"url": "http://out.example/events"}})),
    ] {
        let before = world.get(plural, name).await.unwrap();
        assert_eq!(version(&world.apply(kind, name, spec).await), version(&before), "{kind}");
    }
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
async fn what_the_api_server_refuses_is_told() {
    let world = World::new().await;
    world.shop().await;
    let broken = json!({"resources": {"requests": {"cpu": "much"}}});
    world.apply("Relay", "shop", shop_relay(json!({"pod": broken}))).await;
    let _operator = world.operator().await;
    let relay = world.condition("relays", "shop", "Stalled", "True", "Refused").await;
    let text = condition(&relay, "Stalled").unwrap()["message"].as_str().unwrap().to_owned();
    assert!(text.contains("quantities must match"), "{text}");
    world.apply("Relay", "shop", shop_relay(json!({}))).await;
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
