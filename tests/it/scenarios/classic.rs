//! Section N: the classic file, as it is and converted.

use std::path::Path;

use queuebox_testkit::{self as testkit, Process, Recorder};

use crate::support::{Db, Kind, OutboxRow, PATIENCE, Worker, on_postgres};

/// One port for everything, secrets in the text and in variables, capture as it used to be.
fn file(port: u16, database: &str, receiver: &str) -> String {
    format!(
        "server: {{httpPort: {port}}}
{database}
outbox:
  pollIntervalMs: 200
  capture: {{enabled: true, mode: cdc, slotName: s, publicationName: p}}
inbox: {{basePath: /hooks}}
admin: {{enabled: true, auth: {{type: bearer, token: canary-admin}}}}
routes:
  - {{topicPattern: \"order.*\", destination: warehouse}}
destinations:
  warehouse: {{type: http, baseUrl: \"{receiver}\", path: /events, auth: {{type: bearer, token: \"${{WAREHOUSE_TOKEN}}\"}}}}
sources:
  orders: {{path: /orders, idempotencyKeyPath: $.id, topic: order.made, auth: {{type: bearer, token: canary-in}}}}
"
    )
}

/// The same traffic for both: a row of the application, a webhook twice, one without credentials.
async fn carries(worker: &Worker, db: &Db, receiver: &Recorder, n: i64) {
    worker.ready().await;
    let before = receiver.count();
    let row = db.insert(OutboxRow::new("order.paid", n)).await;
    let body = format!("{{\"id\": \"order-{n}\"}}");
    let post = |token: &'static str| {
        let request = reqwest::Client::new().post(worker.url("/hooks/orders")).bearer_auth(token).body(body.clone());
        async move { request.send().await.unwrap().status().as_u16() }
    };
    assert_eq!((post("canary-in").await, post("canary-in").await, post("wrong").await), (202, 200, 401));
    let requests = receiver.wait_for(before + 2, PATIENCE).await;
    for request in &requests[before..] {
        assert_eq!((request.path(), request.header("authorization")), ("/events", "Bearer canary-out"));
    }
    db.wait_outbox(&row, "sent").await;
}

fn start(arguments: &[&str], folder: &Path, port: u16, management: u16) -> Worker {
    let process = Process::queuebox(arguments).dir(folder).env("WAREHOUSE_TOKEN", "canary-out").spawn();
    Worker::of(process, port, management)
}

async fn classic_file_runs(kind: Kind) {
    assert_eq!(kind, Kind::Postgres);
    let folder = tempfile::Builder::new().prefix("queuebox-classic-").tempdir().unwrap();
    let (receiver, port) = (Recorder::start().await, testkit::free_port());
    let db = Db::fresh(kind, folder.path()).await;
    let database = format!("database: {{type: postgresql, connectionUrl: \"{}\"}}", db.address);
    let path = folder.path().join("queuebox.yml");
    std::fs::write(&path, file(port, &database, &format!("http://127.0.0.1:{}", receiver.port()))).unwrap();

    let worker = start(&["run", "--config", path.to_str().unwrap()], folder.path(), port, port);
    carries(&worker, &db, &receiver, 1).await;
    // Everything is on the one port, and the admin API knows its credentials.
    assert_eq!(worker.get("/health").await.status, 200);
    assert!(worker.metric("queuebox_outbox_messages_total", &[("status", "sent")]).await >= 2.0);
    assert_eq!(worker.get("/admin/outbox").await.status, 401);
    assert!(worker.process.terminate(PATIENCE).await.success());
    let log = worker.process.output();
    assert_eq!(log.matches("slotName").count(), 1, "one warning about the old keys of capture: {log}");
    assert!(!log.contains("canary"), "{log}");

    // Converted: the same, and each value to fill is named.
    let convert = Process::queuebox(["convert", path.to_str().unwrap()]).env("WAREHOUSE_TOKEN", "canary-out");
    let (status, manifests, notes) = convert.run(PATIENCE).await;
    assert!(status.success(), "{notes}");
    assert!(!manifests.contains("canary") && !notes.contains("canary"), "{manifests}{notes}");
    let values = [
        ("database.connectionUrl", db.address.as_str()),
        ("admin.auth", "canary-admin"),
        ("destinations.warehouse", "canary-out"),
        ("sources.orders", "canary-in"),
    ];
    let secrets = folder.path().join("secrets");
    let mut filled = 0;
    for line in notes.lines().filter_map(|line| line.strip_prefix("fill: Secret ")) {
        let (name, rest) = line.split_once(", key ").unwrap();
        let (key, from) = rest.split_once(", with the value of ").unwrap();
        let (_, value) = values.iter().find(|(begin, _)| from.starts_with(begin)).unwrap_or_else(|| panic!("{line}"));
        std::fs::create_dir_all(secrets.join(name)).unwrap();
        std::fs::write(secrets.join(name).join(key), value).unwrap();
        filled += 1;
    }
    assert_eq!(filled, values.len(), "{notes}");
    let converted = folder.path().join("manifests.yaml");
    // A pod has two ports; the second one is a free one here.
    let management = testkit::free_port();
    let ports = format!("port: {port}");
    assert_eq!(manifests.matches(&ports).count(), 1);
    std::fs::write(&converted, manifests.replace(&ports, &format!("{ports}\n    managementPort: {management}")))
        .unwrap();
    let arguments = ["run", "-f", converted.to_str().unwrap(), "--secrets", secrets.to_str().unwrap()];
    let worker = start(&arguments, folder.path(), port, management);
    carries(&worker, &db, &receiver, 2).await;
    assert!(worker.process.terminate(PATIENCE).await.success());
    db.close().await;
}

on_postgres!(classic_file_runs);

/// A file without `database` uses SQLite in `./queuebox.db`.
#[tokio::test]
async fn classic_file_without_a_database() {
    let folder = tempfile::Builder::new().prefix("queuebox-classic-").tempdir().unwrap();
    let (receiver, port) = (Recorder::start().await, testkit::free_port());
    let path = folder.path().join("queuebox.yml");
    std::fs::write(&path, file(port, "", &format!("http://127.0.0.1:{}", receiver.port()))).unwrap();
    let worker = start(&["run", "--config", path.to_str().unwrap()], folder.path(), port, port);
    worker.ready().await;
    let db = Db::sqlite(&folder.path().join("queuebox.db")).await;
    carries(&worker, &db, &receiver, 1).await;
    assert!(worker.process.terminate(PATIENCE).await.success());
    db.close().await;
}
