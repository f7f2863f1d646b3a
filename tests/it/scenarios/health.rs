//! Section O: metrics.

use queuebox_testkit::Answer;
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, on_every_database, on_postgres};

const MESSAGES: &str = "queuebox_outbox_messages_total";

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
        .relay(json!({ "inbox": { "relay": { "enabled": false, "pendingGaugeInterval": "1s" } } }))
        .source("shop", json!({ "consumption": "pull", "topic": null }));
    let worker = world.start().await;
    worker.post("shop", r#"{"id":"a"}"#).await.accepted();
    worker.wait_metric("queuebox_inbox_oldest_pending_age_seconds", &[], |age| age > 0.0).await;
    let source = [("source", "shop")];
    worker.wait_metric("queuebox_inbox_source_oldest_pending_age_seconds", &source, |age| age > 0.0).await;
    world.finish().await;
}

on_every_database!(oldest_outbox_age, oldest_inbox_age);
on_postgres!(metrics_of_a_delivery, metrics_of_failure_and_dead, metrics_of_no_route, metrics_of_the_inbox);
