//! The rights that the chart gives are enough, none of them is too much, and no Secret is among them.

use std::collections::BTreeSet;

use queuebox_api::yaml;
use queuebox_testkit as testkit;
use serde_json::{Value, json};

use crate::support::{PATIENCE, World, shop_relay};

fn rules(file: &str) -> Value {
    let path = testkit::workspace_root().join("deploy/rbac").join(file);
    yaml::read(&std::fs::read_to_string(path).unwrap()).remove(0).unwrap().value
}

/// `verb group/resource` of each right.
fn rights(rules: &[&Value]) -> BTreeSet<String> {
    let words = |rule: &Value, field: &str| -> Vec<String> {
        rule[field].as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned()).collect()
    };
    let mut rights = BTreeSet::new();
    for rule in rules.iter().flat_map(|rules| rules.as_array().unwrap()) {
        for group in words(rule, "apiGroups") {
            for resource in words(rule, "resources") {
                rights.extend(words(rule, "verbs").iter().map(|verb| format!("{verb} {group}/{resource}")));
            }
        }
    }
    rights
}

/// Gives the rights of the files to a ServiceAccount in the namespace, as the chart does for a list of namespaces.
pub async fn grant(world: &World, account: &str) {
    let namespace = &world.namespace;
    let made = json!({"metadata": {"name": account}});
    world.kubernetes.api("POST", &world.path("serviceaccounts", ""), Some(made)).await;
    for file in ["operator-rules", "operator-lease-rules"] {
        let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
        let role = json!({"metadata": {"name": format!("{account}-{file}")}, "rules": rules(&format!("{file}.yaml"))});
        world.kubernetes.api("POST", &format!("{base}/roles"), Some(role)).await;
        let binding = json!({
            "metadata": {"name": format!("{account}-{file}")},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": format!("{account}-{file}")},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        });
        world.kubernetes.api("POST", &format!("{base}/rolebindings"), Some(binding)).await;
    }
}

/// Gives the rights of the files to a ServiceAccount of the namespace, in all namespaces.
pub async fn grant_everywhere(world: &World, account: &str) {
    let made = json!({"metadata": {"name": account}});
    world.kubernetes.api("POST", &world.path("serviceaccounts", ""), Some(made)).await;
    let base = "/apis/rbac.authorization.k8s.io/v1";
    let role = json!({"metadata": {"name": account}, "rules": rules("operator-rules.yaml")});
    world.kubernetes.api("POST", &format!("{base}/clusterroles"), Some(role)).await;
    let binding = json!({
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": world.namespace}],
    });
    world.kubernetes.api("POST", &format!("{base}/clusterrolebindings"), Some(binding)).await;
}

/// Stalls the Relay for a Destination that is not there.
async fn stall(world: &World) {
    world.apply("Relay", "shop", shop_relay(json!({"routes": [{"topics": ["**"], "destinations": ["none"]}]}))).await;
    world.condition("relays", "shop", "Stalled", "True", "DestinationNotFound").await;
}

/// As a rule names it: `verb group/resource/subresource`. An apply that makes an object needs the right to create it.
fn asked(entry: &Value) -> Vec<String> {
    let asked = &entry["objectRef"];
    let subresource = asked["subresource"].as_str().map(|it| format!("/{it}")).unwrap_or_default();
    let group = asked["apiGroup"].as_str().unwrap_or_default();
    let what = format!("{group}/{}{subresource}", asked["resource"].as_str().unwrap_or("-"));
    let verb = entry["verb"].as_str().unwrap();
    let mut rights = vec![format!("{verb} {what}")];
    if verb == "patch" && entry["responseStatus"]["code"] == 201 {
        rights.push(format!("create {what}"));
    }
    rights
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_the_chart_are_enough_and_each_is_used_and_none_is_a_secrets() {
    let world = World::new().await;
    grant(&world, "operator").await;
    let kubeconfig = world.kubernetes.kubeconfig_for(&world.namespace, "operator").await;
    world.shop().await;
    // No pod: its ReplicaSets go as soon as there are newer ones, and the ConfigMaps with them.
    let usual = |changes: Value| {
        let mut relay = shop_relay(json!({"replicas": 0, "networkPolicy": {"enabled": true}}));
        changes.as_object().unwrap().iter().for_each(|(name, value)| relay[name] = value.clone());
        relay
    };
    world.apply("Relay", "shop", usual(json!({}))).await;
    let operator = world.operator_with(&kubeconfig, |options| options.leader_election = true).await;
    let first = world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    world.condition("relays", "shop", "Ready", "True", "Ready").await;
    world.condition("destinations", "out", "Ready", "True", "Ready").await;
    world.condition("sources", "hooks", "Ready", "True", "Ready").await;
    // One of each kind goes again.
    world.delete("sources", "hooks").await;
    let bare = json!({
        "disruption": {"enabled": false}, "networkPolicy": {"enabled": false},
        "pod": {"serviceAccountName": "default"},
    });
    world.apply("Relay", "shop", usual(bare)).await;
    for plural in ["services", "poddisruptionbudgets", "networkpolicies", "serviceaccounts"] {
        testkit::eventually(&format!("one of {plural} is gone"), PATIENCE, || async {
            world.get(plural, "shop-relay").await.is_none().then_some(())
        })
        .await;
    }
    let hash = first["spec"]["template"]["metadata"]["labels"]["queuebox.io/config"].as_str().unwrap();
    for seconds in 31..36 {
        world.apply("Relay", "shop", usual(json!({"drainTimeout": format!("{seconds}s")}))).await;
        let grace = json!(seconds + 15);
        world
            .until("deployments", "shop-relay", "it is rolled out", |it| {
                it["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == grace
                    && it["status"]["observedGeneration"] == it["metadata"]["generation"]
            })
            .await;
    }
    testkit::eventually("the first ConfigMap is gone", PATIENCE, || async {
        world.get("configmaps", &format!("shop-relay-{hash}")).await.is_none().then_some(())
    })
    .await;
    // What is told, and told once more: an event that comes again is counted in the first.
    for _ in 0..2 {
        stall(&world).await;
        world.apply("Relay", "shop", usual(json!({}))).await;
        world.condition("relays", "shop", "Stalled", "False", "NotStalled").await;
    }
    testkit::eventually("an event that was told twice", PATIENCE, || async {
        let events = world.list("events").await;
        events
            .iter()
            .any(|event| event["reason"] == "DestinationNotFound" && event["series"]["count"].as_i64() >= Some(2))
            .then_some(())
    })
    .await;
    operator.stop().await;
    let user = format!("system:serviceaccount:{}:operator", world.namespace);
    let granted = rights(&[&rules("operator-rules.yaml"), &rules("operator-lease-rules.yaml")]);
    let (mut used, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for entry in world.kubernetes.audit_log().iter().filter(|entry| entry["user"]["username"] == user.as_str()) {
        let rights = asked(entry);
        assert!(!rights[0].contains("secrets"), "{entry}");
        if entry["responseStatus"]["code"] == 403 || !granted.contains(&rights[0]) {
            refused.insert(rights[0].clone());
        }
        used.extend(rights);
    }
    assert!(refused.is_empty(), "{refused:?}");
    let unused: BTreeSet<&String> = granted.difference(&used).collect();
    assert!(unused.is_empty(), "granted for nothing: {unused:?}");
}
