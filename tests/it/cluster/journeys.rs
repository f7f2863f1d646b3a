//! What happens to workers, database and manifests while messages flow.

use std::time::Instant;

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use super::{
    node::{PATIENCE, has_condition},
    team::{ROLE, Team},
};

/// Repeats that the contract allows when a worker is killed: what it had in flight at its destination and had not settled.
const IN_FLIGHT_MAX: usize = 64;

#[tokio::test]
async fn scaling_from_1_to_4_and_back_under_load() {
    let team = Team::new("scale 1 to 4 to 1 under load").await;
    team.start(json!({"replicas": 1})).await;
    let prober = team.probe().await;
    prober.delivered(200).await;
    // As HPA and KEDA do it: through the scale of the Relay.
    team.node.kubectl(&["scale", "-n", &team.namespace, "relay/shop", "--replicas=4"]).await;
    team.workers(4).await;
    prober.delivered(400).await;
    team.node.kubectl(&["scale", "-n", &team.namespace, "relay/shop", "--replicas=1"]).await;
    team.workers(1).await;
    prober.delivered(200).await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn killed_workers() {
    let team = Team::new("kill worker pods").await;
    team.start(json!({"replicas": 2, "outbox": {"claimTimeout": "10s"}})).await;
    let prober = team.probe().await;
    let rounds = 3;
    for _ in 0..rounds {
        prober.delivered(150).await;
        let kill =
            ["delete", "pods", "-n", &team.namespace, "-l", "queuebox.io/relay=shop", "--grace-period=0", "--force"];
        team.node.kubectl(&kill).await;
        team.workers(2).await;
    }
    prober.delivered(150).await;
    team.finish(prober, rounds * 2 * IN_FLIGHT_MAX).await;
}

#[tokio::test]
async fn killed_operator() {
    let team = Team::new("kill the operator").await;
    team.start(json!({"replicas": 1})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    let selector = "app.kubernetes.io/component=operator";
    let system = super::node::SYSTEM;
    team.node.kubectl(&["delete", "pods", "-n", system, "-l", selector, "--grace-period=0", "--force"]).await;
    // The workers do not notice; what is changed meanwhile is done by the next one.
    team.apply(&[team.relay(json!({"replicas": 2}))]).await;
    prober.delivered(200).await;
    team.workers(2).await;
    team.ready().await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn restarted_database() {
    let team = Team::new("restart the database").await;
    team.start(json!({"replicas": 2})).await;
    let prober = team.probe().await;
    for _ in 0..2 {
        prober.delivered(150).await;
        team.postgres.stop().await;
        team.postgres.start().await;
    }
    prober.delivered(300).await;
    for pod in team.pods().await {
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        assert_eq!(*restarts, 0, "a worker must outlive its database");
    }
    // A publish may be under way while its mark cannot be written.
    team.finish(prober, 2 * 2 * IN_FLIGHT_MAX).await;
}

mod d36_secret_rotation {
    use super::*;

    /// Everything that a rollout would change.
    async fn rollout(team: &Team) -> (Vec<String>, String) {
        let mut pods: Vec<String> = team.pods().await.iter().map(|pod| pod["metadata"]["uid"].to_string()).collect();
        pods.sort();
        let deployment = team.node.get_object(&team.namespace, "deployment/shop-relay").await;
        (pods, deployment["spec"]["template"].to_string())
    }

    #[tokio::test]
    async fn a_new_password_is_used_without_a_rollout() {
        let team = Team::new("rotate the database password (D36)").await;
        team.start(json!({"replicas": 2})).await;
        // Those of the first rendering, before the Source was seen, are gone.
        team.workers(2).await;
        let before = rollout(&team).await;
        let prober = team.probe().await;
        prober.delivered(150).await;

        team.postgres.psql("postgres", &format!("ALTER ROLE {ROLE} PASSWORD 'two'")).await;
        team.apply(&[team.secret("two")]).await;
        // Connections that are open stay open; these have to log in anew, with what the Secret says by then.
        let end = format!("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{ROLE}'");
        team.postgres.psql("postgres", &end).await;
        let cut = Instant::now();
        prober.delivered(100).await;
        eprintln!("the new password was in use after {:.1} s", cut.elapsed().as_secs_f64());

        // What is not the password's change: another key, a label, the same Secret made anew, many changes.
        let mut secret = team.secret("two");
        secret["stringData"]["unrelated"] = json!("b");
        team.apply(&[secret.clone()]).await;
        team.node.kubectl(&["label", "-n", &team.namespace, "secret/shop-db", "rotated=yes"]).await;
        team.node.kubectl(&["delete", "-n", &team.namespace, "secret/shop-db"]).await;
        prober.delivered(50).await;
        for round in 0..5 {
            secret["stringData"]["unrelated"] = json!(format!("c{round}"));
            team.apply(&[secret.clone()]).await;
            prober.delivered(20).await;
        }
        assert_eq!(rollout(&team).await, before, "no change of a Secret may cause a rollout");
        let deployment = team.node.get_object(&team.namespace, "deployment/shop-relay").await;
        assert!(!deployment.to_string().contains("two"), "{deployment:#}");
        team.finish(prober, 2 * IN_FLIGHT_MAX).await;
    }

    #[tokio::test]
    async fn a_missing_secret_is_told_and_does_no_harm() {
        let team = Team::new("missing Secret, then given (D36)").await;
        let manifests = team.manifests(json!({"replicas": 1}));
        // Without the Secret.
        team.apply(&manifests[1..]).await;
        team.node.wait_condition(&team.namespace, "relay/shop", "ResolvedRefs", "False").await;
        team.apply(&manifests[..1]).await;
        team.ready().await;
        let prober = team.probe().await;
        prober.delivered(100).await;
        team.finish(prober, 0).await;
    }
}

#[tokio::test]
async fn a_bad_image_and_back() {
    let team = Team::new("bad image and back").await;
    team.start(json!({"replicas": 2})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    let before: Vec<Value> = team.pods().await;
    team.apply(&[team.relay(json!({"replicas": 2, "pod": {"image": "127.0.0.1:9/queuebox:there-is-none"}}))]).await;
    testkit::eventually("a pod that cannot pull its image", PATIENCE, || async {
        let waits = |pod: &Value| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ErrImagePull"
                || pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"
        };
        team.pods().await.iter().any(waits).then_some(())
    })
    .await;
    // The old ones serve on.
    prober.delivered(200).await;
    let names: Vec<Value> = team.pods().await.iter().map(|pod| pod["metadata"]["name"].clone()).collect();
    assert!(before.iter().all(|pod| names.contains(&pod["metadata"]["name"])), "{names:?}");
    assert!(!has_condition(&team.node.get_object(&team.namespace, "relay/shop").await, "Ready", "True"));
    team.node
        .kubectl(&[
            "patch",
            "-n",
            &team.namespace,
            "relay/shop",
            "--type=json",
            "-p",
            r#"[{"op": "remove", "path": "/spec/pod"}]"#,
        ])
        .await;
    team.workers(2).await;
    team.ready().await;
    prober.delivered(100).await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn one_teams_bad_manifest_beside_anothers_good_one() {
    let team = Team::new("a bad manifest beside good ones").await;
    team.start(json!({"replicas": 1})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    // New and wrong: a Relay of another team in the same namespace that names a Destination which does not exist.
    let mut other = team.relay(json!({"routes": [{"topics": ["**"], "destinations": ["nowhere"]}]}));
    other["metadata"]["name"] = json!("other");
    // Changed and wrong: the good Relay's own Destination, in a way that only `check` sees.
    let mut broken = team.destination("receiver", "/events");
    broken["spec"]["transform"] = json!({"expression": "$not ((a JSONata"});
    team.apply(&[other, broken]).await;
    team.node.wait_condition(&team.namespace, "relay/other", "Stalled", "True").await;
    team.node.wait_condition(&team.namespace, "destination/receiver", "Accepted", "False").await;
    // The good Relay goes on with the last good state.
    prober.delivered(200).await;
    team.node.wait_condition(&team.namespace, "relay/shop", "Delivering", "True").await;
    // Put right.
    team.node
        .kubectl(&[
            "patch",
            "-n",
            &team.namespace,
            "destination/receiver",
            "--type=json",
            "-p",
            r#"[{"op": "remove", "path": "/spec/transform"}]"#,
        ])
        .await;
    team.node.wait_condition(&team.namespace, "destination/receiver", "Ready", "True").await;
    team.ready().await;
    prober.delivered(100).await;
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn a_changed_route() {
    let team = Team::new("change a route").await;
    team.start(json!({"replicas": 2})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    let routes = json!([
        {"topics": ["hook.*"], "destinations": ["receiver"]},
        {"topics": ["order.*"], "destinations": ["second"]},
    ]);
    team.apply(&[team.destination("second", "/second"), team.relay(json!({"replicas": 2, "routes": routes}))]).await;
    team.receiver
        .wait_until("rows at the second destination", PATIENCE, |requests| {
            requests.iter().any(|request| request.path() == "/second")
        })
        .await;
    team.ready().await;
    team.workers(2).await;
    prober.delivered(200).await;
    let requests = team.receiver.requests();
    let late = &requests[requests.len() - 50..];
    assert!(late.iter().all(|it| (it.path() == "/second") == it.text().contains("row-")), "the new route is followed");
    team.finish(prober, 0).await;
}

#[tokio::test]
async fn a_destination_that_goes_down_and_comes_back() {
    let team = Team::new("destination down and up").await;
    team.start(json!({"replicas": 1})).await;
    let prober = team.probe().await;
    prober.delivered(100).await;
    team.receiver.stop().await;
    team.node.wait_condition(&team.namespace, "destination/receiver", "Delivering", "False").await;
    let relay = team.node.get_object(&team.namespace, "relay/shop").await;
    assert!(has_condition(&relay, "Ready", "True"), "a receiver that is away does not make the Relay unready");
    team.receiver.restart().await;
    prober.delivered(200).await;
    team.node.wait_condition(&team.namespace, "destination/receiver", "Delivering", "True").await;
    // An answer on its way when the receiver was stopped is lost, and so its message is sent again.
    team.finish(prober, IN_FLIGHT_MAX).await;
}
