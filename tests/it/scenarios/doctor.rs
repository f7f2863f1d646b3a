//! `queuebox doctor`: each finding with its fix.

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use crate::support::{Kind, PATIENCE, World, on_every_database, on_postgres, text};

async fn examine(world: &World) -> (Option<i32>, Vec<Value>) {
    let folder = world.write_manifests(1, 2);
    let program = world.program(&["doctor", "-f", folder.to_str().unwrap(), "--output", "json"]);
    let (status, out, log) = program.run(PATIENCE).await;
    let findings = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}\n{out}{log}"));
    (status.code(), findings)
}

fn level<'a>(findings: &'a [Value], check: &str) -> &'a str {
    findings.iter().find(|finding| text(finding, "check") == check).map_or("", |finding| text(finding, "level"))
}

async fn doctor_finds_nothing_wrong_with_a_new_database(kind: Kind) {
    let world = World::on(kind).await;
    world.migrate().await;
    let (status, findings) = examine(&world).await;
    assert_eq!(status, Some(0), "{findings:?}");
    assert!(findings.iter().all(|finding| text(finding, "level") == "ok"), "{findings:?}");
    assert!(findings.len() > 3, "{findings:?}");
    world.finish().await;
}

async fn doctor_names_what_is_missing(kind: Kind) {
    let amqp = json!({ "rabbitmq": { "urlFrom": { "env": "AMQP_URL" }, "exchange": "e" }, "http": null });
    let url = format!("amqp://guest:canary-7731@127.0.0.1:{}/%2f", testkit::free_port());
    let world = World::on(kind).await.destination("bus", amqp).env("AMQP_URL", &url);
    let world = world.routes(&[("order.*", &["receiver"]), ("**", &["bus"])]);
    // No tables yet, and nobody listens where the broker should be.
    let (status, findings) = examine(&world).await;
    assert_eq!(status, Some(1), "{findings:?}");
    assert_eq!(level(&findings, "destination bus"), "error", "{findings:?}");
    assert_eq!(level(&findings, "destination receiver"), "ok", "{findings:?}");
    let schema = if kind == Kind::Sqlite { "schema" } else { "tables" };
    assert_eq!(level(&findings, schema), "error", "{findings:?}");
    for finding in findings.iter().filter(|finding| text(finding, "level") == "error") {
        assert!(!text(finding, "fix").is_empty(), "{finding}");
        assert!(!finding.to_string().contains("canary"), "{finding}");
    }
    world.finish().await;
}

on_every_database!(doctor_finds_nothing_wrong_with_a_new_database, doctor_names_what_is_missing);

/// What a PostgreSQL server can have in the way.
async fn doctor_examines_the_server(kind: Kind) {
    assert_eq!(kind, Kind::Postgres);
    let world = World::on(kind).await;
    world.migrate().await;
    let filler =
        "INSERT INTO outbox (topic, payload, state) SELECT 't', '{}', 'pending' FROM generate_series(1, 20000)";
    world.db.execute(filler).await;
    world.db.execute("DROP INDEX idx_outbox_pending").await;
    world.db.execute("DROP INDEX idx_outbox_key").await;
    world.db.execute("ANALYZE outbox").await;
    let (status, findings) = examine(&world).await;
    assert_eq!((status, level(&findings, "plans")), (Some(0), "warning"), "{findings:?}");
    for check in ["pooler", "rights", "writes", "isolation", "clocks", "connections", "transactions", "indexes"] {
        assert_eq!(level(&findings, check), "ok", "{check}: {findings:?}");
    }
    world.finish().await;
}

on_postgres!(doctor_examines_the_server);
