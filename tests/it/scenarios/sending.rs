//! Section E: sending over HTTP.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use queuebox_testkit::{Answer, Recorder};
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database, on_postgres, text, time};

async fn http_delivery(kind: Kind) {
    let world = World::on(kind).await;
    world.start().await;
    let row = OutboxRow::new("order.created", 1).key("customer-7").payload(r#"{"order":1,"text":"é"}"#);
    let id = world.db.insert(row).await;
    let row = world.db.wait_outbox(&id, "sent").await;
    let requests = world.receiver.requests();
    assert_eq!(requests.len(), 1);
    let request = &requests[0];
    assert_eq!((request.method.as_str(), request.path()), ("POST", "/events"));
    assert_eq!(request.json(), json!({ "order": 1, "text": "é" }));
    for (name, value) in [
        ("x-message-id", id.as_str()),
        ("x-topic", "order.created"),
        ("x-attempt", "0"),
        ("x-message-key", "customer-7"),
        ("content-type", "application/json"),
    ] {
        assert_eq!(request.header(name), value, "{name}");
    }
    assert_eq!(number(&row, "attempt"), 0);
    assert!(row["claim_token"].is_null() && row["lease_expires_at"].is_null() && row["last_error"].is_null());
    world.finish().await;
}

async fn batch_is_delivered(kind: Kind) {
    let world = World::on(kind).await;
    world.start().await;
    let ids = world.db.insert_all((1..=5).map(|n| OutboxRow::new("order", n))).await;
    world.db.wait_states("outbox", &[("sent", 5)]).await;
    let requests = world.receiver.requests();
    assert_eq!(requests.len(), 5);
    let arrived: BTreeSet<&str> = requests.iter().map(|request| request.header("x-message-id")).collect();
    assert_eq!(arrived, ids.iter().map(String::as_str).collect());
    world.finish().await;
}

async fn no_route_is_dead(kind: Kind) {
    let world = World::on(kind).await.routes(&[("order.*", &["receiver"])]);
    world.receiver.answer_always(Answer::status(500));
    world.start().await;
    let unroutable = world.db.insert(OutboxRow::new("invoice.created", 1)).await;
    let row = world.db.wait_outbox(&unroutable, "dead").await;
    assert!(text(&row, "last_error").starts_with("no_route:"), "{row:#}");
    assert_eq!(number(&row, "attempt"), 0);
    assert_eq!(world.receiver.count(), 0);
    // Any other trouble is tried first.
    let routed = world.db.insert(OutboxRow::new("order.created", 2).max_attempts(1)).await;
    let row = world.db.wait_outbox(&routed, "dead").await;
    assert_eq!((number(&row, "attempt"), world.receiver.count()), (1, 1));
    world.finish().await;
}

async fn first_route_wins(kind: Kind) {
    let second = Recorder::start().await;
    let world = World::on(kind)
        .await
        .destination("second", json!({ "http": { "url": second.url() } }))
        .routes(&[("order.*", &["receiver"]), ("**", &["second"])]);
    world.start().await;
    let ids = world.db.insert_all([OutboxRow::new("order.created", 1), OutboxRow::new("other", 2)]).await;
    world.db.wait_states("outbox", &[("sent", 2)]).await;
    assert_eq!((world.receiver.count(), second.count()), (1, 1));
    assert_eq!(world.receiver.requests()[0].header("x-message-id"), ids[0]);
    assert_eq!(second.requests()[0].header("x-message-id"), ids[1]);
    world.finish().await;
}

mod topic_patterns {
    use super::*;

    #[tokio::test]
    async fn match_as_stated() {
        let (two, three, literal) = (Recorder::start().await, Recorder::start().await, Recorder::start().await);
        let world = World::on(Kind::Sqlite)
            .await
            .destination("two", json!({ "http": { "url": two.url() } }))
            .destination("three", json!({ "http": { "url": three.url() } }))
            .destination("literal", json!({ "http": { "url": literal.url() } }))
            .routes(&[
                ("order.*", &["two"]),
                ("order.**", &["three"]),
                ("a+b.(c)", &["literal"]),
                ("*", &["receiver"]),
            ]);
        world.start().await;
        let topics = ["order.created", "order.item.added", "order", "a+b.(c)", "aab.c"];
        world.db.insert_all(topics.iter().map(|topic| OutboxRow::new(topic, 0))).await;
        world.db.wait_states("outbox", &[("sent", 4), ("dead", 1)]).await;
        let seen = |receiver: &Recorder| {
            receiver.requests().iter().map(|r| r.header("x-topic").to_owned()).collect::<Vec<String>>()
        };
        assert_eq!(seen(&two), ["order.created"]);
        assert_eq!(seen(&three), ["order.item.added"]);
        assert_eq!(seen(&literal), ["a+b.(c)"]);
        assert_eq!(seen(&world.receiver), ["order"]);
        world.finish().await;
    }

    #[tokio::test]
    async fn three_stars_are_refused() {
        let world = World::on(Kind::Sqlite).await.routes(&[("order.***", &["receiver"])]);
        let folder = world.write_manifests(1, 2);
        let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
        assert!(!status.success());
        assert!(format!("{out}{log}").contains("spec.routes[0].topics[0]"), "{out}{log}");
    }
}

async fn at_least_once_after_500(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_next([Answer::status(500)]);
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    let row = world.db.wait_outbox(&id, "sent").await;
    let requests = world.receiver.requests();
    let seen: Vec<_> = requests.iter().map(|r| (r.header("x-message-id"), r.header("x-attempt"))).collect();
    assert_eq!(seen, [(id.as_str(), "0"), (id.as_str(), "1")]);
    assert_eq!(number(&row, "attempt"), 1);
    world.finish().await;
}

async fn always_failing_ends_dead(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_always(Answer::status(500).body("no luck"));
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(2)).await;
    let row = world.db.wait_outbox(&id, "dead").await;
    assert_eq!((world.receiver.count(), number(&row, "attempt")), (2, 2));
    let reason = text(&row, "last_error");
    assert!(reason.starts_with("attempts:") && reason.contains("500"), "{reason}");
    world.finish().await;
}

async fn five_deliveries(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_always(Answer::status(500));
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    let row = world.db.wait_outbox(&id, "dead").await;
    assert_eq!((world.receiver.count(), number(&row, "attempt"), number(&row, "max_attempts")), (5, 5, 5));
    world.finish().await;
}

async fn only_2xx_completes(kind: Kind) {
    let elsewhere = Recorder::start().await;
    let world = World::on(kind)
        .await
        .env("TOKEN", "canary-credential")
        .destination("receiver", json!({ "http": { "auth": { "bearer": { "tokenFrom": { "env": "TOKEN" } } } } }));
    let to = elsewhere.url_for("/stolen");
    world.receiver.answer_with(move |request| {
        let status = request.json()["n"].as_i64().unwrap() as u16;
        let answer = Answer::status(status);
        if (300..400).contains(&status) { answer.header("location", &to) } else { answer }
    });
    world.start().await;
    let done = [200, 202, 204, 299];
    let failed = [301, 302, 303, 307, 308, 304, 400, 404, 500];
    let rows = done.iter().chain(&failed).map(|status| OutboxRow::new("order", *status).max_attempts(1));
    world.db.insert_all(rows).await;
    world.db.wait_states("outbox", &[("sent", 4), ("dead", failed.len() as i64)]).await;
    for row in world.db.rows("SELECT * FROM outbox").await {
        let status = row["payload"]["n"].as_i64().unwrap();
        assert_eq!(text(&row, "state") == "sent", done.contains(&status), "{row:#}");
    }
    let requests = world.receiver.requests();
    assert_eq!(requests.len(), done.len() + failed.len());
    assert!(requests.iter().all(|request| request.header("authorization") == "Bearer canary-credential"));
    assert_eq!(elsewhere.count(), 0, "a redirect was followed");
    world.finish().await;
}

mod retry_after {
    use super::*;

    /// Seconds between the failure and the next due time of a row whose first attempt was answered like this.
    async fn delay(answer: Answer, patch: serde_json::Value) -> f64 {
        let world = World::on(Kind::Postgres).await.destination("receiver", patch);
        world.receiver.answer_next([answer]);
        world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        let failed = |row: &serde_json::Value| number(row, "attempt") == 1;
        let row = world.db.wait_row(&format!("SELECT * FROM outbox WHERE id = '{id}'"), failed).await;
        let delay = time(&row, "scheduled_at").duration_since(time(&row, "updated_at")).as_secs_f64();
        world.finish().await;
        delay
    }

    /// Back-off alone: 10 s and at most a quarter more.
    const ALONE: std::ops::RangeInclusive<f64> = 9.5..=13.0;

    fn patch(retry_after_max: &str) -> serde_json::Value {
        json!({ "backoff": { "initial": "10s", "max": "60s" }, "retryAfterMax": retry_after_max })
    }

    #[tokio::test]
    async fn the_larger_of_both_counts() {
        let answer = Answer::status(503).header("retry-after", "100");
        assert!((99.0..=101.0).contains(&delay(answer, patch("5m")).await));
        let answer = Answer::status(429).header("retry-after", "1");
        assert!(ALONE.contains(&delay(answer, patch("5m")).await));
    }

    #[tokio::test]
    async fn a_date_counts_and_a_past_one_does_not() {
        let date = |seconds: i64| {
            let at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
            at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
        };
        let found = delay(Answer::status(429).header("retry-after", &date(150)), patch("5m")).await;
        assert!((60.0..=151.0).contains(&found), "{found}");
        let found = delay(Answer::status(429).header("retry-after", &date(-150)), patch("5m")).await;
        assert!(ALONE.contains(&found), "{found}");
    }

    #[tokio::test]
    async fn capped_ignored_and_of_several_the_longest() {
        let found = delay(Answer::status(503).header("retry-after", "100000"), patch("2m")).await;
        assert!((119.0..=121.0).contains(&found), "{found}");
        let found = delay(Answer::status(503).header("retry-after", "100"), patch("0s")).await;
        assert!(ALONE.contains(&found), "{found}");
        let found = delay(Answer::status(503).header("retry-after", "soon"), patch("5m")).await;
        assert!(ALONE.contains(&found), "{found}");
        let several = Answer::status(503).header("retry-after", "50").header("retry-after", "90");
        let found = delay(several, patch("5m")).await;
        assert!((89.0..=91.0).contains(&found), "{found}");
    }
}

async fn permanent_status_is_dead(kind: Kind) {
    let world = World::on(kind).await.destination("receiver", json!({ "http": { "permanentStatuses": [410, "5xx"] } }));
    world.receiver.answer_with(|request| Answer::status(request.json()["n"].as_i64().unwrap() as u16));
    world.start().await;
    let rows = [410, 501, 404].map(|status| OutboxRow::new("order", status).max_attempts(2));
    let ids = world.db.insert_all(rows).await;
    world.db.wait_states("outbox", &[("dead", 3)]).await;
    for id in &ids[..2] {
        let row = world.db.outbox(id).await;
        assert!(text(&row, "last_error").starts_with("refused:"), "{row:#}");
        assert_eq!(number(&row, "attempt"), 1);
    }
    assert!(text(&world.db.outbox(&ids[2]).await, "last_error").starts_with("attempts:"));
    assert_eq!(world.receiver.count(), 4);
    world.finish().await;
}

async fn slow_destination_harms_nobody(kind: Kind) {
    let fast = Recorder::start().await;
    let world = World::on(kind)
        .await
        .destination("receiver", json!({ "http": { "timeout": "60s" } }))
        .destination("fast", json!({ "http": { "url": fast.url() } }))
        .routes(&[("slow", &["receiver"]), ("**", &["fast"])])
        .relay(json!({ "drainTimeout": "1s" }));
    world.receiver.answer_always(Answer::ok().after(Duration::from_secs(30)));
    let worker = world.start().await;
    let slow = (0..500).map(|n| OutboxRow::new("slow", n).key(&format!("s{}", n % 50)));
    let quick = (0..500).map(|n| OutboxRow::new("fast", n).key(&format!("f{}", n % 50)));
    world.db.insert_all(slow.chain(quick)).await;
    let begun = Instant::now();
    fast.wait_for(500, PATIENCE).await;
    // The promise is 15 s; the bound here is what tells it from waiting for the 30 s of the other receiver.
    assert!(begun.elapsed() < Duration::from_secs(28), "{:?}", begun.elapsed());
    // Longer than two leases under which the slow ones are waited for.
    tokio::time::sleep(Duration::from_secs(7).saturating_sub(begun.elapsed())).await;
    assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
    assert_eq!(fast.count(), 500);
    let slow = world.receiver.requests();
    assert!(!slow.is_empty() && super::claims::by_id(&slow).values().all(|n| *n == 1), "a slow one was asked again");
    world.finish().await;
}

async fn private_addresses_are_refused(kind: Kind) {
    let token = Recorder::start().await;
    let oauth = json!({
        "clientId": "queuebox", "clientSecretFrom": { "env": "SECRET" }, "tokenUrl": token.url_for("/token"),
    });
    let world = World::on(kind)
        .await
        .env("SECRET", "s")
        .relay(json!({ "http": { "blockPrivateAddresses": true } }))
        .destination("named", json!({ "http": { "url": "http://localhost:9/" } }))
        // An address that is public by documentation only; its token is asked for first.
        .destination("tokens", json!({ "http": { "url": "http://192.0.2.1/", "auth": { "oauth2": oauth } } }))
        .routes(&[("tokens", &["tokens"]), ("named", &["named"]), ("**", &["receiver"])]);
    world.start().await;
    world.db.insert_all(["order", "named", "tokens"].map(|topic| OutboxRow::new(topic, 1).max_attempts(1))).await;
    world.db.wait_states("outbox", &[("dead", 3)]).await;
    for row in world.db.rows("SELECT * FROM outbox").await {
        assert!(text(&row, "last_error").contains("private"), "{row:#}");
    }
    assert_eq!((world.receiver.count(), world.receiver.connections(), token.connections()), (0, 0, 0));
    world.finish().await;
}

async fn whole_attempt_has_a_deadline(kind: Kind) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    // Receivers that never come to an end: nothing read, the head in drops, the body in drops.
    let receiver = async |trickle: &'static [u8]| {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                tokio::spawn(async move {
                    if trickle.is_empty() {
                        return std::future::pending::<()>().await;
                    }
                    let mut buffer = [0; 4096];
                    let _ = socket.read(&mut buffer).await;
                    if let Some(at) = trickle.windows(4).position(|four| four == b"\r\n\r\n") {
                        let _ = socket.write_all(&trickle[..at + 4]).await;
                    }
                    loop {
                        if socket.write_all(&trickle[trickle.len() - 1..]).await.is_err() {
                            return;
                        }
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                });
            }
        });
        port
    };
    let silent = receiver(b"").await;
    let head = receiver(b"H").await;
    let body = receiver(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nx").await;
    let mut world = World::on(kind).await.routes(&[
        ("silent", &["silent"]),
        ("head", &["head"]),
        ("body", &["body"]),
        ("handshake", &["handshake"]),
    ]);
    for (name, scheme, port) in
        [("silent", "http", silent), ("head", "http", head), ("body", "http", body), ("handshake", "https", silent)]
    {
        let url = format!("{scheme}://127.0.0.1:{port}/");
        world = world.destination(name, json!({ "http": { "url": url, "timeout": "1s" } }));
    }
    world.start().await;
    let topics = ["silent", "body", "handshake"];
    world.db.insert_all(topics.map(|topic| OutboxRow::new(topic, 1).max_attempts(1))).await;
    world.db.wait_states("outbox", &[("dead", 3)]).await;
    let mut phases = BTreeSet::new();
    for row in world.db.rows("SELECT * FROM outbox").await {
        let reason = text(&row, "last_error");
        assert!(reason.contains("1000 ms"), "{reason}");
        phases.insert(reason.to_owned());
    }
    assert_eq!(phases.len(), 3, "the phase is not named: {phases:?}");
    // "HHHH…" is no HTTP; how it ends may differ, that it ends is the point.
    let id = world.db.insert(OutboxRow::new("head", 1).max_attempts(1)).await;
    world.db.wait_outbox(&id, "dead").await;
    world.finish().await;
}

async fn header_precedence(kind: Kind) {
    let world = World::on(kind)
        .await
        .env("TOKEN", "from-auth")
        .destination(
            "receiver",
            json!({
                "headers": { "X-One": "destination", "X-Two": "destination", "X-Topic": "destination" },
                "http": { "auth": { "header": { "name": "X-Auth", "valueFrom": { "env": "TOKEN" } } } },
            }),
        )
        .source("hooks", json!({ "topic": "order" }));
    let worker = world.start().await;
    let headers = json!({
        "x-two": "row", "x-auth": "row", "X-MESSAGE-ID": "row", "x-topic": "row", "X-Attempt": "7",
        "Host": "elsewhere", "Content-Length": "3", "Transfer-Encoding": "chunked", "Connection": "close", "TE": "trailers",
    });
    let id = world.db.insert(OutboxRow::new("order", 1).headers(headers)).await;
    world.db.wait_outbox(&id, "sent").await;
    let request = world.receiver.requests().remove(0);
    for (name, value) in
        [("x-one", "destination"), ("x-two", "row"), ("x-auth", "row"), ("x-topic", "order"), ("x-attempt", "0")]
    {
        let all: Vec<_> = request.headers.get_all(name).iter().collect();
        assert_eq!(all, [value], "{name}");
    }
    assert_eq!(request.header("x-message-id"), id);
    assert_eq!(request.header("host"), format!("127.0.0.1:{}", world.receiver.port()));
    for name in ["transfer-encoding", "te"] {
        assert_eq!(request.header(name), "", "{name}");
    }
    // What frames a webhook says nothing about the delivery.
    world.receiver.clear();
    let framing = [("accept-encoding", "br"), ("expect", "100-continue"), ("x-kept", "yes")];
    worker.post_with("hooks", &framing, r#"{"id":1,"longer":"than the one sent by hand"}"#).await.accepted();
    let request = world.receiver.wait_for(1, PATIENCE).await.remove(0);
    assert_eq!(request.header("x-kept"), "yes");
    assert_eq!(request.header("expect"), "");
    assert_ne!(request.header("accept-encoding"), "br");
    assert_eq!(request.header("content-length"), request.body.len().to_string());
    world.finish().await;
}

async fn breaker_opens_and_closes(kind: Kind) {
    let world = World::on(kind)
        .await
        .destination("receiver", json!({ "breaker": { "mode": "Auto", "failures": 3, "openFor": "2s" } }));
    world.receiver.answer_always(Answer::status(500));
    let worker = world.start().await;
    world.db.insert_all((1..=3).map(|n| OutboxRow::new("order", n).max_attempts(1))).await;
    world.db.wait_states("outbox", &[("dead", 3)]).await;
    let state = [("destination", "receiver")];
    worker.wait_metric("queuebox_destination_breaker_state", &state, |value| value == 2.0).await;
    // Held without an attempt; the probes that fail cost none either, and each takes another row.
    let ids = world.db.insert_all((4..=6).map(|n| OutboxRow::new("order", n).max_attempts(1))).await;
    let requests = world.receiver.wait_for(5, PATIENCE).await;
    assert_ne!(requests[3].json(), requests[4].json(), "the second probe took the same row");
    for id in &ids {
        let row = world.db.outbox(id).await;
        assert_eq!((text(&row, "state"), number(&row, "attempt")), ("pending", 0));
    }
    world.receiver.answer_always(Answer::ok());
    world.db.wait_states("outbox", &[("dead", 3), ("sent", 3)]).await;
    worker.wait_metric("queuebox_destination_breaker_state", &state, |value| value == 0.0).await;
    world.finish().await;
    // Off: all three are tried at once, whatever went before.
    let world = World::on(kind).await;
    world.receiver.answer_always(Answer::status(500));
    let worker = world.start().await;
    world.db.insert_all((1..=30).map(|n| OutboxRow::new("order", n).max_attempts(1))).await;
    world.db.wait_states("outbox", &[("dead", 30)]).await;
    assert_eq!(worker.metric("queuebox_destination_breaker_state", &state).await, 0.0);
    world.finish().await;
}

on_every_database!(
    http_delivery,
    batch_is_delivered,
    no_route_is_dead,
    at_least_once_after_500,
    always_failing_ends_dead,
    header_precedence,
);
on_postgres!(
    first_route_wins,
    five_deliveries,
    only_2xx_completes,
    permanent_status_is_dead,
    slow_destination_harms_nobody,
    private_addresses_are_refused,
    whole_attempt_has_a_deadline,
    breaker_opens_and_closes,
);
