//! Section O: health and metrics.

use std::collections::BTreeSet;

use queuebox_testkit::{self as testkit, Answer, ProxyMode};
use serde_json::{Value, json};

use crate::{
    brokers::{Broker, BrokerKind, on_every_broker},
    scenarios::start::behind_a_proxy,
    support::{Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, on_postgres},
};

const MESSAGES: &str = "queuebox_outbox_messages_total";

/// Status and components of `/health/ready`.
async fn components(worker: &Worker) -> (u16, Value) {
    let answer = worker.get("/health/ready").await;
    (answer.status, answer.json()["components"].clone())
}

fn is_up(components: &Value, name: &str) -> bool {
    components[name]["status"] == "up"
}

mod health_components {
    use super::*;

    /// A database that does not answer: the process is alive, pods stay ready, and who asks for more is told within the bound of a
    /// check.
    #[tokio::test]
    async fn database_that_is_silent() {
        let (world, proxy) = behind_a_proxy().await;
        let world = world.relay(json!({ "retention": { "outbox": { "maxAge": "1d" } } }));
        let worker = world.start().await;
        testkit::eventually("all of it is up", PATIENCE, || async {
            let (status, components) = components(&worker).await;
            let names = ["database", "outbox-poller", "inbox-relay", "retention-service", "outbox-capture"];
            let all_up = names.iter().all(|name| is_up(&components, name));
            (status == 200 && all_up && components.as_object().unwrap().len() == names.len()).then_some(())
        })
        .await;
        proxy.set(ProxyMode::Stall);
        let (status, down) = testkit::eventually("the database is down", PATIENCE, || async {
            let found = components(&worker).await;
            (!is_up(&found.1, "database")).then_some(found)
        })
        .await;
        assert_eq!(status, 503, "{down}");
        assert!(!down["database"]["detail"].as_str().unwrap().is_empty(), "{down}");
        for path in ["/livez", "/health/live", "/readyz", "/startupz"] {
            assert_eq!(worker.get(path).await.status, 200, "{path}");
        }
        proxy.set(ProxyMode::Pass);
        testkit::eventually("healthy again", PATIENCE, || async { (components(&worker).await.0 == 200).then_some(()) })
            .await;
        world.finish().await;
    }

    /// All of it is on the management port, nothing of it on the other one.
    #[tokio::test]
    async fn ports_are_apart() {
        let world = World::on(Kind::Sqlite).await;
        let worker = world.start().await;
        let paths = ["/livez", "/readyz", "/startupz", "/health", "/health/live", "/health/ready"];
        for path in paths.iter().chain(&["/metrics", "/status", "/admin/outbox"]) {
            assert_eq!(worker.get(path).await.status, 200, "{path}");
            assert_eq!(reqwest::get(worker.url(path)).await.unwrap().status(), 404, "{path} on the data port");
        }
        world.finish().await;
    }

    /// A broker that goes away takes its source and its destination with it, and says so.
    async fn broker(kind: BrokerKind) {
        let broker = Broker::shared(kind).await;
        let (line, (behind, way)) = (broker.line().await, broker.behind_a_proxy().await);
        let through = line.through(&behind);
        let world = World::on(Kind::Sqlite)
            .await
            .source("events", through.as_source())
            .destination("bus", through.as_destination())
            .routes(&[("out", &["bus"]), ("**", &["receiver"])]);
        let worker = world.start().await;
        let source = match kind {
            BrokerKind::RabbitMq => "rabbitmq.events",
            BrokerKind::Kafka => "kafka.events",
            BrokerKind::Nats => "nats.events",
        };
        let both_are = |components: &Value, up: bool| {
            [source, "destination.bus"].iter().all(|name| components[name].is_object() && is_up(components, name) == up)
        };
        testkit::eventually("both are up", PATIENCE, || async {
            let (status, components) = components(&worker).await;
            (status == 200 && both_are(&components, true)).then_some(())
        })
        .await;
        way.set(ProxyMode::Refuse);
        way.cut();
        // A destination is missed by whoever needs it.
        world.db.insert(OutboxRow::new("out", 1)).await;
        testkit::eventually("both are down", PATIENCE, || async {
            let (status, components) = components(&worker).await;
            (status == 503 && both_are(&components, false)).then_some(())
        })
        .await;
        way.set(ProxyMode::Pass);
        testkit::eventually("both are up again", PATIENCE, || async {
            let (status, components) = components(&worker).await;
            (status == 200 && both_are(&components, true)).then_some(())
        })
        .await;
        world.finish().await;
    }

    on_every_broker!(broker);
}

/// The names of the table in section 12.2 of the contract.
fn documented_metrics() -> BTreeSet<String> {
    let contract = std::fs::read_to_string(testkit::workspace_root().join("docs/contract.md")).unwrap();
    let table = contract.split("### 12.2").nth(1).unwrap().split("### 12.3").next().unwrap();
    let cells = table.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split('|').nth(1));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// The names of a scrape.
fn exposed_metrics(page: &str) -> BTreeSet<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

async fn metrics_of_the_whole_flow(kind: Kind) {
    let keep = json!({ "maxAge": "1d" });
    let world = World::on(kind)
        .await
        .relay(json!({
            "outbox": { "pendingGaugeInterval": "1s" },
            "retention": { "outbox": keep, "inbox": keep },
        }))
        .source("hooks", json!({ "filter": { "exclude": [{ "header": "x-drop", "exists": true }] } }))
        .source("work", json!({ "consumption": "pull", "topic": null }));
    let worker = world.start().await;
    for n in 0..3 {
        worker.post("hooks", json!({ "id": n }).to_string()).await.accepted();
    }
    worker.post_with("hooks", &[("x-drop", "yes")], r#"{"id":9}"#).await;
    worker.post("work", r#"{"id":1}"#).await.accepted();
    world.db.wait_states("outbox", &[("sent", 3)]).await;

    let documented = documented_metrics();
    assert!(documented.len() > 30, "{documented:?}");
    let missing = std::sync::Mutex::new(BTreeSet::new());
    let look = testkit::eventually("every documented name is exposed", PATIENCE, || async {
        let exposed = exposed_metrics(&worker.get("/metrics").await.body);
        *missing.lock().unwrap() = documented.difference(&exposed).cloned().collect();
        missing.lock().unwrap().is_empty().then_some(exposed)
    });
    let exposed = tokio::select! {
        exposed = look => exposed,
        () = tokio::time::sleep(PATIENCE - std::time::Duration::from_secs(5)) => panic!("missing: {:?}", missing.lock().unwrap()),
    };
    assert_eq!(exposed.difference(&documented).collect::<Vec<_>>(), Vec::<&String>::new(), "exposed, not documented");
    let reference = std::fs::read_to_string(testkit::workspace_root().join("docs/reference/metrics.md")).unwrap();
    for name in &documented {
        assert!(reference.contains(&format!("| `{name}` |")), "{name} is not in the reference");
    }

    let receiver = [("destination", "receiver")];
    for (name, labels, value) in [
        (MESSAGES, [("status", "sent")].as_slice(), 3.0),
        (MESSAGES, &[("status", "failed")], 0.0),
        (MESSAGES, &[("status", "dead")], 0.0),
        ("queuebox_outbox_processing_duration_seconds_count", &[], 3.0),
        ("queuebox_outbox_publish_duration_seconds_count", &[("destination_type", "http")], 3.0),
        ("queuebox_outbox_destination_messages_total", &[("destination", "receiver"), ("outcome", "success")], 3.0),
        ("queuebox_delivery_latency_seconds_count", &receiver, 3.0),
        ("queuebox_http_publish_responses_total", &[("status_class", "2xx")], 3.0),
        ("queuebox_destination_up", &receiver, 1.0),
        ("queuebox_inbox_messages_total", &[("status", "new")], 4.0),
        ("queuebox_inbox_messages_total", &[("status", "forwarded")], 3.0),
        ("queuebox_inbox_messages_total", &[("status", "duplicate")], 0.0),
        ("queuebox_inbox_filtered_total", &[("source", "hooks")], 1.0),
        ("queuebox_source_up", &[("source", "hooks")], 1.0),
        ("queuebox_inbox_source_pending", &[("source", "work"), ("consumption", "pull")], 1.0),
        ("queuebox_claims_lost_total", &[], 0.0),
        ("queuebox_crashes_total", &[], 0.0),
    ] {
        assert_eq!(worker.metric(name, labels).await, value, "{name}{labels:?}");
    }
    assert_eq!(world.receiver.count(), 3);
    world.finish().await;
}

async fn metrics_of_a_delivery(kind: Kind) {
    let world = World::on(kind).await.relay(json!({ "outbox": { "pendingGaugeInterval": "1s" } }));
    let worker = world.start().await;
    world.db.insert(OutboxRow::new("order", 1)).await;
    worker.wait_metric(MESSAGES, &[("status", "sent")], |n| n == 1.0).await;
    for (name, labels) in [
        ("queuebox_outbox_processing_duration_seconds_count", [].as_slice()),
        ("queuebox_outbox_publish_duration_seconds_count", &[("destination_type", "http")]),
        ("queuebox_delivery_latency_seconds_count", &[("destination", "receiver")]),
        ("queuebox_outbox_destination_messages_total", &[("destination", "receiver"), ("outcome", "success")]),
        ("queuebox_http_publish_responses_total", &[("status_class", "2xx")]),
    ] {
        assert_eq!(worker.metric(name, labels).await, 1.0, "{name}");
    }
    // One poll has read the row, another has settled it.
    worker.wait_metric("queuebox_outbox_poll_duration_seconds_count", &[], |n| n >= 2.0).await;
    let page = worker.get("/metrics").await;
    assert_eq!(page.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    assert!(page.body.contains("\nqueuebox_outbox_messages_pending 0"), "{}", page.body);
    world.finish().await;
}

async fn metrics_of_failure_and_dead(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_always(Answer::status(500));
    let worker = world.start().await;
    world.db.insert(OutboxRow::new("order", 1).max_attempts(2)).await;
    worker.wait_metric(MESSAGES, &[("status", "dead")], |n| n == 1.0).await;
    assert_eq!(worker.metric(MESSAGES, &[("status", "failed")]).await, 1.0);
    assert_eq!(worker.metric(MESSAGES, &[("status", "sent")]).await, 0.0);
    let answers = "queuebox_http_publish_responses_total";
    assert_eq!(worker.metric(answers, &[("status_class", "5xx")]).await, 2.0);
    assert_eq!(worker.metric(answers, &[("status_class", "2xx")]).await, 0.0);
    world.finish().await;
}

async fn metrics_of_no_route(kind: Kind) {
    let world = World::on(kind).await.routes(&[("order", &["receiver"])]);
    let worker = world.start().await;
    world.db.insert(OutboxRow::new("unrouted", 1)).await;
    worker.wait_metric(MESSAGES, &[("status", "dead")], |n| n == 1.0).await;
    world.finish().await;
}

async fn metrics_of_the_inbox(kind: Kind) {
    let world = World::on(kind).await.source("shop", json!({}));
    let worker = world.start().await;
    for _ in 0..3 {
        worker.post("shop", r#"{"id":"a"}"#).await;
    }
    worker.post("shop", r#"{"id":"b"}"#).await.accepted();
    world.receiver.wait_for(2, PATIENCE).await;
    let inbox = "queuebox_inbox_messages_total";
    worker.wait_metric(inbox, &[("status", "forwarded")], |n| n == 2.0).await;
    assert_eq!(worker.metric(inbox, &[("status", "new")]).await, 2.0);
    assert_eq!(worker.metric(inbox, &[("status", "duplicate")]).await, 2.0);
    world.finish().await;
}

async fn oldest_outbox_age(kind: Kind) {
    let world = World::on(kind).await.relay(json!({ "outbox": { "pendingGaugeInterval": "1s" } }));
    let worker = world.start().await;
    let later = world.db.in_seconds(3600);
    world.db.insert(OutboxRow::new("order", 1).set("scheduled_at", &later)).await;
    worker.wait_metric("queuebox_outbox_oldest_pending_age_seconds", &[], |age| age > 0.0).await;
    assert_eq!(worker.metric("queuebox_outbox_oldest_due_age_seconds", &[]).await, 0.0);
    world.finish().await;
}

async fn oldest_inbox_age(kind: Kind) {
    let world = World::on(kind)
        .await
        // The gauges of the inbox have an interval of their own.
        .relay(json!({
            "inbox": { "relay": { "enabled": false, "pendingGaugeInterval": "1s" } },
            "outbox": { "pendingGaugeInterval": "1h" },
        }))
        .source("shop", json!({ "consumption": "pull", "topic": null }));
    let worker = world.start().await;
    // Both tables have been counted once.
    testkit::eventually("the first count", PATIENCE, || async {
        worker.get("/status").await.json()["backlog"].is_object().then_some(())
    })
    .await;
    worker.post("shop", r#"{"id":"a"}"#).await.accepted();
    worker.wait_metric("queuebox_inbox_oldest_pending_age_seconds", &[], |age| age > 0.0).await;
    let source = [("source", "shop")];
    worker.wait_metric("queuebox_inbox_source_oldest_pending_age_seconds", &source, |age| age > 0.0).await;
    world.finish().await;
}

on_every_database!(oldest_outbox_age, oldest_inbox_age);
on_postgres!(
    metrics_of_a_delivery,
    metrics_of_failure_and_dead,
    metrics_of_no_route,
    metrics_of_the_inbox,
    metrics_of_the_whole_flow,
);
