//! The accept and deny table on a real API server: it decides as the schemas and rules do in memory.

use queuebox_api::yaml;
use queuebox_testkit as testkit;
use serde_json::{Value, json};

use crate::support::World;

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_decides_as_the_table_says() {
    let world = World::new().await;
    let path = testkit::workspace_root().join("crates/api/tests/accept-deny.yaml");
    let table = yaml::read(&std::fs::read_to_string(path).unwrap()).remove(0).unwrap().value;
    let rows = table.as_array().unwrap();
    assert!(rows.len() >= 100, "{}", rows.len());
    let mut failures = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let (kind, decides) = (row["kind"].as_str().unwrap(), row["decides"].as_str().unwrap());
        let name = format!("row-{index}");
        let plural = format!("{}s", kind.to_lowercase());
        let object = |spec: &Value| {
            let metadata = json!({"name": name, "namespace": world.namespace});
            json!({"apiVersion": "queuebox.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})
        };
        let outcome = match row.get("old") {
            None => world.kubernetes.try_api("POST", &world.path(&plural, ""), Some(object(&row["spec"]))).await,
            Some(old) => {
                let made = world.kubernetes.api("POST", &world.path(&plural, ""), Some(object(old))).await;
                let mut changed = object(&row["spec"]);
                changed["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"].clone();
                world.kubernetes.try_api("PUT", &world.path(&plural, &name), Some(changed)).await
            }
        };
        // What only the checks know, the API server takes.
        let expected = matches!(decides, "accept" | "check");
        if outcome.is_ok() != expected {
            failures.push(format!("{kind} {}: {decides}, but {outcome:?}", row["name"]));
        }
        let by_cel =
            outcome.as_ref().err().is_some_and(|error| format!("{error:#}").contains("give ")) || outcome.is_ok();
        if decides == "cel"
            && !by_cel
            && outcome.as_ref().is_err_and(|error| !format!("{error:#}").contains("Invalid value"))
        {
            failures.push(format!("{kind} {}: not refused by a rule: {outcome:?}", row["name"]));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
