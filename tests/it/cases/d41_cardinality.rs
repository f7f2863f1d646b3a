//! D41: metric cardinality. Topics, keys, paths and event types are `metrics_do_not_grow_with_data`.

use queuebox_testkit::Answer;
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, on_every_database};

/// A thousand texts of failures, and a destination that is taken away.
async fn errors_and_removed_destinations(kind: Kind) {
    let world = World::on(kind)
        .await
        .destination("retired", json!({ "http": { "url": "http://127.0.0.1:9/" } }))
        .routes(&[("retired", &["retired"]), ("**", &["receiver"])]);
    world.receiver.answer_with(|request| Answer::status(500).body(format!("failure-{}", request.json()["n"])));
    let worker = world.start().await;
    world.db.insert(OutboxRow::new("retired", 1).max_attempts(1)).await;
    world.db.insert(OutboxRow::new("order", 0).max_attempts(1)).await;
    world.db.wait_states("outbox", &[("dead", 2)]).await;
    let before = worker.get("/metrics").await.body;
    assert!(before.contains("destination=\"retired\""));
    let rows = (1..=1000).map(|n| OutboxRow::new(&format!("topic-{n}"), n).key(&format!("key-{n}")).max_attempts(1));
    world.db.insert_all(rows).await;
    world.db.wait_states("outbox", &[("dead", 1002)]).await;
    let after = worker.get("/metrics").await.body;
    assert!(after.lines().count() < before.lines().count() + 200);
    for part in ["failure-", "topic-", "key-", "127.0.0.1", "/events"] {
        assert!(!after.contains(part), "{part} in {after}");
    }
    worker.process.terminate(PATIENCE).await;
    let world = world.routes(&[("**", &["receiver"])]);
    let worker = world.start().await;
    world.receiver.answer_always(Answer::ok());
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&id, "sent").await;
    assert!(!worker.get("/metrics").await.body.contains("retired"), "a destination without a route has a series");
    world.finish().await;
}

on_every_database!(errors_and_removed_destinations);
