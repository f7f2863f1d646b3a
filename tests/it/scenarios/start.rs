//! Sections N and R: starting, and what a start refuses.

use std::time::Duration;

use queuebox_testkit::{self as testkit, Process, Proxy, ProxyMode};
use serde_json::json;

use crate::support::{Db, Kind, OutboxRow, PATIENCE, World, on_every_database, on_postgres};

/// Runs `queuebox run` with the world's manifests, which must be refused; returns all it said.
pub async fn refused(world: &World) -> String {
    let folder = world.write_manifests(testkit::free_port(), testkit::free_port());
    let (status, out, log) = world.program(&["run", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    assert_eq!(status.code(), Some(1), "{out}{log}");
    format!("{out}{log}")
}

/// A world whose database is behind a proxy, and the proxy.
pub async fn behind_a_proxy() -> (World, Proxy) {
    let server = testkit::postgres().await;
    let name = server.fresh_database_name().await;
    let proxy = Proxy::to(server.port()).await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let db = Db::postgres(server.url_of(&name)).await;
    let world = World::with(db, folder).await.env("DATABASE_URL", &server.url_through(proxy.port(), &name));
    (world, proxy)
}

async fn start_waits_for_the_database(kind: Kind) {
    assert_eq!(kind, Kind::Postgres);
    let (world, proxy) = behind_a_proxy().await;
    proxy.set(ProxyMode::Refuse);
    let worker = world.spawn();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(worker.process.is_running(), "it gave up");
    // A restart would not help: it is alive, and takes no traffic.
    assert_eq!(worker.get("/livez").await.status, 200);
    assert_eq!(worker.get("/readyz").await.status, 503);
    proxy.set(ProxyMode::Pass);
    worker.ready().await;
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&id, "sent").await;
    world.finish().await;
}

async fn start_gives_up_with_the_field(kind: Kind) {
    assert_eq!(kind, Kind::Postgres);
    let (world, proxy) = behind_a_proxy().await;
    proxy.set(ProxyMode::Refuse);
    let world = world.relay(json!({ "database": { "startupTimeout": "2s" } }));
    let said = refused(&world).await;
    assert!(said.contains("startupTimeout"), "{said}");
    world.finish().await;
}

#[tokio::test]
async fn all_errors_at_once() {
    let world = World::on(Kind::Sqlite)
        .await
        .relay(json!({ "outbox": { "pollIntervall": "1s", "batchSize": "many" } }))
        .destination("nowhere", json!({}));
    let said = refused(&world).await;
    for part in [
        "spec.outbox.pollIntervall: unknown field (did you mean pollInterval?)",
        "spec.outbox.batchSize: expected a whole number",
        "Destination/nowhere: spec: give exactly one of http, rabbitmq, kafka, nats",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }

    // The variables of the classic file. What Kubernetes sets for services is none of them.
    let file = world.folder().join("queuebox.yml");
    std::fs::write(&file, "outbox:\n  pollIntervalMs: 100\n").unwrap();
    let classic = |variable: &str| {
        Process::program("/usr/bin/env")
            .args(["-i", "QUEUEBOX_API_SERVICE_HOST=10.0.0.1", "QUEUEBOX_API_PORT_80_TCP=tcp://10.0.0.1:80", variable])
            .arg(testkit_binary())
            .args(["check", "--config"])
            .arg(&file)
            .run(PATIENCE)
    };
    let (status, out, log) = classic("QUEUEBOX_OUTBOX_POLINTERVALMS=5").await;
    let said = format!("{out}{log}");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("QUEUEBOX_OUTBOX_POLINTERVALMS") && said.contains("pollIntervalMs"), "{said}");
    assert!(!said.contains("SERVICE_HOST") && !said.contains("PORT_80"), "{said}");
    let (status, out, log) = classic("QUEUEBOX_OUTBOX_POLLINTERVALMS=5").await;
    assert!(status.success(), "{out}{log}");
    world.finish().await;
}

/// The program under test.
fn testkit_binary() -> std::path::PathBuf {
    std::env::var_os("QUEUEBOX_BIN").map_or_else(
        || std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("queuebox"),
        Into::into,
    )
}

async fn renames_exclude_migrations(kind: Kind) {
    let renamed =
        json!({ "database": { "outboxTableName": "letters", "columnMapping": { "outbox": { "lastError": "why" } } } });
    let world = World::on(kind).await.relay(renamed);
    let said = refused(&world).await;
    let folder = world.write_manifests(1, 2);
    let (status, out, log) = world.program(&["migrate", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    assert!(!status.success());
    for said in [said, format!("{out}{log}")] {
        assert!(said.contains("outboxTableName") && said.contains("columnMapping.outbox.lastError"), "{said}");
    }
    world.finish().await;
}

#[tokio::test]
async fn unknown_route_target_is_refused() {
    let world = World::on(Kind::Sqlite).await.routes(&[("**", &["recever"])]);
    let said = refused(&world).await;
    assert!(said.contains("spec.routes[0].destinations[0]") && said.contains("did you mean receiver?"), "{said}");
    world.finish().await;
}

async fn short_outage_makes_no_dead_letters(kind: Kind) {
    // The defaults of the manifests: back-off, attempts and breaker as shipped.
    let world = World::on(kind)
        .await
        .relay(json!({ "outbox": { "backoff": null } }))
        .destination("receiver", json!({ "breaker": null }));
    world.start().await;
    let traffic = {
        let db = world.db.clone();
        tokio::spawn(async move {
            for n in 0..100 {
                db.insert(OutboxRow::new("order", n).key(&format!("k{}", n % 20))).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        })
    };
    world.receiver.wait_for(5, PATIENCE).await;
    world.receiver.stop().await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    world.receiver.restart().await;
    traffic.await.unwrap();
    world.db.wait_states("outbox", &[("sent", 100)]).await;
    let mut last = std::collections::BTreeMap::new();
    for request in world.receiver.requests() {
        let n = request.json()["n"].as_i64().unwrap();
        let before = last.insert(request.header("x-message-key").to_owned(), n);
        assert!(before <= Some(n), "{n} after {before:?}");
    }
    world.finish().await;
}

on_every_database!(renames_exclude_migrations, short_outage_makes_no_dead_letters);
on_postgres!(start_waits_for_the_database, start_gives_up_with_the_field);
