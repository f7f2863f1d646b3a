//! D25: numbers go through a double.

use serde_json::{Value, json};

use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database, text};

const BODY: &str = r#"{"id":"h1","big":12345678901234567890,"u":18446744073709551615,"i":-9223372036854775808,"dec":0.12345678901234567890123,"money":1.10}"#;

async fn digits_arrive_as_they_were(kind: Kind) {
    let world = World::on(kind).await.source("shop", json!({ "idempotencyKeyPath": "$.big" }));
    let worker = world.start().await;
    worker.post("shop", BODY).await.accepted();
    let row = world.db.row("SELECT idempotency_key FROM inbox").await;
    assert_eq!(text(&row, "idempotency_key"), "12345678901234567890");
    world.receiver.wait_for(1, PATIENCE).await;
    world.db.insert(OutboxRow::new("order", 1).payload(BODY)).await;
    for request in world.receiver.wait_for(2, PATIENCE).await {
        let body = request.text();
        for digits in [
            "12345678901234567890",
            "18446744073709551615",
            "-9223372036854775808",
            "0.12345678901234567890123",
            "1.10",
        ] {
            assert!(body.contains(digits), "{digits} in {body}");
        }
    }
    world.finish().await;
}

/// Copies the number, which the language of transforms cannot hold.
fn copying() -> Value {
    json!({ "expression": "{ \"id\": id, \"big\": big }" })
}

/// One number only: PostgreSQL may give the members of an object in another order.
const LARGE: &str = r#"{"id":"h1","big":12345678901234567890}"#;

/// The stage fails and names the number; what it would have become reaches nobody.
async fn a_transform_that_copies_fails(kind: Kind) {
    let routes = json!([
        { "topics": ["by.route"], "destinations": ["receiver"], "transform": copying() },
        { "topics": ["by.destination"], "destinations": ["shaping"] },
        { "topics": ["**"], "destinations": ["receiver"] },
    ]);
    let world =
        World::on(kind).await.relay(json!({ "routes": routes })).source("shop", json!({ "transform": copying() }));
    let shaping = json!({ "http": { "url": world.receiver.url() }, "transform": copying() });
    let world = world.destination("shaping", shaping);
    let worker = world.start().await;
    let refused = worker.post("shop", LARGE).await;
    assert_eq!(refused.status, 422, "{refused:?}");
    assert!(text(&refused.json(), "error").contains("12345678901234567890"), "{refused:?}");
    assert_eq!(world.db.count("SELECT count(*) FROM inbox").await, 0);

    for topic in ["by.route", "by.destination"] {
        let id = world.db.insert(OutboxRow::new(topic, 1).payload(LARGE).max_attempts(2)).await;
        let dead = world.db.wait_outbox(&id, "dead").await;
        assert!(text(&dead, "last_error").contains("12345678901234567890"), "{dead:#}");
        assert_eq!(number(&dead, "attempt"), 2);
    }
    // What a double holds passes through the same stages.
    let small = r#"{"id":"h2","big":1234567890}"#;
    worker.post("shop", small).await.accepted();
    world.db.insert(OutboxRow::new("by.route", 1).payload(small)).await;
    world.db.insert(OutboxRow::new("by.destination", 1).payload(small)).await;
    for request in world.receiver.wait_for(3, PATIENCE).await {
        assert_eq!(request.json(), json!({ "id": "h2", "big": 1_234_567_890 }));
    }
    world.finish().await;
}

on_every_database!(digits_arrive_as_they_were, a_transform_that_copies_fails);
