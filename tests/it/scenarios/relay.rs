//! Section D: the relay. HTTP sources.

use std::collections::{BTreeMap, BTreeSet};

use queuebox_testkit::{Answer, Recorded, promise};
use serde_json::json;

use crate::support::{Kind, PATIENCE, World, number, on_every_database, on_postgres, text};

async fn webhook_reaches_its_destination(kind: Kind) {
    let source = json!({ "topic": "order.paid", "aggregateIdPath": "$.order" });
    let world = World::on(kind).await.source("payments", source);
    let worker = world.start().await;
    let id = worker.post("payments", r#"{"id":"p-1","order":"o-9","amount":12}"#).await.accepted();
    let request = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    assert_eq!(request.json(), json!({ "id": "p-1", "order": "o-9", "amount": 12 }));
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    let inbox = world.db.row("SELECT * FROM inbox").await;
    assert_eq!((text(&inbox, "id"), text(&inbox, "state")), (id.as_str(), "processed"));
    assert!(!inbox["processed_at"].is_null());
    let outbox = world.db.row("SELECT * FROM outbox").await;
    assert_eq!((text(&outbox, "topic"), text(&outbox, "key")), ("order.paid", "o-9"));
    let of_row = |name: &str| outbox["headers"][name].as_str().unwrap_or_default().to_owned();
    for (name, value) in [("x-source", "payments"), ("x-inbox-id", &id), ("x-idempotency-key", "p-1")] {
        assert_eq!(of_row(name), value, "{name}");
        assert_eq!(request.header(name), value, "{name}");
    }
    assert_eq!(world.receiver.count(), 1);
    world.finish().await;
}

async fn two_relays_forward_each_row_once(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({}));
    let workers = [world.start().await, world.start().await];
    world.spread_over(2).await;
    for n in 0..100 {
        workers[n % 2].post("hooks", json!({ "id": n }).to_string()).await.accepted();
    }
    world.db.wait_states("inbox", &[("processed", 100)]).await;
    world.db.wait_states("outbox", &[("sent", 100)]).await;
    let arrived: BTreeSet<String> =
        world.receiver.requests().iter().map(|r| r.header("x-inbox-id").to_owned()).collect();
    promise((world.receiver.count(), arrived.len()) == (100, 100), format_args!("not each once: {arrived:?}"));
    if kind == Kind::Postgres {
        for worker in &workers {
            let sent = worker.metric("queuebox_outbox_messages_total", &[("status", "sent")]).await;
            assert!(sent > 0.0, "one of them did nothing");
        }
    }
    world.finish().await;
}

mod lost_mark_makes_no_second_row {
    use super::*;

    /// Somebody takes the row between the read and the mark of the forward. (A SQLite file that somebody writes to lets no worker begin;
    /// there the suite of the stores shows it.)
    #[tokio::test]
    async fn on_postgres() {
        let world = World::on(Kind::Postgres)
            .await
            .source("hooks", json!({}))
            .relay(json!({ "inbox": { "relay": { "enabled": false } } }));
        let worker = world.start().await;
        worker.post("hooks", r#"{"id":1}"#).await.accepted();
        worker.process.terminate(PATIENCE).await;
        // The worker reads the row as it was before this transaction, and meets its outcome when it marks it.
        let mut other = world.db.begin().await;
        other.execute("UPDATE inbox SET state = 'processing'").await;
        let world = world.relay(json!({ "inbox": { "relay": { "enabled": true } } }));
        let worker = world.start().await;
        let waits = "SELECT count(*) AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND datname = current_database()";
        world.db.wait_row(waits, |row| number(row, "n") > 0).await;
        other.commit().await;
        worker.wait_metric("queuebox_claims_lost_total", &[("component", "inbox")], |lost| lost == 1.0).await;
        assert_eq!(world.db.count("SELECT count(*) AS n FROM outbox").await, 0, "rolled back");
        world.db.execute("UPDATE inbox SET state = 'pending'").await;
        world.db.wait_states("inbox", &[("processed", 1)]).await;
        world.db.wait_states("outbox", &[("sent", 1)]).await;
        assert_eq!(world.receiver.count(), 1);
        world.finish().await;
    }
}

/// A trigger that refuses outbox rows, and what takes it away again.
fn refusing(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Postgres => (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '53100'; END $$; \
             CREATE TRIGGER refuse BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()",
            "DROP TRIGGER refuse ON outbox",
        ),
        Kind::Sqlite => (
            "CREATE TRIGGER refuse BEFORE INSERT ON outbox BEGIN SELECT RAISE(ABORT, 'not now'); END",
            "DROP TRIGGER refuse",
        ),
    }
}

async fn failed_forward_changes_nothing(kind: Kind) {
    // SQLite's refusal looks like the row's own fault, which would end it.
    let world = World::on(kind).await.source("hooks", json!({})).relay(json!({ "inbox": { "maxCrashes": 1000 } }));
    let worker = world.start().await;
    let (refuse, allow) = refusing(kind);
    world.db.execute(refuse).await;
    worker.post("hooks", r#"{"id":1}"#).await.accepted();
    worker.wait_metric("queuebox_inbox_relay_errors_total", &[], |errors| errors >= 1.0).await;
    assert_eq!(world.db.count("SELECT count(*) AS n FROM outbox").await, 0);
    assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "state"), "pending");
    world.db.execute(allow).await;
    world.db.wait_states("inbox", &[("processed", 1)]).await;
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    assert_eq!(world.receiver.count(), 1);
    world.finish().await;
}

async fn consumption_is_fixed_at_receipt(kind: Kind) {
    let pull = World::on(kind).await.source("hooks", json!({ "consumption": "pull", "topic": null }));
    let worker = pull.start().await;
    worker.post("hooks", r#"{"id":"was-pull"}"#).await.accepted();
    worker.process.terminate(PATIENCE).await;
    let push = pull.source("hooks", json!({ "consumption": "push", "topic": "order" }));
    let worker = push.start().await;
    worker.post("hooks", r#"{"id":"is-push"}"#).await.accepted();
    push.db.wait_states("inbox", &[("pending", 1), ("processed", 1)]).await;
    worker.process.terminate(PATIENCE).await;
    // The reverse: stored for push while the relay is off, then the source pulls.
    let off = push.relay(json!({ "inbox": { "relay": { "enabled": false } } }));
    let worker = off.start().await;
    worker.post("hooks", r#"{"id":"was-push"}"#).await.accepted();
    worker.process.terminate(PATIENCE).await;
    let world = off
        .relay(json!({ "inbox": { "relay": { "enabled": true } } }))
        .source("hooks", json!({ "consumption": "pull", "topic": null }));
    world.start().await;
    world.db.wait_states("inbox", &[("pending", 1), ("processed", 2)]).await;
    let left = world.db.row("SELECT * FROM inbox WHERE state = 'pending'").await;
    assert_eq!((text(&left, "idempotency_key"), text(&left, "consumption")), ("was-pull", "pull"));
    world.finish().await;
}

async fn empty_topic_is_dead(kind: Kind) {
    let source = json!({ "topic": "{{ eventType }}", "eventTypePath": "$.type" });
    let world =
        World::on(kind).await.source("hooks", source).relay(json!({ "inbox": { "relay": { "enabled": false } } }));
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":"with","type":"order.paid"}"#).await.accepted();
    worker.process.terminate(PATIENCE).await;
    // The template changes: what is stored stays.
    let world = world
        .source("hooks", json!({ "topic": "changed.{{ eventType }}" }))
        .relay(json!({ "inbox": { "relay": { "enabled": true } } }));
    let worker = world.start().await;
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    assert_eq!(world.receiver.requests()[0].header("x-topic"), "order.paid");
    worker.process.terminate(PATIENCE).await;
    world.db.execute("DELETE FROM inbox").await;
    let world = world.source("hooks", json!({ "topic": "{{ eventType }}" }));
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":"again"}"#).await.accepted();
    let row = world.db.wait_row("SELECT * FROM inbox", |row| text(row, "state") == "dead").await;
    assert!(text(&row, "last_error").starts_with("empty_topic: "), "{row:#}");
    world.finish().await;
}

async fn relay_one_in_flight_per_aggregate(kind: Kind) {
    let path = json!({ "topic": "order", "aggregateIdPath": "$.order" });
    let world = World::on(kind)
        .await
        .source("one", path.clone())
        .source("two", path)
        .relay(json!({ "inbox": { "relay": { "enabled": false } } }));
    let worker = world.start().await;
    for n in 0..30 {
        let body = json!({ "id": n, "order": "the-one", "n": n }).to_string();
        worker.post(["one", "two"][n / 2 % 2], body).await.accepted();
    }
    worker.process.terminate(PATIENCE).await;
    if kind == Kind::Postgres {
        // Two forwards of the aggregate at once fail here, and are counted.
        let alone = "CREATE FUNCTION alone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                     IF NOT pg_try_advisory_xact_lock(hashtext(NEW.key)) THEN RAISE EXCEPTION 'two at once'; END IF; \
                     PERFORM pg_sleep(0.01); RETURN NEW; END $$; \
                     CREATE TRIGGER alone BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION alone()";
        world.db.execute(alone).await;
    }
    let world = world.relay(json!({ "inbox": { "relay": { "enabled": true } } }));
    let workers = [world.start().await, world.start().await];
    world.db.wait_states("inbox", &[("processed", 30)]).await;
    for worker in &workers {
        assert_eq!(worker.metric("queuebox_inbox_relay_errors_total", &[]).await, 0.0);
    }
    world.db.wait_states("outbox", &[("sent", 30)]).await;
    let requests = world.receiver.requests();
    assert_eq!(requests.len(), 30);
    assert!(requests.iter().all(|request| request.in_flight == 1), "two of one aggregate at once");
    // Stored one after the other, so forwarded and delivered in that order over both sources.
    let numbers: Vec<i64> = requests.iter().map(|request| request.json()["n"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (0..30).collect::<Vec<i64>>());
    world.finish().await;
}

async fn relay_keeps_aggregate_order(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({ "topic": "order", "aggregateIdPath": "$.order" }));
    world.receiver.answer_with(|r| {
        Answer::status(if r.json()["id"] == "k1" && r.header("x-attempt") == "0" { 500 } else { 200 })
    });
    // All of them wait when the forward begins.
    let world = world.relay(json!({ "inbox": { "relay": { "enabled": false } } }));
    let worker = world.start().await;
    for n in 0..4 {
        worker.post("hooks", json!({ "id": format!("k{n}"), "order": "o" }).to_string()).await.accepted();
    }
    worker.process.terminate(PATIENCE).await;
    let world = world.relay(json!({ "inbox": { "relay": { "enabled": true } } }));
    world.start().await;
    world.db.wait_states("outbox", &[("sent", 4)]).await;
    let rows = world.db.rows("SELECT * FROM outbox ORDER BY sequence").await;
    let forwarded: Vec<&str> = rows.iter().map(|row| row["payload"]["id"].as_str().unwrap()).collect();
    assert_eq!(forwarded, ["k0", "k1", "k2", "k3"]);
    let arrived: Vec<String> =
        world.receiver.requests().iter().map(|r| r.header("x-idempotency-key").to_owned()).collect();
    assert_eq!(arrived, ["k0", "k1", "k1", "k2", "k3"]);
    world.finish().await;
}

async fn relay_ignores_pull_rows(kind: Kind) {
    let world = World::on(kind)
        .await
        .source("pulled", json!({ "consumption": "pull", "topic": null, "aggregateIdPath": "$.order" }))
        .source("pushed", json!({ "topic": "order", "aggregateIdPath": "$.order" }));
    let worker = world.start().await;
    for n in 0..3 {
        let body = json!({ "id": n, "order": "o" }).to_string();
        worker.post("pulled", body.clone()).await.accepted();
        worker.post("pushed", body).await.accepted();
    }
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    let states = world.db.rows("SELECT consumption, state, count(*) AS n FROM inbox GROUP BY consumption, state").await;
    let states: BTreeMap<&str, (&str, i64)> =
        states.iter().map(|row| (text(row, "consumption"), (text(row, "state"), number(row, "n")))).collect();
    assert_eq!(states, BTreeMap::from([("pull", ("pending", 3)), ("push", ("processed", 3))]));
    assert!(world.receiver.requests().iter().all(|r: &Recorded| r.header("x-source") == "pushed"));
    world.finish().await;
}

on_every_database!(
    webhook_reaches_its_destination,
    two_relays_forward_each_row_once,
    failed_forward_changes_nothing,
    relay_keeps_aggregate_order,
    relay_ignores_pull_rows,
);
on_postgres!(consumption_is_fixed_at_receipt, empty_topic_is_dead);
on_every_database!(relay_one_in_flight_per_aggregate);
