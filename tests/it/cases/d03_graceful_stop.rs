//! D03: a graceful stop leaves claims behind or drops work in flight.

use std::time::Duration;

use queuebox_testkit::{self as testkit, Answer};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    scenarios::claims::by_id,
    support::{Kind, OutboxRow, PATIENCE, World, on_every_database},
};

/// Under load, with an upload on its way. A lease here is longer than the patience of the test.
async fn under_load(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({
            "outbox": { "claimTimeout": "15m", "batchSize": 50 },
            "http": { "shutdownDelay": "1s" },
            "drainTimeout": "60s",
        }))
        .destination("receiver", json!({ "limits": { "maxInFlight": 8 }, "http": { "timeout": "30s" } }))
        .source("hooks", json!({ "consumption": "pull", "topic": null }));
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(1500)));
    let first = world.start().await;
    world.db.insert_all((0..200).map(|n| OutboxRow::new("order", n))).await;
    world.receiver.wait_for(8, PATIENCE).await;

    let body = format!("{{\"id\":\"upload\",\"text\":\"{}\"}}", "x".repeat(200_000));
    let mut upload = tokio::net::TcpStream::connect(("127.0.0.1", first.http)).await.unwrap();
    let head =
        format!("POST /inbox/hooks HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    upload.write_all(head.as_bytes()).await.unwrap();
    upload.write_all(&body.as_bytes()[..50_000]).await.unwrap();
    upload.flush().await.unwrap();
    first.post("hooks", r#"{"id":"before"}"#).await.accepted();

    first.process.sigterm();
    testkit::eventually("new requests are refused", PATIENCE, || async {
        (first.post("hooks", r#"{"id":"late"}"#).await.status == 503).then_some(())
    })
    .await;
    for part in body.as_bytes()[50_000..].chunks(30_000) {
        upload.write_all(part).await.unwrap();
    }
    let mut said = String::new();
    tokio::time::timeout(PATIENCE, upload.read_to_string(&mut said)).await.unwrap().unwrap();
    assert!(said.starts_with("HTTP/1.1 202"), "{said}");
    assert!(first.process.wait(PATIENCE).await.success());

    // What was in flight is marked, nothing is claimed, and the second worker need not wait for anything.
    let states = world.db.states("outbox").await;
    assert_eq!(states.get("sent").copied(), Some(world.receiver.count() as i64), "{states:?}");
    assert_eq!(states.keys().map(String::as_str).collect::<Vec<_>>(), ["pending", "sent"]);
    world.receiver.answer_always(Answer::ok());
    world.start().await;
    world.db.wait_states("outbox", &[("sent", 200)]).await;
    assert!(by_id(&world.receiver.requests()).values().all(|n| *n == 1), "an id came twice");
    assert_eq!(world.db.count("SELECT count(*) FROM inbox WHERE idempotency_key = 'upload'").await, 1);
    world.finish().await;
}

/// A receiver that never answers: the process ends all the same, and the rows are not lost.
async fn hanging_receiver(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({ "drainTimeout": "3s" }))
        .destination("receiver", json!({ "limits": { "maxInFlight": 8 }, "http": { "timeout": "10m" } }));
    world.receiver.answer_with(|_| Answer::stall());
    let first = world.start().await;
    world.db.insert_all((0..50).map(|n| OutboxRow::new("order", n))).await;
    world.receiver.wait_for(8, PATIENCE).await;
    assert!(first.process.terminate(PATIENCE).await.success());
    let started = world.receiver.count();
    world.receiver.answer_always(Answer::ok());
    world.start().await;
    world.db.wait_states("outbox", &[("sent", 50)]).await;
    // Only what had been started comes again.
    assert_eq!(world.receiver.count(), 50 + started);
    world.finish().await;
}

on_every_database!(under_load, hanging_receiver);
