//! What happens to the installation itself: chart, operator, CRDs.

use std::time::Instant;

use queuebox_testkit as testkit;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;

use super::{
    node::{Node, PATIENCE, SYSTEM},
    team::Team,
};
use crate::chart;

/// A cluster that never saw QueueBox.
pub async fn bare(node: &Node) {
    let _ = node.try_helm(&["uninstall", "queuebox", "--namespace", SYSTEM, "--wait"]).await;
    let crds = ["relays.queuebox.io", "destinations.queuebox.io", "sources.queuebox.io"];
    let mut delete = vec!["delete", "crd", "--ignore-not-found", "--wait"];
    delete.extend(crds);
    node.kubectl(&delete).await;
}

#[tokio::test]
async fn install_to_the_first_message() {
    let node = Node::get().await;
    bare(&node).await;
    let team = Team::on(node, "install to first message").await;
    let begun = Instant::now();
    team.node.operator().await;
    let installed = begun.elapsed();
    team.start(json!({})).await;
    let prober = team.probe().await;
    prober.delivered(1).await;
    eprintln!("helm install {:.1} s, first message {:.1} s", installed.as_secs_f64(), begun.elapsed().as_secs_f64());
    // What a person sees, and what the chart's own test says.
    let seen = team.node.kubectl(&["get", "-n", &team.namespace, "queuebox"]).await;
    assert!(seen.contains("relay.queuebox.io/shop") && seen.contains("destination.queuebox.io/receiver"), "{seen}");
    team.node.helm(&["test", "queuebox", "--namespace", SYSTEM]).await;
    prober.delivered(100).await;
    team.finish(prober, 0).await;
}

/// As everyone else builds it: with the compilation in the Dockerfile. Without optimisation, which is not what is looked at here.
#[tokio::test]
async fn the_image_as_the_dockerfile_compiles_it() {
    let team = Team::new("image compiled by the Dockerfile").await;
    let tag = format!("{}-compiled", team.node.tag);
    let begun = Instant::now();
    let archive = tempfile::NamedTempFile::new().unwrap();
    team.node.image(archive.path(), &[format!("queuebox/queuebox:{tag}")], None).await;
    eprintln!("built in {:.0} s", begun.elapsed().as_secs_f64());
    team.start(json!({"pod": {"image": format!("queuebox/queuebox:{tag}")}})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn upgraded_chart() {
    let team = Team::new("upgrade the chart").await;
    team.start(json!({"replicas": 2})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    let next = format!("{}-next", team.node.tag);
    team.node.release(SYSTEM, &next, &[]).await;
    let image = format!("queuebox/queuebox:{next}");
    testkit::eventually("every worker is of the next version", PATIENCE, || async {
        let pods = team.pods().await;
        let is_new = |pod: &Value| pod["spec"]["containers"][0]["image"].as_str().unwrap().ends_with(&image);
        (pods.len() == 2 && pods.iter().all(is_new)).then_some(())
    })
    .await;
    team.workers(2).await;
    team.ready().await;
    prober.delivered(100).await;
    // The same once more changes nothing.
    let before = team.node.get_object(&team.namespace, "deployment/shop-relay").await;
    team.node.release(SYSTEM, &next, &[]).await;
    prober.delivered(100).await;
    let after = team.node.get_object(&team.namespace, "deployment/shop-relay").await;
    assert_eq!(
        before["metadata"]["generation"], after["metadata"]["generation"],
        "an upgrade that changes nothing rolls nothing"
    );
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn namespaced_install() {
    let node = Node::get().await;
    node.operator().await;
    node.helm(&["uninstall", "queuebox", "--namespace", SYSTEM, "--wait"]).await;
    let team = Team::on(node, "namespaced install").await;
    let other = testkit::unique("other-");
    team.node.kubectl(&["create", "namespace", &other]).await;
    let watch = format!("watch.namespaces={{{}}}", team.namespace);
    let values = ["--set", watch.as_str(), "--set", "crds.enabled=false", "--set", "rbac.aggregateRoles=false"];
    team.node.release(&team.namespace, &team.node.tag, &values).await;
    let account = format!("system:serviceaccount:{}:queuebox", team.namespace);
    for (verb, what, place, may) in [
        ("list", "relays.queuebox.io", team.namespace.as_str(), true),
        ("list", "relays.queuebox.io", &other, false),
        ("get", "secrets", &team.namespace, false),
    ] {
        let answer = team.node.try_kubectl(&["auth", "can-i", verb, what, "-n", place, "--as", &account]).await;
        assert_eq!(answer.is_ok(), may, "{verb} {what} in {place}: {answer:?}");
    }
    team.start(json!({})).await;
    // A Relay elsewhere is nobody's.
    team.node.apply(&other, &team.manifests(json!({}))).await;
    let prober = team.probe().await;
    prober.delivered(200).await;
    let strange = team.node.get_object(&other, "relay/shop").await;
    assert_eq!(strange["status"]["observedGeneration"], -1, "{strange:#}");
    team.node.kubectl(&["delete", "namespace", &other, "--wait=false"]).await;
    team.node.helm(&["uninstall", "queuebox", "--namespace", &team.namespace, "--wait"]).await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn uninstall_keeps_crds_and_data() {
    let team = Team::new("uninstall, and install again").await;
    team.start(json!({"replicas": 1})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    let pods = team.pods().await;
    team.node.helm(&["uninstall", "queuebox", "--namespace", SYSTEM, "--wait"]).await;
    let crds = team.node.kubectl(&["get", "crd", "-o", "name"]).await;
    for kind in ["relays", "destinations", "sources"] {
        assert!(crds.contains(&format!("{kind}.queuebox.io")), "{crds}");
    }
    // The workers do not need the operator.
    prober.delivered(200).await;
    let same = |before: &[Value], after: &[Value]| before[0]["metadata"]["uid"] == after[0]["metadata"]["uid"];
    assert!(same(&pods, &team.pods().await));
    team.node.operator().await;
    team.ready().await;
    prober.delivered(100).await;
    assert!(same(&pods, &team.pods().await), "a new installation of the same version rolls nothing");
    team.judge(prober, 0).await;
    // Nor does the removal of everything that was applied touch data (D35).
    let stored = team.db.count("SELECT count(*) FROM outbox").await;
    assert!(stored > 0);
    for what in ["source/hooks", "destination/receiver", "relay/shop"] {
        team.node.kubectl(&["delete", "-n", &team.namespace, what]).await;
    }
    testkit::eventually("no worker is left", PATIENCE, || async { team.pods().await.is_empty().then_some(()) }).await;
    assert_eq!(team.db.count("SELECT count(*) FROM outbox").await, stored);
    team.leave().await;
}

#[tokio::test]
async fn the_kubectl_plugin() {
    let team = Team::new("kubectl queuebox").await;
    team.start(json!({"replicas": 1, "routes": [{"topics": ["order.*", "hook.*"], "destinations": ["receiver"]}]}))
        .await;
    let prober = team.probe().await;
    prober.delivered(50).await;
    let config = team.node.config();
    let kubectl = chart::tool("kubectl");
    let path = format!(
        "{}:{}",
        std::path::Path::new(kubectl.get_program()).parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let plugin = |arguments: &[&str]| {
        let script = testkit::workspace_root().join("deploy/kubectl/kubectl-queuebox");
        let mut command = std::process::Command::new(script);
        command.env("PATH", &path).env("KUBECONFIG", &config).args(["-n", &team.namespace]).args(arguments);
        async move { super::node::output(command, None).await }
    };
    let status = plugin(&["status", "shop"]).await.unwrap();
    assert!(status.contains("Database postgres") && status.contains("| destination | receiver | http"), "{status}");
    let explained = plugin(&["explain", "shop"]).await.unwrap();
    assert!(explained.contains("Nothing keeps it from delivering"), "{explained}");
    let logs = plugin(&["logs", "shop"]).await.unwrap();
    assert!(logs.contains("Ready."), "{logs}");

    // Deliveries as they happen, until it is stopped.
    let script = testkit::workspace_root().join("deploy/kubectl/kubectl-queuebox");
    let mut followed = tokio::process::Command::new(script)
        .env("PATH", &path)
        .env("KUBECONFIG", &config)
        .args(["-n", &team.namespace, "tail", "shop"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(followed.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert!(line.contains(" sent ") && line.contains(" -> receiver "), "{line}");
    let pid = followed.id().unwrap().to_string();
    tokio::process::Command::new("kill").arg(pid).status().await.unwrap();
    followed.wait().await.unwrap();
    // What it started holds the other end.
    while tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().is_some() {}

    // A message that no route takes is dead, is listed, and goes when it is told to.
    team.db
        .execute("INSERT INTO outbox (topic, payload) VALUES ('nobody.wants', '{\"key\": \"dead\", \"n\": 1}')")
        .await;
    let dead = testkit::eventually("a dead letter in the list", PATIENCE, || async {
        let list = plugin(&["dead", "shop"]).await.unwrap();
        list.contains("no_route").then_some(list)
    })
    .await;
    assert!(dead.contains("no_route"), "{dead}");
    let tried = plugin(&["replay", "shop", "--code", "no_route", "--dry-run"]).await.unwrap();
    assert!(tried.starts_with("1 row(s)"), "{tried}");
    let gone = plugin(&["dead", "shop", "discard", "--code", "no_route"]).await.unwrap();
    assert!(gone.starts_with("1 row(s) discarded"), "{gone}");

    plugin(&["pause", "shop"]).await.unwrap();
    team.node.wait_condition(&team.namespace, "relay/shop", "Paused", "True").await;
    testkit::eventually("no worker is left", PATIENCE, || async { team.pods().await.is_empty().then_some(()) }).await;
    plugin(&["resume", "shop"]).await.unwrap();
    team.ready().await;
    prober.delivered(50).await;
    team.finish(prober, 0).await;
}
