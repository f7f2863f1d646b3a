//! Section M: dead letters, replay and retention.

use std::collections::BTreeSet;

use queuebox_testkit::{self as testkit, Answer};
use serde_json::{Value, json};

use super::pull::claim;
use crate::support::{
    Answered, Db, Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, on_postgres, quoted, text,
};

/// An outbox row that is finished already.
fn finished(topic: &str, n: i64, state: &str) -> OutboxRow {
    let row = OutboxRow::new(topic, n).set("state", &quoted(state));
    if state == "dead" { row.set("last_error", "'attempts: HTTP 500'").set("attempt", "5") } else { row }
}

/// A row that another worker holds for an hour.
fn held(db: &Db, topic: &str, n: i64) -> OutboxRow {
    OutboxRow::new(topic, n)
        .set("state", "'processing'")
        .set("claim_token", &quoted(&uuid::Uuid::new_v4().to_string()))
        .set("claimed_at", &db.in_seconds(0))
        .set("lease_expires_at", &db.in_seconds(3600))
}

/// An inbox row in any state; returns its id.
async fn inbox_row(db: &Db, source: &str, columns: &[(&str, &str)]) -> String {
    let id = uuid::Uuid::new_v4().to_string();
    let names: String = columns.iter().map(|(name, _)| format!(", {name}")).collect();
    let values: String = columns.iter().map(|(_, value)| format!(", {value}")).collect();
    db.execute(&format!(
        "INSERT INTO inbox (id, source, idempotency_key, payload{names}) VALUES ('{id}', '{source}', '{id}', '{{}}'{values})"
    ))
    .await;
    id
}

async fn replay(worker: &Worker, body: Value) -> Answered {
    worker.admin("/admin/replay", body).await
}

/// What a replay moved; it must succeed.
async fn moved(worker: &Worker, body: Value) -> i64 {
    let answer = replay(worker, body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["moved"].as_i64().unwrap_or_else(|| panic!("{answer:?}"))
}

/// A world with tables whose destinations hold everything, so that what was moved stays to be seen.
async fn at_rest(kind: Kind) -> World {
    let world = World::on(kind).await.destination("receiver", json!({ "paused": true }));
    world.migrate().await;
    world
}

async fn replay_without_filter_is_400(kind: Kind) {
    let world = at_rest(kind).await;
    world.db.insert(finished("order", 1, "dead")).await;
    let worker = world.start().await;
    let answer = replay(&worker, json!({})).await;
    assert_eq!((answer.status, answer.json()), (400, json!({ "error": "A replay needs at least one filter." })));
    // A state alone says nothing about which rows are meant.
    assert_eq!(replay(&worker, json!({ "state": ["dead"] })).await.status, 400);
    let misspelt = replay(&worker, json!({ "topc": "order" })).await;
    assert_eq!(misspelt.status, 400);
    let error = text(&misspelt.json(), "error").to_owned();
    assert!(error.contains("topc") && error.contains("topic"), "{error}");
    assert_eq!(world.db.states("outbox").await, [("dead".to_owned(), 1)].into());
    world.finish().await;
}

async fn replay_without_credentials_is_401(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(
            json!({ "admin": { "insecure": null, "auth": { "bearer": { "tokenFrom": { "env": "ADMIN_TOKEN" } } } } }),
        )
        .env("ADMIN_TOKEN", "open-sesame-0123456789");
    let worker = world.start().await;
    let url = worker.management_url("/admin/replay");
    let ask = |token: Option<&'static str>| {
        let request = reqwest::Client::new().post(&url).header("content-type", "application/json").body("{}");
        Answered::of(if let Some(token) = token { request.bearer_auth(token) } else { request })
    };
    for token in [None, Some("wrong")] {
        let answer = ask(token).await;
        assert_eq!(answer.status, 401);
        assert!(!text(&answer.json(), "error").contains("sesame"));
    }
    assert_eq!(ask(Some("open-sesame-0123456789")).await.status, 400);
    world.finish().await;
}

async fn replay_counts_what_moved(kind: Kind) {
    let world = at_rest(kind).await;
    let held = held(&world.db, "order", 3);
    let ids = world.db.insert_all([finished("order", 1, "sent"), finished("order", 2, "sent"), held]).await;
    let other = world.db.insert(finished("invoice", 4, "sent")).await;
    let before = world.db.outbox(&ids[2]).await;
    let worker = world.start().await;
    let states = json!(["sent", "dead"]);
    assert_eq!(moved(&worker, json!({ "topic": "order", "state": states })).await, 2);
    for id in &ids[..2] {
        assert_eq!(text(&world.db.outbox(id).await, "state"), "pending");
    }
    assert_eq!(world.db.outbox(&ids[2]).await, before, "a row that is held was touched");
    assert_eq!(text(&world.db.outbox(&other).await, "state"), "sent");
    assert_eq!(moved(&worker, json!({ "topic": "order", "state": states })).await, 0);
    world.finish().await;
}

async fn replay_defaults_to_dead(kind: Kind) {
    let world = at_rest(kind).await;
    world.db.insert_all([finished("order", 1, "sent"), finished("order", 2, "dead"), OutboxRow::new("order", 3)]).await;
    let worker = world.start().await;
    assert_eq!(moved(&worker, json!({ "topic": "order" })).await, 1);
    assert_eq!(world.db.states("outbox").await, [("pending".to_owned(), 2), ("sent".to_owned(), 1)].into());
    assert_eq!(replay(&worker, json!({ "topic": "order", "state": ["pending"] })).await.status, 400);
    world.finish().await;
}

async fn replay_by_destination(kind: Kind) {
    let paused = json!({ "paused": true, "http": { "url": "http://127.0.0.1:9/" } });
    let world = at_rest(kind).await.destination("first", paused.clone()).destination("second", paused).routes(&[
        ("order.*", &["first"]),
        ("order.created", &["second"]),
        ("invoice", &["second"]),
    ]);
    let topics = ["order.created", "order.paid", "invoice", "unrouted"];
    let ids = world.db.insert_all(topics.iter().zip(1..).map(|(topic, n)| finished(topic, n, "dead"))).await;
    let worker = world.start().await;
    // The second route never decides about `order.created`.
    assert_eq!(moved(&worker, json!({ "destination": "second" })).await, 1);
    assert_eq!(text(&world.db.outbox(&ids[2]).await, "state"), "pending");
    assert_eq!(moved(&worker, json!({ "destination": "first", "topics": ["order.paid", "invoice"] })).await, 1);
    assert_eq!(text(&world.db.outbox(&ids[1]).await, "state"), "pending");
    assert_eq!(moved(&worker, json!({ "destination": "first" })).await, 1);
    assert_eq!(world.db.states("outbox").await, [("dead".to_owned(), 1), ("pending".to_owned(), 3)].into());
    world.finish().await;
}

async fn replay_dry_run(kind: Kind) {
    let world = at_rest(kind).await;
    let ids = world.db.insert_all((0..15).map(|n| finished("order", n, "dead").key(&format!("k{}", n % 3)))).await;
    let worker = world.start().await;
    let answer = replay(&worker, json!({ "topic": "order", "dryRun": true })).await.json();
    assert_eq!((&answer["moved"], &answer["matched"], &answer["keys"]), (&json!(0), &json!(15), &json!(3)), "{answer}");
    let sample = answer["sample"].as_array().unwrap();
    assert_eq!(sample.len(), 10);
    assert!(sample.iter().all(|id| ids.contains(&id.as_str().unwrap().to_owned())));
    assert_eq!(world.db.states("outbox").await, [("dead".to_owned(), 15)].into());
    assert_eq!(moved(&worker, json!({ "topic": "order" })).await, 15);
    world.finish().await;
}

async fn inbox_replay(kind: Kind) {
    let world = World::on(kind)
        .await
        .source("shop", json!({}))
        .source("tasks", json!({ "consumption": "pull", "topic": null }));
    world.migrate().await;
    let dead = |code: &'static str| [("state", "'dead'"), ("last_error", code)];
    let push = inbox_row(&world.db, "shop", &[&dead("'forward: refused'")[..], &[("topic", "'order'")]].concat()).await;
    let pull =
        inbox_row(&world.db, "tasks", &[&dead("'handler: no'")[..], &[("consumption", "'pull'")]].concat()).await;
    let rejected = inbox_row(&world.db, "shop", &[&dead("'rejected: no'")[..], &[("topic", "'order'")]].concat()).await;
    let worker = world.start().await;
    let requeue = async |body: Value| {
        let answer = worker.admin("/admin/inbox/requeue", body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["moved"].as_i64().unwrap()
    };
    assert_eq!(requeue(json!({ "source": "tasks" })).await, 1);
    let row = world.db.row(&format!("SELECT * FROM inbox WHERE id = '{pull}'")).await;
    assert_eq!((text(&row, "state"), &row["last_error"]), ("pending", &Value::Null));
    let claimed = claim(&world.db, "tasks", 10).await;
    assert_eq!(claimed.iter().map(|row| text(row, "id")).collect::<Vec<_>>(), [pull], "a pull worker gets it");
    assert_eq!(requeue(json!({ "source": "shop" })).await, 1, "the rejected one needs more");
    let requests = world.receiver.wait_for(1, PATIENCE).await;
    assert_eq!(requests[0].header("x-inbox-id"), push);
    assert_eq!(requeue(json!({ "ids": [rejected], "includeRejected": true })).await, 1);
    let requests = world.receiver.wait_for(2, PATIENCE).await;
    assert_eq!(requests[1].header("x-inbox-id"), rejected);
    world.finish().await;
}

/// The statement of contract 11 for this row.
fn documented_requeue(db: &Db, id: &str) -> String {
    let document = std::fs::read_to_string(testkit::workspace_root().join("docs/contract.md")).unwrap();
    let start = document.find("UPDATE outbox SET state = 'pending', attempt = 0").expect("the statement");
    let statement = &document[start..];
    let statement = &statement[..=statement.find(';').unwrap()];
    let statement = statement.replace('…', id);
    match db.kind {
        Kind::Postgres => statement,
        Kind::Sqlite => statement.replace("CURRENT_TIMESTAMP", &db.in_seconds(0)),
    }
}

async fn documented_requeue_delivers(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_always(Answer::status(500));
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(1)).await;
    world.db.wait_outbox(&id, "dead").await;
    world.receiver.clear();
    world.receiver.answer_always(Answer::ok());
    // Two rows later is proof that the dead one had its turn to be seen.
    for n in 2..=3 {
        let later = world.db.insert(OutboxRow::new("order", n)).await;
        world.db.wait_outbox(&later, "sent").await;
    }
    assert_eq!(text(&world.db.outbox(&id).await, "state"), "dead");
    assert_eq!(world.db.execute(&documented_requeue(&world.db, &id)).await, 1);
    let row = world.db.wait_outbox(&id, "sent").await;
    assert_eq!(row["attempt"], 0);
    let last = world.receiver.requests().pop().unwrap();
    assert_eq!((last.header("x-message-id"), last.header("x-attempt")), (id.as_str(), "0"));
    world.finish().await;
}

async fn documented_requeue_spares_live_rows(kind: Kind) {
    let world = at_rest(kind).await;
    let held = held(&world.db, "order", 3);
    let rows = [OutboxRow::new("order", 1), finished("order", 2, "sent"), held];
    for id in world.db.insert_all(rows).await {
        let before = world.db.outbox(&id).await;
        assert_eq!(world.db.execute(&documented_requeue(&world.db, &id)).await, 0);
        assert_eq!(world.db.outbox(&id).await, before);
    }
    world.finish().await;
}

async fn admin_lists_by_page(kind: Kind) {
    let world = at_rest(kind).await.source("shop", json!({ "consumption": "pull", "topic": null }));
    let rows = (0..25).map(|n| finished("order", n, "dead").set("created_at", &world.db.in_seconds(n - 100)));
    let ids: BTreeSet<String> = world.db.insert_all(rows).await.into_iter().collect();
    let worker = world.start().await;
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = worker.get(&format!("/admin/outbox?topic=order&limit=10{cursor}")).await;
        assert_eq!(page.status, 200, "{page:?}");
        let page = page.json();
        for item in page["items"].as_array().unwrap() {
            assert!(item.get("payload").is_none() && item.get("headers").is_none(), "{item:#}");
            seen.push(text(item, "id").to_owned());
        }
        // New rows come in front and rows that were seen change, between two pages.
        world.db.insert(finished("order", 100, "dead")).await;
        world
            .db
            .execute(&format!("UPDATE outbox SET updated_at = {} WHERE id = '{}'", world.db.in_seconds(0), seen[0]))
            .await;
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen.len(), 25, "{seen:?}");
    assert_eq!(seen.iter().cloned().collect::<BTreeSet<_>>(), ids);

    let one = worker.get(&format!("/admin/outbox/{}", seen[0])).await;
    assert_eq!((one.status, &one.json()["payload"]["n"]), (200, &json!(24)), "newest first: {one:?}");
    assert_eq!(worker.get(&format!("/admin/outbox/{}", uuid::Uuid::new_v4())).await.status, 404);
    assert_eq!(worker.get("/admin/outbox?tpic=order").await.status, 400);

    let sent = world.db.insert(finished("order", 1, "sent")).await;
    let discard = json!({ "ids": [seen[0], sent] });
    let answer = worker.admin("/admin/outbox/discard", discard).await;
    assert_eq!((answer.status, answer.json()), (200, json!({ "discarded": 1 })));
    assert_eq!(world.db.count(&format!("SELECT count(*) FROM outbox WHERE id IN ('{}', '{sent}')", seen[0])).await, 1);

    let inbox = inbox_row(&world.db, "shop", &[("state", "'dead'"), ("consumption", "'pull'")]).await;
    let page = worker.get("/admin/inbox?source=shop").await.json();
    assert_eq!(page["items"][0]["id"], json!(inbox), "{page}");
    worker.process.terminate(PATIENCE).await;

    let off = world.relay(json!({ "admin": null }));
    let worker = off.start().await;
    assert_eq!(worker.get("/admin/outbox").await.status, 404);
    worker.process.terminate(PATIENCE).await;

    let open = off.relay(json!({ "admin": { "enabled": true } }));
    let folder = open.write_manifests(testkit::free_port(), testkit::free_port());
    let (status, out, log) = open.program(&["run", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    assert_eq!(status.code(), Some(1), "{out}{log}");
    assert!(format!("{out}{log}").contains("admin.auth"), "{out}{log}");
    open.finish().await;
}

const STATES: [&str; 4] = ["pending", "processing", "sent", "dead"];

async fn retention_deletes_finished_only(kind: Kind) {
    let world = at_rest(kind).await.relay(json!({
        "retention": { "outbox": { "maxAge": "1h" }, "inbox": { "maxAge": "1h" } },
        "inbox": { "relay": { "enabled": false } },
    }));
    let db = &world.db;
    for (old_column, new_column) in [("updated_at", "created_at"), ("created_at", "updated_at")] {
        for state in STATES {
            let mut row = if state == "processing" { held(db, "order", 1) } else { finished("order", 1, state) };
            row = row.set(old_column, &db.in_seconds(-7200)).set(new_column, &db.in_seconds(0));
            db.insert(row).await;
        }
    }
    let (old, now) = (db.in_seconds(-7200), db.in_seconds(0));
    let lease = db.in_seconds(3600);
    for created in [&old, &now] {
        for state in ["'pending'", "'processing'", "'processed'", "'dead'"] {
            let lease = if state == "'processing'" { lease.as_str() } else { "NULL" };
            let columns =
                [("state", state), ("created_at", created), ("consumption", "'pull'"), ("lease_expires_at", lease)];
            inbox_row(db, "shop", &columns).await;
        }
    }
    let worker = world.start().await;
    for table in ["outbox", "inbox"] {
        let labels = [("table", table)];
        worker.wait_metric("queuebox_cleanup_messages_deleted_total", &labels, |n| n >= 2.0).await;
        worker.wait_metric("queuebox_cleanup_last_run_timestamp", &labels, |n| n > 0.0).await;
        assert_eq!(worker.metric("queuebox_cleanup_messages_deleted_total", &labels).await, 2.0);
    }
    let left = |finished: &str| {
        [("pending", 2), ("processing", 2), (finished, 1), ("dead", 1)].map(|(s, n)| (s.to_owned(), n)).into()
    };
    assert_eq!(world.db.states("outbox").await, left("sent"));
    assert_eq!(world.db.states("inbox").await, left("processed"));
    let young = "SELECT count(*) FROM outbox WHERE state IN ('sent', 'dead') AND updated_at > created_at";
    assert_eq!(world.db.count(young).await, 2, "the outbox counts from `updated_at`");
    worker.process.terminate(PATIENCE).await;

    // By count: of each state by itself.
    let rows = (0..10).map(|n| finished("order", n, if n < 6 { "sent" } else { "dead" }));
    world.db.insert_all(rows.map(|row| row.set("updated_at", &world.db.in_seconds(0)))).await;
    let world = world.relay(json!({ "retention": { "outbox": { "maxAge": null, "maxCount": 3 } } }));
    world.start().await;
    world.db.wait_states("outbox", &[("pending", 2), ("processing", 2), ("sent", 3), ("dead", 3)]).await;
    world.finish().await;
}

async fn retention_ends_deduplication(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({ "retention": { "inbox": { "maxAge": "1h", "cleanupInterval": "1s" } } }))
        .source("shop", json!({}));
    let worker = world.start().await;
    let body = r#"{"id":"a"}"#;
    let first = worker.post("shop", body).await.accepted();
    world.db.wait_states("inbox", &[("processed", 1)]).await;
    let repeat = worker.post("shop", body).await;
    assert_eq!((repeat.status, repeat.json()), (200, json!({ "status": "duplicate" })));
    world.db.execute(&format!("UPDATE inbox SET created_at = {}", world.db.in_seconds(-7200))).await;
    world.db.wait_states("inbox", &[]).await;
    let second = worker.post("shop", body).await.accepted();
    assert_ne!(first, second);
    world.receiver.wait_for(2, PATIENCE).await;
    world.finish().await;
}

on_every_database!(
    replay_without_filter_is_400,
    replay_counts_what_moved,
    replay_defaults_to_dead,
    replay_dry_run,
    inbox_replay,
    documented_requeue_delivers,
    documented_requeue_spares_live_rows,
    admin_lists_by_page,
    retention_deletes_finished_only,
    retention_ends_deduplication,
);
on_postgres!(replay_without_credentials_is_401, replay_by_destination);
