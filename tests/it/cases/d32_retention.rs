//! D32: retention deletes too much.

use serde_json::json;

use crate::support::{Db, Kind, OutboxRow, PATIENCE, World, on_every_database, quoted};

const DAYS_40: i64 = -40 * 86_400;

/// Outbox and inbox rows in every state, all of them 40 days old.
async fn old_rows(db: &Db) {
    let (old, tomorrow, lease, ended) =
        (db.in_seconds(DAYS_40), db.in_seconds(86_400), db.in_seconds(3600), db.in_seconds(-60));
    let row = |state: &str| {
        OutboxRow::new("order", 1).set("state", &quoted(state)).set("created_at", &old).set("updated_at", &old)
    };
    let token = "'44444444-4444-4444-8444-444444444444'";
    db.insert_all([
        row("pending"),
        row("pending").set("scheduled_at", &tomorrow),
        row("processing").set("claim_token", token).set("lease_expires_at", &lease),
        row("processing").set("claim_token", token).set("lease_expires_at", &ended),
        row("sent"),
        row("dead").set("last_error", "'attempts: no'"),
    ])
    .await;
    for state in ["pending", "processing", "processed", "dead"] {
        let lease = if state == "processing" { lease.as_str() } else { "NULL" };
        db.execute(&format!(
            "INSERT INTO inbox (source, idempotency_key, payload, consumption, state, created_at, lease_expires_at) \
             VALUES ('hooks', '{state}', '{{}}', 'pull', '{state}', {old}, {lease})"
        ))
        .await;
    }
}

async fn finished_rows_only(kind: Kind) {
    // Nothing is sent here, so that each row stays in its state.
    let world = World::on(kind)
        .await
        .destination("receiver", json!({ "paused": true }))
        .source("hooks", json!({ "consumption": "pull", "topic": null }))
        .relay(json!({ "retention": { "outbox": { "maxAge": "30d" }, "inbox": { "maxAge": "30d" } } }));
    world.migrate().await;
    old_rows(&world.db).await;
    let worker = world.start().await;
    for table in ["outbox", "inbox"] {
        let labels = [("table", table)];
        worker.wait_metric("queuebox_cleanup_messages_deleted_total", &labels, |n| n == 2.0).await;
        worker.wait_metric("queuebox_cleanup_last_run_timestamp", &labels, |at| at > 0.0).await;
    }
    assert_eq!(world.db.count("SELECT count(*) FROM outbox WHERE state IN ('pending', 'processing')").await, 4);
    assert_eq!(world.db.count("SELECT count(*) FROM outbox").await, 4);
    world.db.wait_states("inbox", &[("pending", 1), ("processing", 1)]).await;
    // A key whose row is gone counts as new; one whose row is there is a repeat.
    worker.post("hooks", r#"{"id":"processed"}"#).await.accepted();
    assert_eq!(worker.post("hooks", r#"{"id":"pending"}"#).await.status, 200);
    let contract = std::fs::read_to_string(queuebox_testkit::workspace_root().join("docs/contract.md")).unwrap();
    assert!(contract.contains("Deleting an inbox row ends its deduplication"));
    world.finish().await;
}

#[tokio::test]
async fn odd_ages_are_refused() {
    for age in ["30", "-1d", "0s", "1.5h"] {
        for table in ["outbox", "inbox"] {
            let world = World::on(Kind::Sqlite).await.relay(json!({ "retention": { table: { "maxAge": age } } }));
            let folder = world.write_manifests(1, 2);
            let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
            assert_eq!(status.code(), Some(1), "{age}: {out}{log}");
            assert!(format!("{out}{log}").contains(&format!("spec.retention.{table}.maxAge")), "{age}: {out}{log}");
        }
    }
}

on_every_database!(finished_rows_only);
