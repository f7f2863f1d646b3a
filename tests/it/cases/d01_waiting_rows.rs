//! D01: the lease runs out while a claimed row waits for its turn.

use std::time::Duration;

use queuebox_testkit::Answer;
use serde_json::json;

use crate::{
    scenarios::claims::by_id,
    support::{Kind, OutboxRow, World, number, on_every_database},
};

/// One at a time, two workers, and the last of 20 rows starts after several leases.
async fn each_id_arrives_once(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({ "outbox": { "batchSize": 20 } }))
        .destination("receiver", json!({ "limits": { "maxInFlight": 1 } }));
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(700)));
    let workers = [world.start().await, world.start().await];
    let rows: Vec<String> = (0..20).map(|n| format!("('order', '{{\"n\":{n}}}')")).collect();
    world.db.execute(&format!("INSERT INTO outbox (topic, payload) VALUES {}", rows.join(", "))).await;
    world.db.wait_states("outbox", &[("sent", 20)]).await;
    let ids = by_id(&world.receiver.requests());
    assert_eq!((ids.len(), ids.values().max()), (20, Some(&1)));
    for worker in &workers {
        assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
        assert_eq!(worker.metric("queuebox_outbox_messages_reclaimed_total", &[]).await, 0.0);
    }
    world.finish().await;
}

/// The neighbour: one key, so that its rows wait for one another in memory.
async fn rows_of_one_key(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(400)));
    world.start().await;
    world.start().await;
    let ids = world.db.insert_all((0..20).map(|n| OutboxRow::new("order", n).key("k"))).await;
    world.db.wait_states("outbox", &[("sent", 20)]).await;
    let arrived: Vec<String> = world.receiver.requests().iter().map(|r| r.header("x-message-id").to_owned()).collect();
    assert_eq!(arrived, ids);
    let row = world.db.row("SELECT max(attempt) AS attempt, max(crashes) AS crashes FROM outbox").await;
    assert_eq!((number(&row, "attempt"), number(&row, "crashes")), (0, 0));
    world.finish().await;
}

on_every_database!(each_id_arrives_once, rows_of_one_key);
