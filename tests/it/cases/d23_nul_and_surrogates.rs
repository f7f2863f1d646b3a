//! D23: `\u0000` and lone surrogates. HTTP and databases; brokers have theirs beside their sources.

use serde_json::json;

use crate::support::{Kind, World, on_every_database, text};

async fn webhooks_are_refused_with_a_reason(kind: Kind) {
    let nul = json!({ "expression": "{\"id\": id, \"text\": \"a\\u0000b\"}" });
    let world = World::on(kind)
        .await
        .source("hooks", json!({ "aggregateIdPath": "$.order" }))
        .source("made", json!({ "transform": nul }));
    let worker = world.start().await;
    let bodies = [
        r#"{"id":"n1","s":"a\u0000b"}"#,
        r#"{"id":"n2","a\u0000":1}"#,
        r#"{"id":"n3","s":"\ud800"}"#,
        r#"{"id":"n3","s":"\udc00\ud800"}"#,
        r#"{"id":"n3","\ud83d":1}"#,
        r#"{"id":"n\u00004"}"#,
        r#"{"id":"n5","order":"o\u0000"}"#,
        r#"[{"id":"n6","deep":[{"s":"\u0000"}]}]"#,
    ];
    for body in bodies {
        let answer = worker.post("hooks", body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(!text(&answer.json(), "error").is_empty(), "{body}: {answer:?}");
    }
    let made = worker.post("made", r#"{"id":7}"#).await;
    assert_eq!(made.status, 422, "{made:?}");
    assert!(text(&made.json(), "error").starts_with("Transform failed: "), "{made:?}");
    assert_eq!(world.db.count("SELECT count(*) FROM inbox").await, 0);
    // A pair is a character, an escaped backslash is none, and what comes next goes on.
    for body in [r#"{"id":"g1","s":"\ud83d\ude00"}"#, r#"{"id":"g2","s":"\\u0000"}"#, r#"{"id":"g3"}"#] {
        worker.post("hooks", body).await.accepted();
    }
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    let got: Vec<serde_json::Value> = world.receiver.requests().iter().map(|r| r.json()).collect();
    for sent in [json!({ "id": "g1", "s": "😀" }), json!({ "id": "g2", "s": "\\u0000" }), json!({ "id": "g3" })] {
        assert!(got.contains(&sent), "{sent} in {got:?}");
    }
    world.finish().await;
}

on_every_database!(webhooks_are_refused_with_a_reason);
