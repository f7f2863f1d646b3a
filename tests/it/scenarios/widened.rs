//! Sections A and C once more with the built program: what the rooms show by themselves, shown on a real database and real brokers.

use queuebox_testkit::{self as testkit, CANARY, Process};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    brokers::{Broker, BrokerKind, Message, on_every_broker},
    support::{Db, Kind, PATIENCE, Worker, World, on_every_database, text},
};

/// Sends bytes as they are and reads the answer until the other side has said it: head and body.
async fn raw(worker: &Worker, bytes: impl AsRef<[u8]>) -> String {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", worker.http)).await.unwrap();
    // A refusal may come, and the connection end, before everything is written.
    let _ = stream.write_all(bytes.as_ref()).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an answer");
    String::from_utf8_lossy(&answer).into_owned()
}

fn request(source: &str, headers: &str, body: &str) -> String {
    format!("POST /inbox/{source} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n{body}")
}

mod webhook_answers_match_the_table {
    use super::*;

    async fn with_a_database(kind: Kind) {
        let http = |name: &str, more: Value| {
            let mut block = json!({ "path": format!("/{name}") });
            block.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "http": block })
        };
        let world = World::on(kind)
            .await
            .env("TOKEN", CANARY)
            .relay(json!({
                "inbox": { "maxBodySize": "4KiB", "bodyTimeout": "1s", "storeTimeout": "1s", "relay": { "enabled": false } },
            }))
            .source("hooks", json!({}))
            .source("secret", http("secret", json!({ "auth": { "bearer": { "tokenFrom": { "env": "TOKEN" } } } })))
            .source("limited", http("limited", json!({ "rateLimit": { "requestsPerMinute": 1 } })))
            .source("shaped", json!({ "transform": { "expression": "$error('no')" } }))
            .source("filtered", json!({ "filter": { "require": [{ "header": "X-Kind", "equals": "order" }] } }))
            .source("paused", json!({ "paused": true }));
        let worker = world.start().await;
        let answer = async |source: &str, headers: &[(&str, &str)], body: &str| {
            let answer = worker.post_with(source, headers, body).await;
            assert!(!answer.header("x-correlation-id").is_empty(), "{answer:?}");
            (answer.status, answer.body)
        };
        let stored = worker.post("hooks", r#"{"id":"1"}"#).await;
        let id = stored.accepted();
        assert_eq!(stored.body, format!(r#"{{"messageId":"{id}"}}"#));
        let error = |text: &str| format!(r#"{{"error":"{text}"}}"#);
        for (source, body, status, said) in [
            ("hooks", r#"{"id":"1"}"#, 200, r#"{"status":"duplicate"}"#.to_owned()),
            ("filtered", r#"{"id":"1"}"#, 202, r#"{"status":"filtered"}"#.to_owned()),
            ("hooks", "{", 400, error("Invalid JSON")),
            ("paused", r#"{"id":"1"}"#, 503, error("Source is paused")),
        ] {
            assert_eq!(answer(source, &[], body).await, (status, said), "{source} {body}");
        }
        for (source, headers, body, status, begins) in [
            ("hooks", [("x-a", "b")], r#"{"no":"key"}"#, 400, r#"{"error":"No idempotency key"#),
            ("hooks", [("x-a", "b")], "{\"id\":\"a\\u0000\"}", 400, r#"{"error":""#),
            ("secret", [("authorization", "Bearer wrong")], "{", 401, r#"{"error":""#),
            ("shaped", [("x-a", "b")], r#"{"id":"1"}"#, 422, r#"{"error":"Transform failed: "#),
            ("hooks", [("content-encoding", "gzip")], "x", 415, r#"{"error":"Content-Encoding is not supported"}"#),
        ] {
            let (found, said) = answer(source, &headers, body).await;
            assert_eq!(found, status, "{source} {body}: {said}");
            assert!(said.starts_with(begins), "{source} {body}: {said}");
        }
        // Of a declared length and chunked, exactly the limit and one more.
        let body = |length: usize| format!("{{\"id\":\"{}\"}}", "x".repeat(length - 9));
        let of = |length: usize| format!(r#"{{"id":"l{length}","x":"{}"}}"#, "x".repeat(length - 21));
        assert_eq!(of(4096).len(), 4096);
        assert_eq!(answer("hooks", &[], &of(4096)).await.0, 202);
        let too_large = error("Request body exceeds 4096 bytes");
        assert_eq!(answer("hooks", &[], &body(4097)).await, (413, too_large.clone()));
        let chunked = format!("Transfer-Encoding: chunked\r\n\r\n1001\r\n{}\r\n0\r\n", "x".repeat(4097));
        let said = raw(&worker, request("hooks", &chunked, "")).await;
        assert!(said.starts_with("HTTP/1.1 413") && said.ends_with(&too_large), "{said}");
        let said = raw(&worker, request("hooks", "Content-Length: 9\r\n", "{")).await;
        assert!(said.starts_with("HTTP/1.1 408"), "{said}");
        assert!(said.ends_with(&error("Request body was not received in time")), "{said}");
        let large = format!("X-Large: {}\r\nContent-Length: 2\r\n", "h".repeat(70 << 10));
        let said = raw(&worker, request("hooks", &large, "{}")).await;
        assert!(said.starts_with("HTTP/1.1 431"), "{said}");
        for (line, status, reason) in [
            ("GET /inbox/hooks", "405 Method Not Allowed\r\n", "Only POST is taken here"),
            ("PUT /inbox/hooks", "405 Method Not Allowed\r\n", "Only POST is taken here"),
            ("POST /inbox/nobody", "404 Not Found\r\n", "No source at this path"),
            ("POST /metrics", "404 Not Found\r\n", "No source at this path"),
        ] {
            let said =
                raw(&worker, format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
                    .await;
            assert!(
                said.starts_with(&format!("HTTP/1.1 {status}")) && said.ends_with(&error(reason)),
                "{line}: {said}"
            );
        }
        assert_eq!(answer("limited", &[], r#"{"id":"1"}"#).await.0, 202);
        let limited = worker.post("limited", r#"{"id":"2"}"#).await;
        assert_eq!((limited.status, limited.body.as_str()), (429, ""));
        assert!(limited.header("retry-after").parse::<u32>().unwrap() >= 1);
        // Another transaction holds the key for longer than anybody waits.
        let mut first = world.db.begin().await;
        first.execute("INSERT INTO inbox (source, idempotency_key, payload) VALUES ('hooks', 'held', '{}')").await;
        assert_eq!(answer("hooks", &[], r#"{"id":"held"}"#).await, (500, error("Storage failed")));
        first.rollback().await;
        let rows = world.db.rows("SELECT idempotency_key FROM inbox WHERE idempotency_key <> 'held'").await;
        assert_eq!(rows.len(), 3, "what is refused leaves no row: {rows:?}");
        world.finish().await;
    }

    on_every_database!(with_a_database);
}

mod rate_limit_answers_429 {
    use super::*;

    /// Who is not let in uses nothing up.
    async fn with_credentials(kind: Kind) {
        let auth = json!({ "bearer": { "tokenFrom": { "env": "TOKEN" } } });
        let http = json!({ "path": "/hooks", "auth": auth, "rateLimit": { "requestsPerMinute": 3 } });
        let world = World::on(kind).await.env("TOKEN", CANARY).source("hooks", json!({ "http": http }));
        let worker = world.start().await;
        for _ in 0..10 {
            assert_eq!(worker.post("hooks", r#"{"id":"x"}"#).await.status, 401);
        }
        let bearer = format!("Bearer {CANARY}");
        let post = async |n: i32| {
            worker.post_with("hooks", &[("authorization", &bearer)], json!({ "id": n }).to_string()).await
        };
        for n in 0..3 {
            post(n).await.accepted();
        }
        let limited = post(3).await;
        assert_eq!((limited.status, limited.body.as_str()), (429, ""));
        assert!(limited.header("retry-after").parse::<u32>().unwrap() >= 1, "{limited:?}");
        world.db.wait_states("inbox", &[("processed", 3)]).await;
        world.finish().await;
    }

    on_every_database!(with_credentials);
}

mod long_key_is_refused {
    use super::*;

    async fn by_webhook(kind: Kind) {
        let world = World::on(kind).await.source("hooks", json!({}));
        let worker = world.start().await;
        // Characters count, not bytes.
        for (character, length, status) in [("k", 255, 202), ("k", 256, 400), ("é", 255, 202), ("é", 256, 400)] {
            let answer = worker.post("hooks", json!({ "id": character.repeat(length) }).to_string()).await;
            assert_eq!(answer.status, status, "{length} × {character}: {answer:?}");
        }
        world.db.wait_states("inbox", &[("processed", 2)]).await;
        world.finish().await;
    }

    async fn by_broker(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let world = World::on(Kind::Postgres).await.source("events", line.as_source());
        world.start().await;
        let body = |length: usize| json!({ "id": "k".repeat(length) }).to_string();
        line.publish(&[Message::new(body(256)), Message::new(body(255))]).await;
        world.db.wait_states("inbox", &[("dead", 1), ("processed", 1)]).await;
        line.all_acknowledged().await;
        let dead = world.db.row("SELECT * FROM inbox WHERE state = 'dead'").await;
        assert!(text(&dead, "last_error").starts_with("bad_key: "), "{dead:#}");
        let digest = text(&dead, "idempotency_key").strip_prefix("sha256:").unwrap_or_default();
        assert_eq!(digest.len(), 64, "{dead:#}");
        assert_eq!(dead["payload"]["id"].as_str().map(str::len), Some(256), "nothing is cut");
        world.finish().await;
    }

    on_every_database!(by_webhook);
    on_every_broker!(by_broker);
}

mod filtered_message_leaves_no_row {
    use super::*;

    const FILTERED: &str = "queuebox_inbox_filtered_total";

    async fn by_broker(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let filter = json!({ "filter": { "exclude": [{ "header": "x-test", "equals": "yes" }] } });
        let world = World::on(Kind::Sqlite).await.source("events", line.as_source()).source("events", filter);
        let worker = world.start().await;
        let dropped = Message::new(r#"{"id":"dropped"}"#).header("x-test", "yes");
        line.publish(&[dropped, Message::new(r#"{"id":"kept"}"#)]).await;
        world.db.wait_states("inbox", &[("processed", 1)]).await;
        line.all_acknowledged().await;
        worker.wait_metric(FILTERED, &[("source", "events")], |n| n == 1.0).await;
        assert_eq!(text(&world.db.row("SELECT * FROM inbox").await, "idempotency_key"), "kept");
        world.finish().await;
    }

    on_every_broker!(by_broker);

    /// The classic file and its variables say the same.
    #[tokio::test]
    async fn from_file_and_from_variables() {
        const HEAD: &str = "destinations:\n  d: {type: http, baseUrl: \"http://127.0.0.1:9\"}\nroutes: [{topicPattern: \"**\", destination: d}]\n";
        const IN_FILE: &str = "sources:\n  hooks: {path: /hooks, idempotencyKeyPath: $.id, topic: t, filter: {require: [{header: X-Kind, equals: order}]}}\n";
        const BARE: &str = "sources:\n  hooks: {path: /hooks, idempotencyKeyPath: $.id, topic: t}\n";
        let variables = [
            ("QUEUEBOX_SOURCES_HOOKS_FILTER_REQUIRE_0_HEADER", "X-Kind"),
            ("QUEUEBOX_SOURCES_HOOKS_FILTER_REQUIRE_0_EQUALS", "order"),
        ];
        for (sources, variables) in [(IN_FILE, &[][..]), (BARE, &variables[..])] {
            let folder = tempfile::Builder::new().prefix("queuebox-classic-").tempdir().unwrap();
            let port = testkit::free_port();
            let path = folder.path().join("queuebox.yml");
            std::fs::write(&path, format!("server: {{httpPort: {port}}}\n{HEAD}{sources}")).unwrap();
            let program = Process::queuebox(["run", "--config", path.to_str().unwrap()]).dir(folder.path());
            let program = variables.iter().fold(program, |program, (name, value)| program.env(name, value));
            let worker = Worker::of(program.spawn(), port, port);
            worker.ready().await;
            let dropped = worker.post("hooks", r#"{"id":"1"}"#).await;
            assert_eq!((dropped.status, dropped.json()), (202, json!({ "status": "filtered" })), "{variables:?}");
            worker.post_with("hooks", &[("x-kind", "order")], r#"{"id":"2"}"#).await.accepted();
            assert_eq!(worker.metric(FILTERED, &[("source", "hooks")]).await, 1.0);
            assert!(worker.process.terminate(PATIENCE).await.success());
            // A file without a database has it here.
            let db = Db::sqlite(&folder.path().join("queuebox.db")).await;
            let rows = db.rows("SELECT idempotency_key FROM inbox").await;
            assert_eq!(rows, [json!({ "idempotency_key": "2" })], "what is dropped leaves no row");
            db.close().await;
        }
    }
}

mod publish_time_order {
    use super::*;

    /// A source whose rows wait long enough to be put in order, and what is sent to it: last published first, one from the future.
    fn source() -> Value {
        json!({
            "topic": "order", "aggregateIdPath": "$.order", "initialDelay": "15s", "scheduledAtPath": "$.at",
        })
    }

    fn bodies() -> Vec<String> {
        let now = jiff::Timestamp::now().as_millisecond();
        let body = |n: i64, at: i64| json!({ "id": n, "order": "o-1", "at": at }).to_string();
        let mut bodies: Vec<String> = (0..5).rev().map(|n| body(n, now - 3_000 + n * 100)).collect();
        bodies.push(body(5, now + 3_600_000));
        bodies
    }

    async fn in_order(world: &World) {
        let requests = world.receiver.wait_for(6, PATIENCE).await;
        let order: Vec<i64> = requests.iter().map(|request| request.json()["id"].as_i64().unwrap()).collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5], "by publish time; the future counts as the receipt");
    }

    async fn by_webhook(kind: Kind) {
        let world = World::on(kind).await.source("hooks", source());
        let worker = world.start().await;
        for body in bodies() {
            worker.post("hooks", body).await.accepted();
        }
        in_order(&world).await;
        world.finish().await;
    }

    async fn by_broker(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let world = World::on(Kind::Postgres).await.source("events", line.as_source()).source("events", source());
        world.start().await;
        let messages: Vec<Message> = bodies().into_iter().map(Message::new).collect();
        line.publish(&messages).await;
        in_order(&world).await;
        world.finish().await;
    }

    on_every_database!(by_webhook);
    on_every_broker!(by_broker);
}

mod secret_rotation {
    use super::*;

    /// Files change while messages flow: nobody restarts, old and new overlap, nothing is refused that should not be, nothing is lost.
    async fn of_files(kind: Kind) {
        let world = World::on(kind).await;
        let file = |name: &str| world.folder().join(name);
        let (current, previous, outgoing) = (file("current"), file("previous"), file("outgoing"));
        for (path, value) in [(&current, "first-token"), (&previous, "nobody-has-it"), (&outgoing, "out-one")] {
            std::fs::write(path, value).unwrap();
        }
        let from = |path: &std::path::Path| json!({ "file": path });
        let auth = json!({ "bearer": { "tokenFrom": from(&current), "previousTokenFrom": from(&previous) } });
        let out = json!({ "http": { "auth": { "bearer": { "tokenFrom": from(&outgoing) } } } });
        let world =
            world.source("hooks", json!({ "http": { "path": "/hooks", "auth": auth } })).destination("receiver", out);
        let worker = world.start().await;
        let sent = std::cell::Cell::new(0);
        let post = async |token: &str| {
            let authorization = format!("Bearer {token}");
            let body = json!({ "id": sent.get() }).to_string();
            let status = worker.post_with("hooks", &[("authorization", &authorization)], body).await.status;
            sent.set(sent.get() + i64::from(status == 202));
            status
        };
        let becomes = async |token: &str, status: u16| {
            testkit::eventually(&format!("{token} gets {status}"), PATIENCE, || async {
                (post(token).await == status).then_some(())
            })
            .await;
        };
        assert_eq!((post("first-token").await, post("second-token").await), (202, 401));
        // The old one moves to the second place.
        std::fs::write(&previous, "first-token").unwrap();
        std::fs::write(&current, "second-token").unwrap();
        std::fs::write(&outgoing, "out-two").unwrap();
        becomes("second-token", 202).await;
        becomes("first-token", 202).await;
        std::fs::write(&previous, "nobody-has-it").unwrap();
        becomes("first-token", 401).await;
        assert_eq!(post("second-token").await, 202);
        testkit::eventually("the receiver sees the new one", PATIENCE, || async {
            assert_eq!(post("second-token").await, 202);
            let requests = world.receiver.requests();
            requests.last().is_some_and(|request| request.header("authorization") == "Bearer out-two").then_some(())
        })
        .await;
        world.db.wait_states("outbox", &[("sent", sent.get())]).await;
        let requests = world.receiver.requests();
        assert_eq!(i64::try_from(requests.len()).unwrap(), sent.get());
        assert!(requests.iter().all(|request| request.header("authorization").starts_with("Bearer out-")));
        let log = worker.process.output();
        assert!(!log.contains("-token") && !log.contains("out-one") && !log.contains("out-two"), "{log}");
        world.finish().await;
    }

    on_every_database!(of_files);
}
