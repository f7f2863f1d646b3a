//! D42: a replay that does nothing.

use queuebox_testkit::Answer;
use serde_json::{Value, json};

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, text};

async fn moved(worker: &Worker, body: Value) -> Value {
    let answer = worker.admin("/admin/replay", body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["moved"].clone()
}

async fn each_replay_is_one_more_delivery(kind: Kind) {
    let world = World::on(kind).await;
    let worker = world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&id, "sent").await;
    let sent = json!({ "ids": [id], "state": ["sent"] });
    for delivery in 2..=3 {
        assert_eq!(moved(&worker, sent.clone()).await, 1);
        world.receiver.wait_for(delivery, PATIENCE).await;
        world.db.wait_outbox(&id, "sent").await;
        assert_eq!(world.receiver.count(), delivery);
    }
    assert!(world.receiver.requests().iter().all(|request| request.header("x-message-id") == id));

    // Twice within a moment: the answers say what was moved, and so many deliveries come.
    let (one, two) = tokio::join!(moved(&worker, sent.clone()), moved(&worker, sent.clone()));
    let total = 3 + usize::try_from(one.as_u64().unwrap() + two.as_u64().unwrap()).unwrap();
    assert!(total > 3, "neither moved it");
    world.receiver.wait_for(total, PATIENCE).await;
    world.db.wait_outbox(&id, "sent").await;
    assert_eq!(world.receiver.count(), total);
    world.finish().await;
}

/// While it is in flight and while it waits, a row is no finished one.
async fn live_rows_are_not_touched(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|_| Answer::stall());
    let worker = world.start().await;
    let busy = world.db.insert(OutboxRow::new("order", 1).key("k")).await;
    let behind = world.db.insert(OutboxRow::new("order", 2).key("k")).await;
    world.receiver.wait_for(1, PATIENCE).await;
    for state in [json!(["dead"]), json!(["sent", "dead"])] {
        assert_eq!(moved(&worker, json!({ "ids": [busy, behind], "state": state })).await, 0);
    }
    let answer = worker.admin("/admin/replay", json!({ "ids": [busy], "state": ["pending"] })).await;
    assert_eq!(answer.status, 400, "{answer:?}");
    world.receiver.answer_always(Answer::ok());
    world.db.wait_states("outbox", &[("sent", 2)]).await;

    // What is claimed by somebody else.
    let token = "'55555555-5555-4555-8555-555555555555'";
    let claimed = OutboxRow::new("claimed", 3)
        .set("state", "'processing'")
        .set("claim_token", token)
        .set("lease_expires_at", &world.db.in_seconds(3600));
    let claimed = world.db.insert(claimed).await;
    assert_eq!(moved(&worker, json!({ "topic": "claimed", "state": ["sent", "dead"] })).await, 0);
    assert_eq!(text(&world.db.outbox(&claimed).await, "state"), "processing");
    world.finish().await;
}

/// A dead row whose key has rows that wait: it goes, and the others are neither lost nor doubled.
async fn dead_row_with_followers(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|request| Answer::status(if request.json()["n"] == 1 { 500 } else { 200 }));
    let worker = world.start().await;
    let dead = world.db.insert(OutboxRow::new("order", 1).key("k").max_attempts(1)).await;
    world.db.wait_outbox(&dead, "dead").await;
    world.receiver.answer_always(Answer::ok());
    let in_an_hour = world.db.in_seconds(3600);
    let later = world.db.insert(OutboxRow::new("order", 2).key("k").set("scheduled_at", &in_an_hour)).await;
    assert_eq!(moved(&worker, json!({ "ids": [dead] })).await, 1);
    world.db.wait_outbox(&dead, "sent").await;
    assert_eq!(text(&world.db.outbox(&later).await, "state"), "pending");
    assert_eq!(world.receiver.count(), 2);

    for (body, status) in [
        (json!({ "topic": "nothing-of-this-name" }), 200),
        (json!({ "topik": "order" }), 400),
        (json!({}), 400),
        (json!({ "ids": [] }), 400),
        (json!({ "state": ["dead"] }), 400),
    ] {
        let answer = worker.admin("/admin/replay", body.clone()).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        if status == 200 {
            assert_eq!(answer.json()["moved"], 0);
        } else {
            assert!(!text(&answer.json(), "error").is_empty());
        }
    }
    assert_eq!(world.receiver.count(), 2);
    world.finish().await;
}

on_every_database!(each_replay_is_one_more_delivery, live_rows_are_not_touched, dead_row_with_followers);
