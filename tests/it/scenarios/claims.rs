//! Section H: claims, crashes and stopping.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Answer, Recorded, Signal, promise};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{
    Db, Kind, OutboxRow, PATIENCE, Worker, World, number, on_every_database, on_postgres, quoted, text,
};

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
    let mut excused: BTreeMap<String, usize> = BTreeMap::new();
    for share in [60, 200, 350] {
        world.receiver.wait_for(share, PATIENCE).await;
        // The first one holds lanes for certain: on SQLite the others stand by.
        workers.remove(0).process.kill9().await;
        let unmarked = world.db.rows("SELECT CAST(id AS text) AS id FROM outbox WHERE state <> 'sent'").await;
        workers.push(world.start().await);
        // In flight was what had been sent and was not marked yet. By now everything has been read that the dead one had sent.
        let sent = by_id(&world.receiver.requests());
        for row in unmarked.iter().filter(|row| sent.contains_key(text(row, "id"))) {
            *excused.entry(text(row, "id").to_owned()).or_default() += 1;
        }
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
            promise(before < Some(n), format_args!("{key}: {n} came after {before:?}"));
        }
    }
    promise(ids.len() == usize::try_from(ROWS).unwrap(), format_args!("lost: {} of {ROWS} came", ids.len()));
    assert!(ids.values().all(|ids| ids.len() == 1), "a repeat has a new id");
    // Only what was sent and not yet marked at a death may come again: once for each. What a live worker lost, it says.
    let lost = world.claims_lost();
    for (id, times) in by_id(&requests) {
        let causes = excused.get(&id).copied().unwrap_or_default() + lost.get(&id).map_or(0, |n| *n as usize);
        promise(times <= 1 + causes, format_args!("{id} came {times} times with {causes} causes to come again"));
    }
    world.finish().await;
}

mod lost_claim_after_publish {
    use super::*;

    #[tokio::test]
    async fn on_sqlite() {
        taken_over(Kind::Sqlite).await;
    }

    #[tokio::test]
    async fn on_postgres() {
        taken_over(Kind::Postgres).await;
    }

    /// A receiver that takes one request after the other and answers only the second one. Gives the port, and a channel that tells
    /// when a request has come and when its connection was closed.
    async fn hanging_up() -> (u16, tokio::sync::mpsc::UnboundedReceiver<&'static str>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut buffer = vec![0; 65_536];
            let (mut first, _) = listener.accept().await.unwrap();
            assert!(first.read(&mut buffer).await.unwrap() > 0);
            tell.send("asked").unwrap();
            while first.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
            tell.send("closed").unwrap();
            let (mut second, _) = listener.accept().await.unwrap();
            assert!(second.read(&mut buffer).await.unwrap() > 0);
            tell.send("asked again").unwrap();
            second.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
            std::future::pending::<()>().await;
        });
        (port, told)
    }

    /// A worker that cannot reach its database any more ends its publishes with its lease: whoever takes over publishes after it.
    #[tokio::test]
    async fn a_publish_ends_with_the_lease() {
        let (port, mut told) = hanging_up().await;
        let server = testkit::postgres().await;
        let name = server.fresh_database_name().await;
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let proxy = testkit::Proxy::to(server.port()).await;
        let world = World::with(Db::postgres(server.url_of(&name)).await, folder)
            .await
            // Nothing else ends it: the lease is three seconds.
            .destination(
                "receiver",
                json!({ "http": { "url": format!("http://127.0.0.1:{port}/"), "timeout": "10m" } }),
            )
            .env("DATABASE_URL", &server.url_through(proxy.port(), &name));
        let cut_off = world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1).key("k")).await;
        assert_eq!(told.recv().await, Some("asked"));
        proxy.set(testkit::ProxyMode::Stall);
        let ended = tokio::time::timeout(PATIENCE, told.recv()).await.expect("the publish outlives the lease");
        assert_eq!(ended, Some("closed"));
        let world = world.env("DATABASE_URL", &server.url_of(&name));
        world.start().await;
        let again = tokio::time::timeout(PATIENCE, told.recv()).await.expect("nobody takes over");
        assert_eq!(again, Some("asked again"));
        assert_eq!(number(&world.db.wait_outbox(&id, "sent").await, "attempt"), 0, "a lost claim is no attempt");
        proxy.set(testkit::ProxyMode::Pass);
        cut_off.wait_metric("queuebox_claims_lost_total", &[("component", "outbox")], |n| n == 1.0).await;
        assert_eq!(world.claims_lost(), [(id, 1)].into());
        world.finish().await;
    }

    async fn taken_over(kind: Kind) {
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
        assert_eq!(world.claims_lost(), ids.iter().map(|id| (id.clone(), 1)).collect());
        assert!(by_id(&world.receiver.requests()).values().all(|n| *n == 2));
        world.finish().await;
    }
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

/// Whoever got such a lane would not know that its rows must be marked first, so that a killer among them would kill uncounted.
async fn careful_lanes_are_not_handed_on(kind: Kind) {
    const ROWS: i64 = 400;
    let world = World::on(kind)
        .await
        .relay(json!({ "outbox": { "maxInFlight": 8 } }))
        .destination("receiver", json!({ "http": { "timeout": "60s" } }));
    // So slow that no lane has had its careful rows by the time that the third worker has looked at them a few times.
    world.receiver.answer_always(Answer::ok().after(Duration::from_secs(12)));
    let dies = world.start().await;
    world.db.insert_all((0..ROWS).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")))).await;
    world.receiver.wait_for(8, PATIENCE).await;
    dies.process.kill9().await;
    world.start().await;
    // It has all lanes once rows are marked in them; none comes to an end.
    world.db.wait_row("SELECT count(*) AS n FROM outbox WHERE state = 'processing'", |row| number(row, "n") > 0).await;
    let joins = world.start().await;
    // Two renewals of its lease are far more than two looks at the lanes.
    let lease = "SELECT CAST(max(lease_expires_at) AS text) AS at FROM queuebox_worker \
                 WHERE worker NOT IN (SELECT worker FROM queuebox_lane WHERE worker IS NOT NULL AND scope = 'outbox')";
    for _ in 0..3 {
        let before = world.db.wait_row(lease, |row| !row["at"].is_null()).await;
        world.db.wait_row(lease, |row| row["at"] != before["at"]).await;
    }
    assert_eq!(joins.get("/status").await.json()["lanes"]["outbox"], 0, "it was given careful lanes");
    world.receiver.answer_always(Answer::ok());
    world.spread_over(2).await;
    world.db.wait_states("outbox", &[("sent", ROWS)]).await;
    world.finish().await;
}

async fn crashing_message_ends_dead(kind: Kind) {
    // With 1 too: a row that one more crash would end runs alone, so that no neighbour ends with it.
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
        let owned = "SELECT count(*) AS n FROM queuebox_lane WHERE worker IS NOT NULL";
        assert_eq!(world.db.count(owned).await, 0, "it kept lanes");
        assert_eq!(world.db.count("SELECT count(*) AS n FROM queuebox_worker").await, 0, "it is still registered");
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
    waiting_rows_keep_their_lease,
    crashing_message_ends_dead,
    stop_gives_back_at_once,
    retries_do_not_multiply,
);
on_postgres!(slow_request_survives_stop, careful_lanes_are_not_handed_on, killer_behind_a_million_held_rows);
