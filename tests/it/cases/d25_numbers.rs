//! D25: numbers go through a double.

use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, on_every_database, text};

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

on_every_database!(digits_arrive_as_they_were);
