//! Sections A, C and K: webhooks in; filter, keys, delay; identity and trace.

use std::collections::BTreeSet;

use hmac::{KeyInit, Mac};
use queuebox_testkit::Answer;
use serde_json::{Value, json};

use crate::support::{Kind, OutboxRow, PATIENCE, World, on_every_database, on_postgres, quoted, text, time};

async fn webhook_is_stored(kind: Kind) {
    // The relay is off, so that the row is seen as it was stored.
    let world = quiet(World::on(kind).await).source("payments", json!({}));
    let worker = world.start().await;
    let id = worker.post("payments", r#"{"id":"p-1","amount":12}"#).await.accepted();
    let row = world.db.row("SELECT * FROM inbox").await;
    assert_eq!(text(&row, "id"), id);
    assert_eq!((text(&row, "source"), text(&row, "idempotency_key")), ("payments", "p-1"));
    assert_eq!(row["payload"], json!({ "id": "p-1", "amount": 12 }));
    assert_eq!((text(&row, "state"), text(&row, "consumption")), ("pending", "push"));
    world.finish().await;
}

/// Without the relay: rows stay as they were stored.
fn quiet(world: World) -> World {
    world.relay(json!({ "inbox": { "relay": { "enabled": false } } }))
}

async fn webhook_repeat_is_a_duplicate(kind: Kind) {
    let world = World::on(kind).await.source("payments", json!({}));
    let worker = world.start().await;
    worker.post("payments", r#"{"id":"p-1"}"#).await.accepted();
    let again = worker.post("payments", r#"{"id":"p-1"}"#).await;
    assert_eq!((again.status, again.json()), (200, json!({ "status": "duplicate" })));
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
    world.finish().await;
}

async fn webhook_invalid_json_is_400(kind: Kind) {
    let world = World::on(kind).await.source("payments", json!({}));
    let worker = world.start().await;
    for body in ["", "no json", r#"{"id":1"#, r#"{"id":1} x"#, "{'id':1}"] {
        let answer = worker.post("payments", body).await;
        assert_eq!((answer.status, answer.json()), (400, json!({ "error": "Invalid JSON" })), "{body:?}");
    }
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 0);
    world.finish().await;
}

async fn webhook_without_key_is_400(kind: Kind) {
    let world = World::on(kind).await.source("payments", json!({}));
    let worker = world.start().await;
    for body in [r#"{"other":1}"#, r#"{"id":null}"#, r#"{"id":" "}"#, r#"{"id":{}}"#, r#"{"id":[1]}"#, "[]"] {
        let answer = worker.post("payments", body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(!text(&answer.json(), "error").is_empty());
    }
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 0);
    world.finish().await;
}

async fn webhook_event_type_from_path(kind: Kind) {
    let world = quiet(World::on(kind).await).source("hooks", json!({ "eventTypePath": "$.meta.type" }));
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":1,"meta":{"type":"order.paid"}}"#).await.accepted();
    assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "event_type"), "order.paid");
    world.finish().await;
}

async fn webhook_key_header_wins(kind: Kind) {
    let world = quiet(World::on(kind).await)
        .source("hooks", json!({ "http": { "path": "/hooks", "idempotencyKeyHeader": "X-Delivery" } }));
    let worker = world.start().await;
    let body = r#"{"id":"from-path"}"#;
    worker.post_with("hooks", &[("x-delivery", "from-header")], body).await.accepted();
    worker.post("hooks", body).await.accepted();
    assert_eq!(worker.post_with("hooks", &[("x-delivery", "  ")], body).await.status, 200);
    assert_eq!(worker.post_with("hooks", &[("x-delivery", "from-header")], body).await.status, 200);
    let rows = world.db.rows("SELECT idempotency_key FROM inbox").await;
    let keys: BTreeSet<&str> = rows.iter().map(|row| text(row, "idempotency_key")).collect();
    assert_eq!((rows.len(), keys), (2, BTreeSet::from(["from-header", "from-path"])));
    world.finish().await;
}

pub fn github(world: World) -> World {
    world.env("GITHUB_SECRET", "It's a Secret to Everybody").source(
        "github",
        json!({
            "idempotencyKeyPath": null,
            "aggregateIdPath": "$.repository.full_name",
            "topic": "{{ eventType }}",
            "http": {
                "path": "/github",
                "idempotencyKeyHeader": "X-GitHub-Delivery",
                "eventTypeHeader": "X-GitHub-Event",
                "auth": { "github": { "secretFrom": { "env": "GITHUB_SECRET" } } },
            },
        }),
    )
}

pub fn github_signature(body: &str) -> String {
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(b"It's a Secret to Everybody").unwrap();
    mac.update(body.as_bytes());
    let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256={hex}")
}

async fn github_delivery_repeat_is_one_row(kind: Kind) {
    let world = github(quiet(World::on(kind).await));
    let worker = world.start().await;
    let body = r#"{"action":"opened","repository":{"full_name":"queuebox/queuebox"}}"#;
    let signature = github_signature(body);
    let headers =
        [("x-github-delivery", "d-42"), ("x-github-event", "issues"), ("x-hub-signature-256", signature.as_str())];
    worker.post_with("github", &headers, body).await.accepted();
    assert_eq!(worker.post_with("github", &headers, body).await.status, 200);
    let forged = worker.post_with("github", &headers, body.replace("opened", "closed")).await;
    assert_eq!(forged.status, 401);
    let row = world.db.row("SELECT * FROM inbox").await;
    assert_eq!(text(&row, "idempotency_key"), "d-42");
    assert_eq!((text(&row, "event_type"), text(&row, "aggregate_id")), ("issues", "queuebox/queuebox"));
    assert!(row["headers"].get("x-hub-signature-256").is_none(), "{row:#}");
    world.finish().await;
}

async fn github_same_body_two_deliveries(kind: Kind) {
    let world = github(quiet(World::on(kind).await));
    let worker = world.start().await;
    let signature = github_signature("{}");
    for delivery in ["d-1", "d-2"] {
        let headers =
            [("x-github-delivery", delivery), ("x-github-event", "ping"), ("x-hub-signature-256", signature.as_str())];
        worker.post_with("github", &headers, "{}").await.accepted();
    }
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 2);
    world.finish().await;
}

mod webhook_same_key_in_parallel {
    use super::*;

    async fn fifty_at_once(kind: Kind) {
        let world =
            World::on(kind).await.source("hooks", json!({})).relay(json!({ "inbox": { "storeTimeout": "60s" } }));
        let worker = world.start().await;
        let posts = (0..50).map(|_| worker.post("hooks", r#"{"id":"same"}"#));
        let answers = futures::future::join_all(posts).await;
        let with = |status: u16| answers.iter().filter(|answer| answer.status == status).count();
        assert_eq!((with(202), with(200)), (1, 49), "{answers:?}");
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
        world.finish().await;
    }

    /// A first insert that is open and then rolled back: the second waits for it and is stored.
    async fn rolled_back_first(kind: Kind) {
        let world = quiet(World::on(kind).await)
            .source("hooks", json!({}))
            .relay(json!({ "inbox": { "storeTimeout": "60s" } }));
        let worker = world.start().await;
        let mut first = world.db.begin().await;
        let insert = "INSERT INTO inbox (source, idempotency_key, payload) VALUES ('hooks', 'same', '{}')";
        first.execute(insert).await;
        let post = tokio::spawn(async move { worker.post("hooks", r#"{"id":"same"}"#).await });
        // Time for the request to arrive; too little of it makes the test weaker, not wrong.
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(!post.is_finished(), "answered before the outcome of the first was known");
        first.rollback().await;
        post.await.unwrap().accepted();
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
        world.finish().await;
    }

    on_every_database!(fifty_at_once, rolled_back_first);
}

async fn keys_never_merge(kind: Kind) {
    let world = quiet(World::on(kind).await).source("hooks", json!({ "idempotencyKeyPath": "$.id" }));
    let worker = world.start().await;
    // Surrounding blanks are trimmed from headers only; a JSON value is taken as it is.
    let keys =
        ["key", "key ", " key", "key  ", "KEY", "Key", "kéy", "ke\u{301}y", "key.", "straße", "strasse", "ﬁ", "fi"];
    for key in keys {
        worker.post("hooks", json!({ "id": key }).to_string()).await.accepted();
    }
    for key in keys {
        assert_eq!(worker.post("hooks", json!({ "id": key }).to_string()).await.status, 200, "{key}");
    }
    let rows = world.db.rows("SELECT idempotency_key FROM inbox").await;
    let stored: BTreeSet<&str> = rows.iter().map(|row| text(row, "idempotency_key")).collect();
    assert_eq!(stored, BTreeSet::from(keys));
    world.finish().await;
}

mod filter {
    use super::*;

    pub(super) async fn rules(kind: Kind) {
        let filter = json!({
            "require": [{ "header": "X-Kind", "in": ["order", "invoice"] }, { "header": "X-Tenant", "exists": true }],
            "exclude": [{ "header": "X-Test", "equals": "yes" }, { "header": "X-Name", "matches": "internal.**" }],
        });
        let world = quiet(World::on(kind).await).source("hooks", json!({ "filter": filter }));
        let worker = world.start().await;
        let good = [("x-kind", "order"), ("x-tenant", "a")];
        let cases: [(&[(&str, &str)], bool); 8] = [
            (&[], true),
            (&[("x-test", "no"), ("x-name", "internal")], true),
            (&[("x-test", "YES")], true),
            (&[("x-name", "internal.a.b")], false),
            (&[("x-test", "yes")], false),
            (&[("x-kind", "Order")], false),
            (&[("x-kind", "other")], false),
            (&[("x-tenant", "")], true),
        ];
        let mut stored = 0;
        for (n, (extra, passes)) in cases.iter().enumerate() {
            // A header that is given twice counts with its last value.
            let headers: Vec<(&str, &str)> = good
                .iter()
                .filter(|(name, _)| !extra.iter().any(|(other, _)| other == name))
                .chain(extra.iter())
                .copied()
                .filter(|(_, value)| !value.is_empty())
                .collect();
            let passes = *passes && headers.iter().any(|(name, _)| *name == "x-tenant");
            let answer = worker.post_with("hooks", &headers, json!({ "id": n }).to_string()).await;
            assert_eq!(answer.status, 202);
            assert_eq!(answer.json() != json!({ "status": "filtered" }), passes, "{extra:?}: {answer:?}");
            stored += i64::from(passes);
        }
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, stored);
        world.finish().await;
    }
}

mod filter_rules {
    use super::*;

    #[tokio::test]
    async fn require_all_and_exclude_any() {
        filter::rules(Kind::Sqlite).await;
    }

    #[tokio::test]
    async fn two_kinds_in_one_rule_are_an_error() {
        let rule = json!({ "require": [{ "header": "X-Kind", "equals": "a", "exists": true }] });
        let world = World::on(Kind::Sqlite).await.source("hooks", json!({ "filter": rule }));
        let folder = world.write_manifests(1, 2);
        let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
        assert!(!status.success());
        assert!(format!("{out}{log}").contains("spec.filter.require[0]"), "{out}{log}");
    }
}

async fn aggregate_expression_splits_a_value(kind: Kind) {
    let source = json!({
        "aggregateIdExpression": "$split(ref, '/')[1]",
        "aggregateIdPath": "$.fallback",
    });
    let world = quiet(World::on(kind).await).source("hooks", source);
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":1,"ref":"order/77/line"}"#).await.accepted();
    worker.post("hooks", r#"{"id":2,"ref":5,"fallback":"f-1"}"#).await.accepted();
    let rows = world.db.rows("SELECT aggregate_id FROM inbox ORDER BY idempotency_key").await;
    assert_eq!((text(&rows[0], "aggregate_id"), text(&rows[1], "aggregate_id")), ("77", "f-1"));
    let world = world.source("hooks", json!({ "aggregateIdExpression": "$split(" }));
    let broken = world.spawn();
    assert!(!broken.process.wait(PATIENCE).await.success());
    assert!(broken.process.output().contains("spec.aggregateIdExpression"), "{}", broken.process.output());
    world.finish().await;
}

async fn initial_delay_holds(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({ "initialDelay": "30s" })).source("prompt", json!({}));
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":1}"#).await.accepted();
    // One that comes later and need not wait shows that the relay was there.
    worker.post("prompt", r#"{"id":2}"#).await.accepted();
    world.receiver.wait_for(1, PATIENCE).await;
    let row = world.db.row("SELECT * FROM inbox WHERE source = 'hooks'").await;
    let delay = time(&row, "scheduled_at").duration_since(time(&row, "created_at")).as_secs_f64();
    assert!((29.9..=30.1).contains(&delay), "{delay}");
    assert_eq!((text(&row, "state"), row["attempt"].as_i64()), ("pending", Some(0)));
    assert!(row["lease_expires_at"].is_null() && row["claim_token"].is_null());
    let due = world.db.in_seconds(0);
    world.db.execute(&format!("UPDATE inbox SET scheduled_at = {due} WHERE source = 'hooks'")).await;
    world.receiver.wait_for(2, PATIENCE).await;
    world.finish().await;
}

mod publish_time {
    use super::*;

    pub(super) async fn formats(kind: Kind) {
        let source = json!({ "initialDelay": "1s", "scheduledAtPath": "$.at" });
        let world = quiet(World::on(kind).await).source("hooks", source);
        let worker = world.start().await;
        let times = [json!(1_790_000_000_000_i64), json!(1_790_000_000), json!("2026-09-21T14:13:20Z")];
        for (n, at) in times.iter().enumerate() {
            worker.post("hooks", json!({ "id": format!("t{n}"), "at": at }).to_string()).await.accepted();
        }
        for (n, at) in [json!("soon"), json!(-5), json!(1.5), Value::Null].iter().enumerate() {
            worker.post("hooks", json!({ "id": format!("u{n}"), "at": at }).to_string()).await.accepted();
        }
        let wanted = jiff::Timestamp::from_second(1_790_000_001).unwrap();
        for row in world.db.rows("SELECT * FROM inbox").await {
            let at = time(&row, "scheduled_at");
            if text(&row, "idempotency_key").starts_with('t') {
                assert_eq!(at, wanted, "{row:#}");
            } else {
                let delay = at.duration_since(time(&row, "created_at")).as_secs_f64();
                assert!((0.99..=1.01).contains(&delay), "{row:#}");
            }
        }
        let warnings = worker.process.output().matches("not a publish time").count();
        assert_eq!(warnings, 1, "three times of junk within a minute: {}", worker.process.output());
        world.finish().await;
    }
}

async fn publish_time_formats(kind: Kind) {
    publish_time::formats(kind).await;
}

async fn correlation_id_travels(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({}));
    let worker = world.start().await;
    let answer = worker.post_with("hooks", &[("X-Correlation-Id", "c-77")], r#"{"id":1}"#).await;
    answer.accepted();
    assert_eq!(answer.header("x-correlation-id"), "c-77");
    assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "correlation_id"), "c-77");
    let request = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    assert_eq!(request.header("x-correlation-id"), "c-77");
    world.finish().await;
}

async fn correlation_id_is_made(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({}));
    let worker = world.start().await;
    let answer = worker.post("hooks", r#"{"id":1}"#).await;
    answer.accepted();
    let made = answer.header("x-correlation-id");
    assert!(uuid::Uuid::parse_str(made).is_ok(), "{made}");
    assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "correlation_id"), made);
    world.finish().await;
}

async fn ids_over_replays(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({ "topic": "order" }));
    let worker = world.start().await;
    let inbox = worker.post("hooks", r#"{"id":"k-1"}"#).await.accepted();
    let first = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    let outbox = first.header("x-message-id").to_owned();
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    let moved = worker.admin("/admin/outbox/requeue", json!({ "ids": [outbox], "state": ["sent"] })).await;
    assert_eq!(moved.json()["moved"], 1, "{moved:?}");
    let second = world.receiver.wait_for(2, PATIENCE).await.remove(1);
    assert_eq!(second.header("x-message-id"), outbox);
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    let moved = worker.admin("/admin/inbox/requeue", json!({ "ids": [inbox], "state": ["processed"] })).await;
    assert_eq!(moved.json()["moved"], 1, "{moved:?}");
    let third = world.receiver.wait_for(3, PATIENCE).await.remove(2);
    assert_ne!(third.header("x-message-id"), outbox);
    for request in [&first, &second, &third] {
        assert_eq!(request.header("x-inbox-id"), inbox);
        assert_eq!((request.header("x-source"), request.header("x-idempotency-key")), ("hooks", "k-1"));
    }
    world.db.wait_states("outbox", &[("sent", 2)]).await;
    world.finish().await;
}

async fn join_statements_work(kind: Kind) {
    let contract = std::fs::read_to_string(queuebox_testkit::workspace_root().join("docs/contract.md")).unwrap();
    let marker = match kind {
        Kind::Postgres => "-- PostgreSQL\n",
        Kind::Sqlite => "-- SQLite\n",
    };
    let begin = contract.find(marker).expect("the statement's comment") + marker.len();
    let statement = &contract[begin..begin + contract[begin..].find(';').unwrap()];
    assert!(statement.starts_with("SELECT i.id"), "{statement}");
    // The same columns twice have no names of their own in an object.
    let renamed = statement.replacen("i.id, i.state, o.id,", "i.id AS inbox_id, i.state AS inbox_state, o.id,", 1);
    let world = World::on(kind).await.source("github", json!({ "topic": "order" }));
    let worker = world.start().await;
    let inbox = worker.post("github", r#"{"id":"d-42"}"#).await.accepted();
    worker.post("github", r#"{"id":"d-43"}"#).await.accepted();
    world.db.wait_states("outbox", &[("sent", 2)]).await;
    world.db.execute(&format!("CREATE TABLE found AS {renamed}")).await;
    let row = world.db.row("SELECT * FROM found").await;
    assert_eq!((text(&row, "inbox_id"), text(&row, "topic")), (inbox.as_str(), "order"));
    assert_eq!((text(&row, "inbox_state"), text(&row, "state")), ("processed", "sent"));
    world.finish().await;
}

async fn trace_context_travels(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({}));
    let worker = world.start().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    worker.post_with("hooks", &[("traceparent", trace)], r#"{"id":1}"#).await.accepted();
    let request = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    assert_eq!(request.header("traceparent"), trace);
    assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "trace_parent"), trace);
    world.db.insert(OutboxRow::new("order", 1).set("trace_parent", &quoted(trace))).await;
    let request = world.receiver.wait_for(2, PATIENCE).await.remove(1);
    assert_eq!(request.header("traceparent"), trace);
    world.finish().await;
}

async fn payload_keeps_its_digits(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({}));
    world.receiver.answer_always(Answer::ok());
    let worker = world.start().await;
    let body = r#"{"id": 12345678901234567890123, "amount": 0.1000000000000000055511151231257827, "text": "\u00e9 😀 \"x\" 日本", "list": [9007199254740993, -1]}"#;
    worker.post("hooks", body).await.accepted();
    let request = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    // Numbers are compared as they are written: serde_json keeps their text here.
    let (sent, got): (Value, Value) = (serde_json::from_str(body).unwrap(), request.json());
    assert_eq!(got, sent);
    assert!(
        request.text().contains("12345678901234567890123")
            && request.text().contains("0.1000000000000000055511151231257827")
    );
    assert_eq!(request.header("x-idempotency-key"), "12345678901234567890123");
    world.finish().await;
}

on_every_database!(
    webhook_is_stored,
    webhook_repeat_is_a_duplicate,
    webhook_invalid_json_is_400,
    webhook_without_key_is_400,
    webhook_event_type_from_path,
    webhook_key_header_wins,
    github_delivery_repeat_is_one_row,
    github_same_body_two_deliveries,
    keys_never_merge,
    initial_delay_holds,
    ids_over_replays,
    join_statements_work,
    payload_keeps_its_digits,
);
on_postgres!(
    aggregate_expression_splits_a_value,
    publish_time_formats,
    correlation_id_travels,
    correlation_id_is_made,
    trace_context_travels,
);
