//! D09, its second run, on every broker: the database goes away while the broker pushes.

use queuebox_testkit::private_postgres;
use serde_json::json;

use crate::{
    brokers::{Broker, BrokerKind, Message, on_every_broker},
    support::{Db, PATIENCE, World},
};

async fn stored_once_each_when_it_is_back(kind: BrokerKind) {
    let server = private_postgres().await;
    let line = Broker::shared(kind).await.line().await;
    let folder = tempfile::tempdir().unwrap();
    let url = server.fresh_database().await;
    let world = World::with(Db::postgres(url.clone()).await, folder)
        .await
        // Short, so that messages are given back to the broker while the database is away.
        .relay(json!({ "inbox": { "storeRetryWindow": "1s", "relay": { "enabled": false } } }))
        .source("events", line.as_source());
    let worker = world.start().await;
    line.publish(&Message::numbered(0..100)).await;
    world.db.wait_states("inbox", &[("pending", 100)]).await;
    world.db.close().await;
    server.kill9().await;
    line.publish(&Message::numbered(100..200)).await;
    worker.wait_component("database", "down").await;
    assert!(line.outstanding().await >= 100, "acknowledged without a store");
    server.start().await;
    let db = Db::postgres(url).await;
    db.wait_states("inbox", &[("pending", 200)]).await;
    line.all_acknowledged().await;
    assert_eq!(db.count("SELECT count(DISTINCT idempotency_key) AS n FROM inbox").await, 200);
    worker.wait_component("database", "up").await;
    if kind == BrokerKind::RabbitMq {
        let figures = line.broker.api("GET", &format!("/queues/{{vhost}}/{}", line.name), None).await;
        let redelivered = figures["message_stats"]["redeliver"].as_i64().unwrap_or(0);
        // A hundred unacknowledged ones are given back together, once per pause.
        assert!(redelivered < 1_000, "{redelivered} redeliveries");
    }
    assert!(worker.process.terminate(PATIENCE).await.success());
    db.close().await;
}

on_every_broker!(stored_once_each_when_it_is_back);
