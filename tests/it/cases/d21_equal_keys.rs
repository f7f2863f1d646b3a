//! D21: a race of equal idempotency keys.

use futures::StreamExt;
use serde_json::json;

use crate::support::{Kind, World, on_every_database};

async fn ten_rounds_of_fifty(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({})).relay(json!({ "inbox": { "storeTimeout": "60s" } }));
    // Two processes, so that it is the database that decides.
    let workers = [world.start().await, world.start().await];
    for round in 0..10 {
        let body = json!({ "id": format!("r{round}") }).to_string();
        let posts = futures::stream::iter(0..50).map(|n| workers[n % 2].post("hooks", body.clone()));
        let answers: Vec<u16> = posts.buffer_unordered(20).map(|answer| answer.status).collect().await;
        let with = |status: u16| answers.iter().filter(|answer| **answer == status).count();
        assert_eq!((with(202), with(200)), (1, 49), "{answers:?}");
    }
    world.db.wait_states("inbox", &[("processed", 10)]).await;
    world.db.wait_states("outbox", &[("sent", 10)]).await;
    assert_eq!(world.receiver.count(), 10);
    world.finish().await;
}

/// A transaction of somebody else holds the key: no answer before its outcome, and never `duplicate` for a row that does not exist.
async fn open_transaction(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({})).relay(json!({
        "inbox": { "storeTimeout": "60s", "relay": { "enabled": false } },
    }));
    let worker = world.start().await;
    for (key, commits) in [("rolled-back", false), ("committed", true)] {
        let mut other = world.db.begin().await;
        other
            .execute(&format!("INSERT INTO inbox (source, idempotency_key, payload) VALUES ('hooks', '{key}', '{{}}')"))
            .await;
        let post = {
            let worker = worker.clone();
            let body = json!({ "id": key }).to_string();
            tokio::spawn(async move { worker.post("hooks", body).await })
        };
        // Time for the request to arrive; too little of it makes the test weaker, not wrong.
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(!post.is_finished(), "answered before the outcome was known");
        if commits {
            other.commit().await;
        } else {
            other.rollback().await;
        }
        assert_eq!(post.await.unwrap().status, if commits { 200 } else { 202 }, "{key}");
        let rows = format!("SELECT count(*) FROM inbox WHERE idempotency_key = '{key}'");
        assert_eq!(world.db.count(&rows).await, 1);
    }
    world.finish().await;
}

on_every_database!(ten_rounds_of_fifty, open_transaction);
