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

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_the_chart_are_enough_and_hold_no_secret() {
    let world = World::new().await;
    grant(&world, "operator").await;
    let kubeconfig = world.kubernetes.kubeconfig_for(&world.namespace, "operator").await;
    world.shop().await;
    let operator = world.operator_with(&kubeconfig, |options| options.leader_election = true).await;
    world.until("deployments", "shop-relay", "a Deployment", |_| true).await;
    world.condition("relays", "shop", "Accepted", "True", "Accepted").await;
    // What goes again, and what is told.
    world.delete("sources", "hooks").await;
    testkit::eventually("the data Service is gone", PATIENCE, || async {
        world.get("services", "shop-relay").await.is_none().then_some(())
    })
    .await;
    world.apply("Relay", "shop", shop_relay(json!({"routes": [{"topics": ["**"], "destinations": ["none"]}]}))).await;
    world.condition("relays", "shop", "Stalled", "True", "DestinationNotFound").await;
    testkit::eventually("an event says so", PATIENCE, || async {
        let events = world.list("events").await;
        events.iter().any(|event| event["reason"] == "DestinationNotFound").then_some(())
    })
    .await;
    operator.stop().await;
    let user = format!("system:serviceaccount:{}:operator", world.namespace);
    let granted = rights(&[&rules("operator-rules.yaml"), &rules("operator-lease-rules.yaml")]);
    let mut refused = BTreeSet::new();
    for entry in world.kubernetes.audit_log().iter().filter(|entry| entry["user"]["username"] == user.as_str()) {
        let asked = &entry["objectRef"];
        let subresource = asked["subresource"].as_str().map(|it| format!("/{it}")).unwrap_or_default();
        let group = asked["apiGroup"].as_str().unwrap_or_default();
        let right = format!(
            "{} {group}/{}{subresource}",
            entry["verb"].as_str().unwrap(),
            asked["resource"].as_str().unwrap_or("-")
        );
        assert!(!right.contains("secrets"), "{entry}");
        if entry["responseStatus"]["code"] == 403 || !granted.contains(&right) {
            refused.insert(right);
        }
    }
    assert!(refused.is_empty(), "{refused:?}");
}
