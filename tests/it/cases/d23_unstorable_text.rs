//! D23: `\u0000` and lone surrogates, from every source, on every database.

use serde_json::json;

use crate::{
    brokers::{BROKERS, Broker, Message},
    support::{Kind, World, on_every_database, text},
};

/// JSON that no database stores alike, by the field that would be its key.
const BAD: [&str; 4] = [
    r#"{"id":"n1","s":"a\u0000b"}"#,
    r#"{"id":"n2","a\u0000":1}"#,
    r#"{"id":"n3","s":"\ud800"}"#,
    r#"{"id":"n\u00004"}"#,
];

const GOOD: &str = r#"{"id":"good","s":"\ud83d\ude00 é"}"#;

async fn refused_or_dead_and_the_next_goes_on(kind: Kind) {
    let nul = json!({ "expression": "{ 'id': id, 's': $decodeUrlComponent('%00') }" });
    let mut world = World::on(kind)
        .await
        .relay(json!({ "inbox": { "relay": { "enabled": false } } }))
        .source("hooks", json!({}))
        .source("changing", json!({ "transform": nul }));
    let mut lines = Vec::new();
    for broker in BROKERS {
        let line = Broker::shared(broker).await.line().await;
        world = world.source(&format!("{broker:?}").to_lowercase(), line.as_source());
        lines.push((format!("{broker:?}").to_lowercase(), line));
    }
    let worker = world.start().await;
    for body in BAD {
        let answer = worker.post("hooks", body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(!text(&answer.json(), "error").is_empty());
    }
    let answer = worker.post("changing", GOOD).await;
    assert!((400..500).contains(&answer.status), "a transform whose result holds NUL: {answer:?}");
    worker.post("hooks", GOOD).await.accepted();
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
    for (name, line) in &lines {
        let bodies: Vec<Message> = BAD.iter().chain([&GOOD]).map(|body| Message::new(*body)).collect();
        line.publish(&bodies).await;
        let state =
            |state: &str| format!("SELECT count(*) AS n FROM inbox WHERE source = '{name}' AND state = '{state}'");
        world.db.wait_row(&state("dead"), |row| row["n"] == 4).await;
        world.db.wait_row(&state("pending"), |row| row["n"] == 1).await;
        line.all_acknowledged().await;
        for row in world.db.rows(&format!("SELECT * FROM inbox WHERE source = '{name}' AND state = 'dead'")).await {
            let (reason, key) = (text(&row, "last_error"), text(&row, "idempotency_key"));
            assert!(reason.starts_with("not_json:") && key.starts_with("sha256:"), "{row:#}");
            // As it was received: the escape is text, not the character.
            assert!(BAD.contains(&text(&row["payload"], "raw")), "{row:#}");
        }
    }
    world.finish().await;
}

on_every_database!(refused_or_dead_and_the_next_goes_on);
