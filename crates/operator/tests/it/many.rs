//! 2,000 Relays: what they cost the operator and the API server. Run by hand, with the figures it prints, which stand in
//! docs/performance.md (`cargo test -p queuebox-operator --test it -- --ignored --nocapture two_thousand`).

use std::{collections::BTreeMap, time::Instant};

use futures::{StreamExt, stream};
use queuebox_testkit::{self as testkit, Kubernetes, Process, eventually};
use serde_json::json;

use crate::{
    rights::grant_everywhere,
    support::{PATIENCE, World, shop_relay},
};

const NAMESPACES: usize = 20;
const EACH: usize = 100;

/// Requests of the operator that ended, by verb and resource.
fn requests(kubernetes: &Kubernetes, user: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for entry in kubernetes.audit_log().iter().filter(|entry| entry["user"]["username"] == user) {
        let (verb, asked) = (entry["verb"].as_str().unwrap_or_default(), &entry["objectRef"]);
        let subresource = asked["subresource"].as_str().map(|it| format!("/{it}")).unwrap_or_default();
        // A watch is renewed every few minutes, whatever happens.
        if verb != "watch" {
            let what = format!("{verb} {}{subresource}", asked["resource"].as_str().unwrap_or_default());
            *counts.entry(what).or_default() += 1;
        }
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; prints figures"]
async fn two_thousand_relays_fit_into_200_mib() {
    let kubernetes = testkit::private_kubernetes().await;
    let mut worlds = Vec::new();
    for _ in 0..NAMESPACES {
        worlds.push(World::on(kubernetes.clone()).await);
    }
    let relays = worlds.iter().flat_map(|world| (0..EACH).map(move |index| (world, index)));
    for world in &worlds {
        world.apply("Destination", "out", json!({"http": {"url": "http://out.example/events"}})).await;
    }
    stream::iter(relays)
        .for_each_concurrent(16, |(world, index)| async move {
            world.apply("Relay", &format!("shop-{index}"), shop_relay(json!({"replicas": 0}))).await;
        })
        .await;
    grant_everywhere(&worlds[0], "operator").await;
    let config = kubernetes.kubeconfig_for(&worlds[0].namespace, "operator").await;
    let user = format!("system:serviceaccount:{}:operator", worlds[0].namespace);
    let port = testkit::free_port();
    let begun = Instant::now();
    let process =
        Process::queuebox(["operator", "--worker-image", "queuebox/queuebox:test", "--leader-election", "false"])
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .env("KUBECONFIG", config.to_str().unwrap())
            .spawn();
    let metric = |name: &'static str| async move {
        let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.ok()?.text().await.ok()?;
        let own = text.lines().filter(|line| line.starts_with(name));
        Some(own.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>())
    };
    // One namespace after the other: to list all of them all the time would cost the server more than the operator does.
    for world in &worlds {
        eventually("every Relay is ready", PATIENCE * 15, || async {
            let is_ready = |relay: &serde_json::Value| {
                crate::support::condition(relay, "Ready").is_some_and(|it| it["status"] == "True")
            };
            (world.list("relays").await.iter().filter(|relay| is_ready(relay)).count() == EACH).then_some(())
        })
        .await;
    }
    let took = begun.elapsed();
    // Several looks at everything, and not one more request.
    let looks = || async {
        let reconciles = metric("queuebox_operator_reconciles_total").await?;
        eventually("each namespace again", PATIENCE * 2, || async {
            (metric("queuebox_operator_reconciles_total").await? >= reconciles + 2.0 * 20.0).then_some(())
        })
        .await;
        Some(())
    };
    let made = eventually("nothing more to write", PATIENCE * 5, || async {
        let before = requests(&kubernetes, &user);
        looks().await?;
        (requests(&kubernetes, &user) == before).then_some(before)
    })
    .await;
    let written = metric("queuebox_operator_writes_total").await.unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let kib = |field: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    println!(
        "{} Relays ready after {took:?}, {written} writes, {} MiB now, {} MiB at most\n{made:#?}",
        NAMESPACES * EACH,
        kib("VmRSS:") >> 10,
        kib("VmHWM:") >> 10
    );
    assert!(kib("VmRSS:") < 200 << 10);
}
