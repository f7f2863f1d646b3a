//! Sections J, L, M and O, as somebody who operates QueueBox meets them: signatures in time, transforms on trial, metrics beside
//! much data, retention beside traffic.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use futures::StreamExt;
use hmac::{KeyInit, Mac};
use queuebox_testkit as testkit;
use serde_json::{Value, json};

use super::soak::setting;
use crate::support::{Answered, Db, Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, on_postgres, text};

#[tokio::test]
async fn transform_test_route() {
    let world = World::on(Kind::Sqlite).await.env("ADMIN", "open").relay(json!({
        "admin": {
            "enabled": true, "insecure": null, "auth": { "bearer": { "tokenFrom": { "env": "ADMIN" } } },
            "maxPayloadSize": "4KiB", "maxTransformTimeout": "500ms",
        },
    }));
    let worker = world.start().await;
    let client = reqwest::Client::new();
    let ask = async |body: Value| {
        let request = client.post(worker.management_url("/admin/transform/test")).bearer_auth("open");
        Answered::of(request.header("content-type", "application/json").body(body.to_string())).await
    };
    let good = ask(json!({
        "expression": "{\"n\": n + 1, \"topic\": $topic, \"source\": $source, \"id\": $messageId, \"attempt\": $attempt}",
        "payload": { "n": 1 }, "mockTopic": "order.paid", "mockSource": "shop",
    }))
    .await;
    assert_eq!((good.status, &good.json()["success"]), (200, &json!(true)), "{good:?}");
    let (result, context) = (good.json()["result"].clone(), good.json()["context"].clone());
    assert_eq!((text(&context, "topic"), context["attempt"].as_i64()), ("order.paid", Some(0)));
    assert!(text(&context, "timestamp").parse::<jiff::Timestamp>().is_ok(), "{context}");
    let wanted = json!({ "n": 2, "topic": "order.paid", "source": "shop", "id": context["messageId"], "attempt": 0 });
    assert_eq!(result, wanted);
    let plain = ask(json!({ "expression": "$topic", "payload": 1 })).await.json();
    assert_eq!((&plain["result"], &plain["context"]["topic"]), (&json!("test.topic"), &json!("test.topic")));

    // It ends, whatever is asked for.
    let endless = json!({ "expression": "($f := function($n) { $f($n + 1) }; $f(0))", "payload": 1, "timeoutMs": 500 });
    let endless = ask(endless).await;
    assert_eq!((endless.status, &endless.json()["success"]), (400, &json!(false)), "{endless:?}");
    for (body, prefix) in [
        (json!({ "expression": "(", "payload": 1 }), "Invalid expression: "),
        (json!({ "expression": "1" }), "Invalid request: "),
        (json!({ "expression": "1", "payload": 1, "timeoutMs": 60_000 }), "Invalid request: timeoutMs"),
        (json!({ "expression": "1", "payload": 1, "mockTopik": "a" }), "Invalid request: "),
    ] {
        let answer = ask(body.clone()).await;
        assert_eq!((answer.status, &answer.json()["success"]), (400, &json!(false)), "{body}: {answer:?}");
        assert!(text(&answer.json(), "error").starts_with(prefix), "{body}: {answer:?}");
    }
    let large = ask(json!({ "expression": "1", "payload": "x".repeat(5_000) })).await;
    assert_eq!((large.status, &large.json()["success"]), (413, &json!(false)), "{large:?}");
    let unknown = worker.admin("/admin/transform/test", json!({ "expression": "1", "payload": 1 })).await;
    assert_eq!((unknown.status, &unknown.json()["success"]), (401, &json!(false)), "{unknown:?}");
    world.finish().await;
}

fn hmac_sha256(secret: &[u8], text: &str) -> Vec<u8> {
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(secret).unwrap();
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

mod signature_time_window {
    use super::*;

    const SECRET: &str = "c2VjcmV0LW9mLXRoZS10ZXN0";

    /// Headers of a source's signature over a body, for a timestamp as it is written.
    fn signed(source: &str, at: &str, body: &str) -> Vec<(&'static str, String)> {
        match source {
            "own" => vec![
                ("x-timestamp", at.to_owned()),
                ("x-signature", format!("sha256={}", hex(&hmac_sha256(SECRET.as_bytes(), &format!("{at}.{body}"))))),
            ],
            "stripe" => {
                let mac = hex(&hmac_sha256(SECRET.as_bytes(), &format!("{at}.{body}")));
                vec![("stripe-signature", format!("t={at},v1={mac}"))]
            }
            _ => {
                let key = BASE64.decode(SECRET).unwrap();
                let mac = BASE64.encode(hmac_sha256(&key, &format!("msg.{at}.{body}")));
                vec![
                    ("webhook-id", "msg".to_owned()),
                    ("webhook-timestamp", at.to_owned()),
                    ("webhook-signature", format!("v1,{mac}")),
                ]
            }
        }
    }

    async fn post(worker: &Worker, source: &str, headers: &[(&str, String)], body: &str) -> u16 {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        worker.post_with(source, &headers, body).await.status
    }

    #[tokio::test]
    async fn inside_and_outside() {
        let from = json!({ "env": "SECRET" });
        let own =
            json!({ "hmac": { "secretFrom": from, "timestampHeader": "X-Timestamp", "timestampTolerance": "5m" } });
        let with = |path: &str, auth: Value| json!({ "http": { "path": path, "auth": auth } });
        let world = World::on(Kind::Sqlite)
            .await
            .env("SECRET", SECRET)
            .relay(json!({ "inbox": { "relay": { "enabled": false } } }))
            .source("own", with("/own", own))
            .source("stripe", with("/stripe", json!({ "stripe": { "secretFrom": from } })))
            .source("standard", with("/standard", json!({ "standardWebhooks": { "secretFrom": from } })));
        let worker = world.start().await;
        let mut stored = 0;
        for (source, is_ms) in [("own", true), ("stripe", false), ("standard", false)] {
            let now = jiff::Timestamp::now().as_second();
            let unit = if is_ms { 1000 } else { 1 };
            // Ten seconds of room: the clock goes on while requests are made.
            for (offset, inside) in [(-290, true), (290, true), (0, true), (-310, false), (320, false)] {
                let body = format!("{{\"id\":\"{source}{offset}\"}}");
                let headers = signed(source, &((now + offset) * unit).to_string(), &body);
                let status = post(&worker, source, &headers, &body).await;
                assert_eq!(status, if inside { 202 } else { 401 }, "{source} {offset}");
                stored += i64::from(inside);
            }
            // The other unit, and what is no time of this century or no time at all.
            let other = if is_ms { now } else { now * 1000 };
            let junk = [other.to_string(), "1.7e12".into(), "-1".into(), String::new(), "9".repeat(40), "now".into()];
            for at in junk {
                let body = r#"{"id":"junk"}"#;
                assert_eq!(post(&worker, source, &signed(source, &at, body), body).await, 401, "{source} {at:?}");
            }
            // Absent, repeated, and swapped between two requests that are right.
            let (one, two) = (r#"{"id":"swap1"}"#, r#"{"id":"swap2"}"#);
            let good = signed(source, &(now * unit).to_string(), one);
            for (index, _) in good.iter().enumerate() {
                let mut without = good.clone();
                without.remove(index);
                assert_eq!(post(&worker, source, &without, one).await, 401, "{source} without {}", good[index].0);
                let twice = [&good[..], &good[index..=index]].concat();
                assert_eq!(post(&worker, source, &twice, one).await, 401, "{source} with {} twice", good[index].0);
            }
            let elder = signed(source, &((now - 5) * unit).to_string(), two);
            if good.len() > 1 {
                let stamp = good.len() - 2;
                let mut swapped = good.clone();
                swapped[stamp] = elder[stamp].clone();
                assert_eq!(post(&worker, source, &swapped, one).await, 401, "{source}: the signature covers the time");
            }
            assert_eq!(post(&worker, source, &good, two).await, 401, "{source}: the signature covers the body");
        }
        assert_eq!(world.db.count("SELECT count(*) FROM inbox").await, stored, "what is refused leaves no row");
        world.finish().await;
    }
}

/// The figures of case D41.
const UNKNOWN_PATHS: i64 = 10_000;
const EVENT_TYPES: i64 = 1_000;

async fn metrics_do_not_grow_with_data(kind: Kind) {
    let world = World::on(kind)
        .await
        .routes(&[("live.**", &["receiver"])])
        .relay(json!({ "outbox": { "pendingGaugeInterval": "1s" } }))
        .source("hooks", json!({ "topic": "live.{{ eventType }}", "eventTypePath": "$.type" }));
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":"first","type":"first"}"#).await.accepted();
    world.receiver.wait_for(1, PATIENCE).await;
    let lines = async || worker.get("/metrics").await.body.lines().count();
    let before = lines().await;
    // A topic and a key each; most of them lead nowhere, which is the fastest way through.
    world
        .db
        .execute(
            "INSERT INTO outbox (topic, key, payload) \
             SELECT CASE WHEN n % 100 = 0 THEN 'live.' ELSE 'topic-' END || n, 'key-' || n, '{}' FROM generate_series(1, 100000) n",
        )
        .await;
    let (client, at) = (&reqwest::Client::new(), &worker);
    let unknown = futures::stream::iter(0..UNKNOWN_PATHS).map(|n| async move {
        let answer = client.get(at.url(&format!("/unknown/{n}"))).send().await.unwrap();
        assert_eq!(answer.status(), 404);
    });
    let typed = futures::stream::iter(0..EVENT_TYPES).map(|n| async move {
        at.post("hooks", json!({ "id": n, "type": format!("type-{n}") }).to_string()).await.accepted();
    });
    tokio::join!(unknown.buffer_unordered(16).count(), typed.buffer_unordered(16).count());
    world.db.wait_states("outbox", &[("dead", 99_000), ("sent", 1_001 + EVENT_TYPES)]).await;
    let page = worker.get("/metrics").await.body;
    let grown = page.lines().count().saturating_sub(before);
    assert!(grown < 200, "{grown} new lines");
    for part in ["topic-", "live.", "key-", "type-", "unknown"] {
        assert!(!page.contains(part), "{part} in {page}");
    }
    world.finish().await;
}

/// So many rows that are old enough in each table, in portions that block no other writer of a file for long.
async fn grow_old(db: &Db, rows: i64) {
    let old = db.in_seconds(-7200);
    for first in (1..=rows).step_by(5_000) {
        let last = (first + 4_999).min(rows);
        let numbers =
            format!("WITH RECURSIVE s(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last}) SELECT");
        let outbox = "INSERT INTO outbox (topic, key, payload, state, created_at, updated_at)";
        db.execute(&format!("{outbox} {numbers} 'old', 'k' || n, '{{}}', 'sent', {old}, {old} FROM s")).await;
        let inbox = "INSERT INTO inbox (source, idempotency_key, payload, state, created_at, processed_at)";
        db.execute(&format!("{inbox} {numbers} 'old', 'k' || n, '{{}}', 'processed', {old}, {old} FROM s")).await;
    }
}

/// The deletes of all workers.
async fn deleted(workers: &[Arc<Worker>], table: &str) -> f64 {
    let labels = [("table", table)];
    let counts = workers.iter().map(|worker| worker.metric("queuebox_cleanup_messages_deleted_total", &labels));
    futures::future::join_all(counts).await.into_iter().sum()
}

/// Old rows in both tables go while messages flow: rows of an application and webhooks, round after round, each of which has to arrive
/// before the next one begins. `./dev test soak` has the size that is promised.
async fn retention_beside_traffic(kind: Kind) {
    let old_rows = setting("QUEUEBOX_OLD_ROWS", 40_000).cast_signed();
    let rule = json!({ "maxAge": "1h", "cleanupInterval": "1s", "batchSize": old_rows / 200 });
    let world = World::on(kind)
        .await
        .source("hooks", json!({ "topic": "live" }))
        .relay(json!({ "retention": { "outbox": rule, "inbox": rule } }));
    let workers = [world.start().await, world.start().await, world.start().await];
    grow_old(&world.db, old_rows).await;
    let left = "SELECT (SELECT count(*) FROM outbox WHERE topic = 'old') + (SELECT count(*) FROM inbox WHERE source = 'old') AS n";
    let (mut rounds, mut rounds_beside) = (0, 0);
    loop {
        world.db.insert_all((0..10).map(|n| OutboxRow::new("live", n).key(&format!("k{n}")))).await;
        // On SQLite the others stand by.
        let open = &workers[if kind == Kind::Sqlite { 0 } else { rounds % 3 }];
        open.post("hooks", json!({ "id": rounds }).to_string()).await.accepted();
        rounds += 1;
        world.receiver.wait_for(rounds * 11, PATIENCE).await;
        let left = world.db.count(left).await;
        if left == 0 {
            break;
        }
        rounds_beside += i32::from(left < 2 * old_rows);
    }
    assert!(rounds_beside > 0, "nothing flowed beside the deletes");
    let rounds = i64::try_from(rounds).unwrap();
    world.db.wait_states("outbox", &[("sent", rounds * 11)]).await;
    world.db.wait_states("inbox", &[("processed", rounds)]).await;
    assert_eq!(i64::try_from(world.receiver.count()).unwrap(), rounds * 11, "each once, beside the deletes");
    for table in ["outbox", "inbox"] {
        testkit::eventually("every delete is counted", PATIENCE, || async {
            (deleted(&workers, table).await == old_rows as f64).then_some(())
        })
        .await;
    }
    for worker in &workers {
        assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
        let log = worker.process.output();
        assert!(!log.contains("ERROR") && !log.contains("clean-up was given up"), "{log}");
    }
    world.finish().await;
}

on_every_database!(retention_beside_traffic);
on_postgres!(metrics_do_not_grow_with_data);
