//! Section H: claims, crashes and stopping.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Answer, Recorded, Signal};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, number, on_every_database, on_postgres, quoted, text};

/// A row as a worker leaves it that died while it was being published.
fn abandoned(world: &World, row: OutboxRow) -> OutboxRow {
    row.set("state", "'processing'")
        .set("claim_token", &quoted(&uuid::Uuid::new_v4().to_string()))
        .set("claimed_at", &world.db.in_seconds(-120))
        .set("lease_expires_at", &world.db.in_seconds(-60))
}

/// Requests by message id.
pub fn by_id(requests: &[Recorded]) -> BTreeMap<String, usize> {
    let mut ids = BTreeMap::new();
    for request in requests {
        *ids.entry(request.header("x-message-id").to_owned()).or_default() += 1;
    }
    ids
}

mod abandoned_rows {
    use super::*;

    /// A row that was marked by its dead worker.
    pub async fn marked(kind: Kind) {
        let world = World::on(kind).await;
        world.migrate().await;
        world.receiver.answer_with(|_| Answer::stall());
        let id = world.db.insert(abandoned(&world, OutboxRow::new("order", 1))).await;
        let worker = world.start().await;
        world.receiver.wait_for(1, PATIENCE).await;
        let row = world.db.outbox(&id).await;
        assert_eq!((text(&row, "state"), number(&row, "crashes"), number(&row, "attempt")), ("processing", 1, 0));
        worker.wait_metric("queuebox_outbox_messages_reclaimed_total", &[], |n| n == 1.0).await;
        world.receiver.answer_always(Answer::ok());
        worker.process.kill9().await;
        world.start().await;
        let sent = world.db.wait_outbox(&id, "sent").await;
        assert_eq!((number(&sent, "attempt"), number(&sent, "crashes")), (0, 0), "an outcome ends the count");
        world.finish().await;
    }

    /// A row that was only read by its dead worker: no evidence against it.
    pub async fn pending(kind: Kind) {
        let world = World::on(kind).await;
        world.receiver.answer_with(|_| Answer::stall());
        let worker = world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        world.receiver.wait_for(1, PATIENCE).await;
        worker.process.kill9().await;
        world.start().await;
        world.receiver.wait_for(2, PATIENCE).await;
        assert_eq!(number(&world.db.outbox(&id).await, "crashes"), 0);
        world.receiver.answer_always(Answer::ok());
        world.db.wait_outbox(&id, "sent").await;
        world.finish().await;
    }
}

async fn abandoned_row_is_recovered(kind: Kind) {
    abandoned_rows::marked(kind).await;
    abandoned_rows::pending(kind).await;
}

async fn killed_worker_loses_nothing(kind: Kind) {
    const ROWS: i64 = 600;
    let world = World::on(kind).await.relay(json!({ "outbox": { "maxInFlight": 16 } }));
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(20)));
    let mut workers = vec![world.start().await, world.start().await, world.start().await];
    let writer = {
        let db = world.db.clone();
        tokio::spawn(async move {
            for batch in 0..ROWS / 20 {
                let rows = (0..20).map(|n| batch * 20 + n);
                db.insert_all(rows.map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % 40)))).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    };
    let (mut kills, mut unsettled) = (0, BTreeSet::new());
    for share in [60, 200, 350] {
        world.receiver.wait_for(share, PATIENCE).await;
        // The first one holds lanes for certain: on SQLite the others stand by.
        workers.remove(0).process.kill9().await;
        kills += 1;
        let rows = world.db.rows("SELECT CAST(id AS text) AS id FROM outbox WHERE state <> 'sent'").await;
        unsettled.extend(rows.iter().map(|row| text(row, "id").to_owned()));
        workers.push(world.start().await);
    }
    writer.await.unwrap();
    world.db.wait_states("outbox", &[("sent", ROWS)]).await;

    let requests = world.receiver.requests();
    let mut ids: BTreeMap<i64, BTreeSet<String>> = BTreeMap::new();
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    for request in &requests {
        let n = request.json()["n"].as_i64().unwrap();
        if ids.entry(n).or_default().insert(request.header("x-message-id").to_owned()) {
            let key = request.header("x-message-key").to_owned();
            let before = last.insert(key.clone(), n);
            assert!(before < Some(n), "{key}: {n} came after {before:?}");
        }
    }
    assert_eq!(ids.len(), usize::try_from(ROWS).unwrap(), "lost");
    assert!(ids.values().all(|ids| ids.len() == 1), "a repeat has a new id");
    // Only what was sent and not yet marked at a death may come again: once for each.
    for (id, times) in by_id(&requests) {
        assert!(times == 1 || unsettled.contains(&id), "{id} was marked as sent and came again");
        assert!(times <= kills + 1, "{id} came {times} times after {kills} deaths");
    }
    world.finish().await;
}

async fn lost_claim_after_publish(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|request| {
        let is_first = request.json()["n"].as_i64().unwrap() < 10;
        if is_first { Answer::stall() } else { Answer::ok() }
    });
    let worker = world.start().await;
    let ids = world.db.insert_all([OutboxRow::new("order", 1), OutboxRow::new("order", 2)]).await;
    world.receiver.wait_for(2, PATIENCE).await;
    // As after a takeover: the fence of the worker is gone while it publishes.
    let token = quoted(&uuid::Uuid::new_v4().to_string());
    world.db.execute(&format!("UPDATE queuebox_worker SET token = {token}")).await;
    worker.wait_metric("queuebox_claims_lost_total", &[("component", "outbox")], |n| n >= 2.0).await;
    world.receiver.answer_always(Answer::ok());
    for id in &ids {
        let row = world.db.wait_outbox(id, "sent").await;
        assert_eq!(number(&row, "attempt"), 0, "a lost claim is no attempt");
        worker.process.wait_output(id, PATIENCE).await;
    }
    assert_eq!(worker.metric("queuebox_claims_lost_total", &[("component", "outbox")]).await, 2.0);
    assert!(by_id(&world.receiver.requests()).values().all(|n| *n == 2));
    world.finish().await;
}

async fn waiting_rows_keep_their_lease(kind: Kind) {
    // The lease ends four times before the last row has its turn.
    let world = World::on(kind).await.destination("receiver", json!({ "limits": { "maxInFlight": 1 } }));
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(600)));
    let workers = [world.start().await, world.start().await];
    world.db.insert_all((1..=20).map(|n| OutboxRow::new("order", n))).await;
    world.db.wait_states("outbox", &[("sent", 20)]).await;
    assert_eq!(world.receiver.count(), 20);
    assert_eq!(by_id(&world.receiver.requests()).len(), 20);
    for worker in &workers {
        assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
    }
    world.finish().await;
}

/// Starts a worker again and again until the message with `n` 0, which kills each of them, is dead. Gives the number of deaths, and how
/// many requests of others had come at each.
async fn killed_until_dead(world: &World, killer: &str, limit: i64) -> Vec<usize> {
    let victim: Arc<Mutex<Option<Arc<Worker>>>> = Arc::default();
    world.receiver.answer_with({
        let victim = victim.clone();
        move |request| {
            if request.json()["n"] != 0 {
                return Answer::ok();
            }
            if let Some(worker) = victim.lock().unwrap().as_ref() {
                worker.process.signal(Signal::Kill);
            }
            Answer::stall()
        }
    });
    let mut deaths = Vec::new();
    loop {
        // Before it serves, so that no request comes for a worker that is not known here yet.
        let worker = {
            let mut victim = victim.lock().unwrap();
            let worker = world.spawn();
            *victim = Some(worker.clone());
            worker
        };
        let killed = testkit::eventually("the worker dies or the message is dead", PATIENCE, || async {
            if !worker.process.is_running() {
                return Some(true);
            }
            (text(&world.db.outbox(killer).await, "state") == "dead").then_some(false)
        })
        .await;
        if !killed {
            return deaths;
        }
        let others = world.receiver.requests().iter().filter(|request| request.json()["n"] != 0).count();
        deaths.push(others);
        assert!(i64::try_from(deaths.len()).unwrap() <= limit, "it kills for ever");
    }
}

async fn crashing_message_ends_dead(kind: Kind) {
    // With 1 and 2 too: a row that one more crash would end runs alone, so that no neighbour ends with it.
    for max_crashes in [3, 1] {
        let world = World::on(kind).await.relay(json!({ "outbox": { "maxCrashes": max_crashes } }));
        world.migrate().await;
        let rows = (0..20).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")));
        let ids = world.db.insert_all(rows).await;
        let deaths = killed_until_dead(&world, &ids[0], max_crashes + 1).await;
        assert_eq!(i64::try_from(deaths.len()).unwrap(), max_crashes + 1);
        world.db.wait_states("outbox", &[("dead", 1), ("sent", 19)]).await;
        let row = world.db.outbox(&ids[0]).await;
        assert!(text(&row, "last_error").starts_with("crashes:"), "{row:#}");
        assert_eq!(number(&row, "attempt"), 0);
        world.finish().await;
    }
}

async fn killer_behind_a_million_held_rows(kind: Kind) {
    const MAX_CRASHES: i64 = 2;
    let held: i64 = std::env::var("QUEUEBOX_HELD_ROWS").map_or(30_000, |rows| rows.parse().unwrap());
    let world = World::on(kind)
        .await
        .relay(json!({ "outbox": { "maxCrashes": MAX_CRASHES } }))
        .destination("away", json!({ "http": { "url": "http://127.0.0.1:9/" }, "paused": true }))
        .routes(&[("held", &["away"]), ("order", &["receiver"])]);
    world.migrate().await;
    world
        .db
        .execute(&format!(
            "INSERT INTO outbox (topic, key, payload) SELECT 'held', 'h' || (n % 1000), '{{\"n\": 7}}' FROM generate_series(1, {held}) n"
        ))
        .await;
    let rows = (0..200).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")));
    let ids = world.db.insert_all(rows).await;
    let deaths = killed_until_dead(&world, &ids[0], MAX_CRASHES + 1).await;
    assert_eq!(i64::try_from(deaths.len()).unwrap(), MAX_CRASHES + 1);
    assert!(deaths.windows(2).all(|pair| pair[0] < pair[1]), "others are sent between the deaths: {deaths:?}");
    world.db.wait_states("outbox", &[("dead", 1), ("pending", held), ("sent", 199)]).await;
    assert!(text(&world.db.outbox(&ids[0]).await, "last_error").starts_with("crashes:"));
    let touched =
        "SELECT count(*) FROM outbox WHERE topic = 'held' AND (crashes > 0 OR attempt > 0 OR claim_token IS NOT NULL)";
    assert_eq!(world.db.count(touched).await, 0);
    world.finish().await;
}

mod stop_gives_back {
    use super::*;

    /// Rows that were read and not started go to the next worker at once: a lease here is longer than the test's patience.
    pub async fn rest(kind: Kind) {
        let world = World::on(kind)
            .await
            .relay(json!({ "outbox": { "claimTimeout": "10m" } }))
            .destination("receiver", json!({ "limits": { "maxInFlight": 4 }, "http": { "timeout": "30s" } }));
        world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(700)));
        let first = world.start().await;
        world.db.insert_all((1..=50).map(|n| OutboxRow::new("order", n))).await;
        world.receiver.wait_for(2, PATIENCE).await;
        first.process.sigterm();
        assert!(first.process.wait(PATIENCE).await.success());
        let states = world.db.states("outbox").await;
        assert_eq!(states.get("processing"), None, "left behind: {states:?}");
        assert!(states["pending"] > 0, "nothing was left for the second worker");
        world.receiver.answer_always(Answer::ok());
        world.start().await;
        world.db.wait_states("outbox", &[("sent", 50)]).await;
        assert_eq!(world.receiver.count(), 50, "an id came twice");
        world.finish().await;
    }

    /// A receiver that never answers does not hold up the stop, nor the message for longer than its lease.
    pub async fn hanging(kind: Kind) {
        let world = World::on(kind)
            .await
            .relay(json!({ "drainTimeout": "2s" }))
            .destination("receiver", json!({ "http": { "timeout": "10m" } }));
        world.receiver.answer_with(|_| Answer::stall());
        let first = world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        world.receiver.wait_for(1, PATIENCE).await;
        assert!(first.process.terminate(PATIENCE).await.success());
        world.receiver.answer_always(Answer::ok());
        world.start().await;
        assert_eq!(number(&world.db.wait_outbox(&id, "sent").await, "attempt"), 0);
        world.finish().await;
    }
}

async fn stop_gives_back_at_once(kind: Kind) {
    stop_gives_back::rest(kind).await;
    stop_gives_back::hanging(kind).await;
}

async fn slow_request_survives_stop(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({ "http": { "shutdownDelay": "4s" } }))
        .source("shop", json!({ "consumption": "pull", "topic": null }));
    let worker = world.start().await;
    let body = r#"{"id":"slow","n":1}"#;
    let (start, end) = body.split_at(8);
    let mut slow = tokio::net::TcpStream::connect(("127.0.0.1", worker.http)).await.unwrap();
    let head =
        format!("POST /inbox/shop HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    slow.write_all(format!("{head}{start}").as_bytes()).await.unwrap();
    slow.flush().await.unwrap();
    // The first request is in its handler once another one on a new connection was answered.
    worker.post("shop", r#"{"id":"before"}"#).await.accepted();
    worker.process.sigterm();
    testkit::eventually("/readyz says 503", PATIENCE, || async {
        (worker.get("/readyz").await.status == 503).then_some(())
    })
    .await;
    worker.post("shop", r#"{"id":"during"}"#).await.accepted();
    let late = testkit::eventually("new requests are refused", PATIENCE, || async {
        let answer = worker.post("shop", r#"{"id":"late"}"#).await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(late.json(), json!({ "error": "QueueBox is shutting down" }));
    slow.write_all(end.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, slow.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    assert!(worker.process.wait(PATIENCE).await.success());
    assert_eq!(world.db.count("SELECT count(*) FROM inbox WHERE idempotency_key = 'slow'").await, 1);
    world.finish().await;
}

/// Attempts and gaps of a row that always fails, with this many workers.
pub async fn failing_row(kind: Kind, workers: usize) -> Vec<Duration> {
    let world = World::on(kind).await.relay(json!({ "outbox": { "backoff": { "initial": "600ms", "max": "600ms" } } }));
    world.receiver.answer_always(Answer::status(500));
    for _ in 0..workers {
        world.start().await;
    }
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(5)).await;
    let row = world.db.wait_outbox(&id, "dead").await;
    assert_eq!(number(&row, "attempt"), 5);
    let requests = world.receiver.requests();
    let attempts: Vec<&str> = requests.iter().map(|request| request.header("x-attempt")).collect();
    assert_eq!(attempts, ["0", "1", "2", "3", "4"]);
    let gaps = requests.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    world.finish().await;
    gaps
}

async fn retries_do_not_multiply(kind: Kind) {
    for workers in [1, 6] {
        for gap in failing_row(kind, workers).await {
            // Jitter only adds. A slow machine makes gaps longer, never shorter.
            assert!(gap >= Duration::from_millis(590), "{workers} workers: {gap:?}");
        }
    }
}

on_every_database!(
    abandoned_row_is_recovered,
    killed_worker_loses_nothing,
    lost_claim_after_publish,
    waiting_rows_keep_their_lease,
    crashing_message_ends_dead,
    stop_gives_back_at_once,
    retries_do_not_multiply,
);
on_postgres!(slow_request_survives_stop, killer_behind_a_million_held_rows);
