//! D19: one endpoint is slow, or goes away; the rows of another one do not wait for it.

use queuebox_testkit::{Answer, Recorder};
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, on_every_database};

const ROWS: usize = 500;

/// Two receivers, few publishes at a time, all rows of the slow one in front.
async fn world(kind: Kind, fast: &Recorder) -> World {
    World::on(kind)
        .await
        // Longer than the test: nothing of what follows can come from its end.
        .destination("receiver", json!({ "http": { "timeout": "10m" } }))
        .destination("fast", json!({ "http": { "url": fast.url() } }))
        .routes(&[("slow", &["receiver"]), ("**", &["fast"])])
        .relay(json!({ "drainTimeout": "1s", "outbox": { "maxInFlight": 8, "batchSize": 100 } }))
}

async fn insert(world: &World) {
    let rows = ["slow", "fast"].iter().flat_map(|topic| (0..ROWS as i64).map(move |n| OutboxRow::new(topic, n)));
    world.db.insert_all(rows).await;
}

async fn fast_ones_are_sent(world: &World, worker: &Worker, fast: &Recorder) {
    fast.wait_for(ROWS, PATIENCE).await;
    let sent = "SELECT count(*) AS n FROM outbox WHERE topic = 'fast' AND state = 'sent'";
    world.db.wait_row(sent, |row| row["n"] == ROWS).await;
    assert_eq!(fast.count(), ROWS, "each once");
    assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
}

async fn never_answers(kind: Kind) {
    let fast = Recorder::start().await;
    let world = world(kind, &fast).await;
    world.receiver.answer_always(Answer::stall());
    let worker = world.start().await;
    insert(&world).await;
    fast_ones_are_sent(&world, &worker, &fast).await;
    assert_eq!(world.db.count("SELECT count(*) AS n FROM outbox WHERE topic = 'slow' AND state = 'sent'").await, 0);
    world.finish().await;
}

async fn refuses_connections(kind: Kind) {
    let fast = Recorder::start().await;
    let world = world(kind, &fast).await;
    world.receiver.answer_always(Answer::stall());
    let worker = world.start().await;
    insert(&world).await;
    world.receiver.wait_for(1, PATIENCE).await;
    world.receiver.stop().await;
    fast_ones_are_sent(&world, &worker, &fast).await;
    world.finish().await;
}

on_every_database!(never_answers, refuses_connections);
