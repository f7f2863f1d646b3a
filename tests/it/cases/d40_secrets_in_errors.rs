//! D40: a secret in every place that takes one, a failure for each, and nothing of it anywhere.
//!
//! What the programs print is searched by the testkit itself when they end, in this test as in every other one.

use std::time::Duration;

use queuebox_testkit::{self as testkit, Answer, CANARY, Process};
use serde_json::{Value, json};

use crate::support::{Kind, OutboxRow, PATIENCE, World, on_every_database, text};

fn secret() -> Value {
    json!({ "env": "THE_SECRET" })
}

/// Destinations whose peers refuse, echo or are not there.
fn destinations(world: World) -> (World, Vec<&'static str>) {
    let echo = world.receiver.url_for("/echo");
    let token = world.receiver.url_for("/token");
    let nobody = testkit::free_port();
    let http = |auth: Value| json!({ "http": { "url": echo, "auth": auth } });
    let signed = |signing: Value| json!({ "http": { "url": echo, "signing": signing } });
    let all = [
        ("bearer", http(json!({ "bearer": { "tokenFrom": secret() } }))),
        ("basic", http(json!({ "basic": { "username": "u", "passwordFrom": secret() } }))),
        ("header", http(json!({ "header": { "name": "X-Key", "valueFrom": secret() } }))),
        ("oauth", http(json!({ "oauth2": { "clientId": "c", "clientSecretFrom": secret(), "tokenUrl": token } }))),
        ("hmac", signed(json!({ "hmac": { "secretFrom": secret() } }))),
        ("rabbit", json!({ "rabbitmq": { "urlFrom": { "env": "AMQP_URL" }, "exchange": "e" } })),
        (
            "nats",
            json!({ "nats": { "servers": format!("nats://127.0.0.1:{nobody}"), "subject": "s", "username": "u", "passwordFrom": secret() } }),
        ),
        (
            "kafka",
            json!({ "kafka": { "bootstrapServers": format!("127.0.0.1:{nobody}"), "topic": "t", "securityProtocol": "SASL_PLAINTEXT",
                "saslMechanism": "PLAIN", "saslUsername": "u", "saslPasswordFrom": secret() } }),
        ),
    ];
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let routes: Vec<Value> = names.iter().map(|name| json!({ "topics": [name], "destinations": [name] })).collect();
    let world = all.into_iter().fold(world, |world, (name, patch)| world.destination(name, patch));
    let world = world
        .relay(json!({ "routes": routes }))
        .env("THE_SECRET", CANARY)
        .env("AMQP_URL", &format!("amqp://u:{CANARY}@127.0.0.1:{nobody}/%2f"));
    (world, names)
}

async fn secrets_in_errors(kind: Kind) {
    let (world, names) = destinations(World::on(kind).await);
    // A receiver without manners: it repeats what it was told in its refusal.
    world.receiver.answer_with(|request| {
        let said: Vec<String> = request.headers.iter().map(|(name, value)| format!("{name}: {value:?}")).collect();
        Answer::status(401).body(format!("{} {} {}", request.path(), said.join(", "), request.text()))
    });
    let world = world
        .source("orders", json!({ "http": { "path": "/orders", "auth": { "bearer": { "tokenFrom": secret() } } } }));
    let folder = world.write_manifests(testkit::free_port(), testkit::free_port());
    let check = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    assert!(check.0.success(), "{check:?}");
    let worker = world.spawn_with(&["--log", "debug,sqlx=info,h2=info"]);
    worker.ready().await;
    for name in &names {
        world.db.insert(OutboxRow::new(name, 1).max_attempts(1)).await;
    }
    assert_eq!(worker.post_with("orders", &[("authorization", "Bearer wrong")], "{}").await.status, 401);
    let right = format!("Bearer {CANARY}");
    let body = r#"{"id":"1"}"#;
    assert_eq!(worker.post_with("orders", &[("authorization", &right)], body).await.status, 202);
    // The five over HTTP are refused once and dead; the brokers are not there and hold their rows.
    world
        .db
        .wait_row("SELECT count(*) AS n FROM outbox WHERE state = 'dead'", |row| row["n"].as_i64() >= Some(5))
        .await;
    let mut seen = Vec::new();
    for path in [
        "/status",
        "/metrics",
        "/health",
        "/admin/outbox",
        "/admin/inbox?state=pending",
        "/admin/inbox?state=processed",
    ] {
        seen.push((path.to_owned(), worker.get(path).await.body));
    }
    for row in world.db.rows("SELECT last_error FROM outbox WHERE last_error IS NOT NULL AND topic <> 'orders'").await {
        let error = text(&row, "last_error").to_owned();
        assert!(error.contains("401") || error.contains("token"), "the kind of failure is still told: {error}");
        seen.push(("last_error".to_owned(), error));
    }
    for row in world.db.rows("SELECT headers FROM inbox").await {
        seen.push(("inbox.headers".to_owned(), row.to_string()));
    }
    let list = world.program(&["dead", "list", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    seen.push(("dead list".to_owned(), format!("{}{}", list.1, list.2)));
    let arguments = std::fs::read(format!("/proc/{}/cmdline", worker.process.pid())).unwrap();
    seen.push(("arguments".to_owned(), String::from_utf8_lossy(&arguments).into_owned()));
    assert!(seen.len() >= 8 + 5, "{seen:?}");
    for (place, text) in &seen {
        for secret in [CANARY, "Y2FuYXJ5LTc3Mz", "NhbmFyeS03NzMx", "jYW5hcnktNzczM"] {
            assert!(!text.contains(secret), "{place}: {text}");
        }
    }
    world.finish().await;
}

on_every_database!(secrets_in_errors);

/// The database's own password: wrong, with a host that is not there, and in a URL that cannot be read.
#[tokio::test]
async fn of_the_database() {
    let server = testkit::postgres().await;
    let url = server.url();
    let (_, address) = url.rsplit_once('@').unwrap_or(("", url.trim_start_matches("postgres://")));
    let folder = tempfile::tempdir().unwrap();
    let manifest = json!({ "apiVersion": "queuebox.io/v1alpha1", "kind": "Relay", "metadata": { "name": "shop" }, "spec": {
        "database": { "postgres": { "urlFrom": { "env": "DATABASE_URL" } }, "startupTimeout": "1s" },
        "http": { "port": testkit::free_port(), "managementPort": testkit::free_port() } } });
    let file = folder.path().join("relay.json");
    std::fs::write(&file, manifest.to_string()).unwrap();
    let closed = testkit::free_port();
    for url in [
        format!("postgres://nobody:{CANARY}@{address}"),
        format!("postgres://u:{CANARY}@127.0.0.1:{closed}/d"),
        format!("postgres://u:{CANARY}@host.invalid/d"),
        format!("postgres://u:{CANARY}@127.0.0.1:{closed}/d?sslmode=verify-full&sslrootcert=/nowhere"),
        format!("postgres://u:{CANARY}@127.0.0.1:port/d"),
        format!("postgresql:u:{CANARY}"),
    ] {
        let program =
            Process::queuebox(["--log", "debug", "run", "-f", file.to_str().unwrap()]).env("DATABASE_URL", &url);
        let (status, out, log) = program.run(PATIENCE + Duration::from_secs(30)).await;
        assert_eq!(status.code(), Some(1), "{out}{log}");
        assert!(log.contains("queuebox: "), "it says what is wrong: {log}");
    }
}
