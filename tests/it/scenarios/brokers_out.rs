//! Section E: sending to brokers, with the built program and a real database.

use std::collections::BTreeSet;

use queuebox_testkit::{private_nats_with, private_rabbitmq_with};
use serde_json::json;

use crate::{
    brokers::{Arrived, Broker, BrokerKind, Line, on_every_broker},
    support::{Kind, OutboxRow, PATIENCE, World, number, text},
};

/// A database whose rows go to a line, as destination `out`.
async fn sending_to(kind: Kind, line: &Line) -> World {
    World::on(kind).await.destination("out", line.as_destination()).routes(&[("http", &["receiver"]), ("**", &["out"])])
}

const DESTINATION: &str = "destination.out";

/// An application's row with everything that has a place in a message, and the message that it became.
async fn one_row(kind: Kind, broker: BrokerKind) -> (Line, String, Arrived) {
    let line = Broker::shared(broker).await.line().await;
    let world = sending_to(kind, &line).await;
    world.start().await;
    let row = OutboxRow::new("order.created", 1)
        .key("customer-7")
        .payload(r#"{"order":1,"text":"é"}"#)
        .headers(json!({ "tenant": "a", "number": 5 }))
        .set("trace_parent", "'00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'");
    let id = world.db.insert(row).await;
    let row = world.db.wait_outbox(&id, "sent").await;
    assert_eq!(number(&row, "attempt"), 0);
    let mut arrived = line.wait_arrived("the message", |arrived| !arrived.is_empty()).await;
    assert_eq!(arrived.len(), 1);
    let message = arrived.remove(0);
    assert_eq!(message.json(), json!({ "order": 1, "text": "é" }));
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers =
        [("x-topic", "order.created"), ("x-attempt", "0"), ("tenant", "a"), ("number", "5"), ("traceparent", trace)];
    for (name, value) in headers {
        assert_eq!(message.header(name), value, "{name} of {message:?}");
    }
    world.finish().await;
    (line, id, message)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_delivery() {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let (_, id, message) = one_row(kind, BrokerKind::RabbitMq).await;
        assert_eq!(message.key.as_deref(), Some("order.created"), "routing key");
        for (name, value) in [("message-id", id.as_str()), ("content-type", "application/json"), ("delivery-mode", "2")]
        {
            assert_eq!(message.header(name), value, "{name}");
        }
    }
}

mod kafka_and_nats_delivery {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_kafka() {
        for kind in [Kind::Sqlite, Kind::Postgres] {
            let (_, id, message) = one_row(kind, BrokerKind::Kafka).await;
            assert_eq!((message.key.as_deref(), message.header("x-message-id")), (Some("customer-7"), id.as_str()));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_nats() {
        for kind in [Kind::Sqlite, Kind::Postgres] {
            let (line, id, message) = one_row(kind, BrokerKind::Nats).await;
            assert_eq!(message.key, Some(format!("{}.order.created", line.name)), "subject");
            assert_eq!((message.header("x-message-id"), message.header("x-message-key")), (id.as_str(), "customer-7"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unroutable_is_a_failure() {
    let line = Broker::shared(BrokerKind::RabbitMq).await.line().await;
    line.unbind("#").await;
    line.bind("ok.*").await;
    let world = sending_to(Kind::Postgres, &line).await;
    let worker = world.start().await;
    let row = |n: i64| OutboxRow::new(if n % 2 == 1 { "ok.row" } else { "no.row" }, n).max_attempts(1000);
    world.db.insert_all((1..=20).map(row)).await;
    let failed = "SELECT count(*) AS n FROM outbox WHERE topic = 'no.row' AND state = 'pending' AND attempt > 0";
    world.db.wait_row(failed, |row| number(row, "n") == 10).await;
    world.db.wait_states("outbox", &[("sent", 10), ("pending", 10)]).await;
    for row in world.db.rows("SELECT * FROM outbox").await {
        let unroutable = text(&row, "topic") == "no.row";
        assert_eq!(text(&row, "state") == "pending", unroutable, "{row:#}");
        if unroutable {
            let reason = text(&row, "last_error");
            assert!(reason.contains("312") && reason.contains("no.row"), "{reason}");
        }
    }
    let numbers = |arrived: &[Arrived]| -> Vec<i64> {
        let mut all: Vec<i64> = arrived.iter().map(|message| message.json()["n"].as_i64().unwrap()).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(numbers(&line.arrived().await), (1..=20).step_by(2).collect::<Vec<i64>>());
    line.bind("no.*").await;
    world.db.wait_states("outbox", &[("sent", 20)]).await;
    assert_eq!(numbers(&line.arrived().await), (1..=20).collect::<Vec<i64>>());
    // The client library would print what came back, payload and all.
    let log = worker.process.output();
    assert!(!log.contains("returned us a message"), "{log}");
    world.finish().await;
}

async fn broker_down_spends_no_attempt(kind: BrokerKind) {
    let broker = Broker::private(kind).await;
    let line = broker.line().await;
    let world = sending_to(Kind::Postgres, &line).await;
    let worker = world.start().await;
    let first = world.db.insert(OutboxRow::new("order", 0)).await;
    world.db.wait_outbox(&first, "sent").await;
    broker.kill9().await;
    // The first one to meet the dead broker may have been on its way, which costs an attempt.
    let unlucky = world.db.insert(OutboxRow::new("order", 0)).await;
    let why = worker.wait_component(DESTINATION, "down").await;
    assert!(!why.is_empty());
    world.db.insert_all((1..=20).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")))).await;
    for round in 1..=5 {
        // Other destinations go on, so the rows that wait had their turns.
        world.db.insert_all((0..20).map(|n| OutboxRow::new("http", n))).await;
        world.receiver.wait_for(20 * round, PATIENCE).await;
    }
    let held = "SELECT count(*) AS n FROM outbox WHERE topic = 'order' AND state = 'pending' AND attempt = 0 \
                AND last_error IS NULL";
    assert_eq!(world.db.count(&format!("{held} AND id <> '{unlucky}'")).await, 20);
    assert_eq!(worker.metric("queuebox_destination_up", &[("destination", "out")]).await, 0.0);
    broker.start().await;
    world.db.wait_states("outbox", &[("sent", 122)]).await;
    let tried = format!("SELECT count(*) AS n FROM outbox WHERE attempt > 0 AND id <> '{unlucky}'");
    assert_eq!(world.db.count(&tried).await, 0);
    worker.wait_component(DESTINATION, "up").await;
    let numbers: BTreeSet<i64> =
        line.arrived().await.iter().map(|message| message.json()["n"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (0..=20).collect());
    world.finish().await;
}

async fn too_large_fails_alone(kind: BrokerKind) {
    const LIMIT: usize = 65_536;
    let broker = match kind {
        BrokerKind::RabbitMq => {
            Broker::rabbitmq(private_rabbitmq_with(&format!("max_message_size = {LIMIT}\n")).await).await
        }
        BrokerKind::Kafka => Broker::shared(kind).await,
        BrokerKind::Nats => Broker::nats(private_nats_with(&format!("max_payload: {LIMIT}\n")).await),
    };
    let line = broker.line_limited(1, Some(LIMIT)).await;
    let world = sending_to(Kind::Postgres, &line).await;
    let worker = world.start().await;
    let row = |n: i64, bytes: usize| {
        OutboxRow::new("order", n).payload(&json!({ "n": n, "fill": "x".repeat(bytes) }).to_string())
    };
    let of_the_key = [row(0, 10), row(1, 70_000), row(2, 10)].map(|row| row.key("k"));
    let others = (3..53).map(|n| row(n, 1_000));
    let ids = world.db.insert_all(of_the_key.into_iter().chain(others)).await;
    world.db.wait_states("outbox", &[("sent", 52), ("dead", 1)]).await;
    let large = world.db.outbox(&ids[1]).await;
    let reason = text(&large, "last_error");
    assert!(text(&large, "state") == "dead" && reason.starts_with("refused:"), "{large:#}");
    assert!(reason.contains("65536") || reason.contains("65,536"), "the limit is not named: {reason}");
    assert_eq!(world.db.count("SELECT count(*) AS n FROM outbox WHERE state = 'sent' AND attempt > 0").await, 0);
    // What the broker taught is kept: the next one is refused without harm to anybody.
    let again = world.db.insert(row(60, 80_000)).await;
    let small = world.db.insert(row(61, 10)).await;
    world.db.wait_outbox(&again, "dead").await;
    world.db.wait_outbox(&small, "sent").await;
    worker.wait_component(DESTINATION, "up").await;
    let numbers: BTreeSet<i64> =
        line.arrived().await.iter().map(|message| message.json()["n"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (0..=61).filter(|n| *n < 53 && *n != 1 || *n == 61).collect());
    world.finish().await;
}

/// The block of a destination whose address is this template, and whose keys come from `key` where the kind has keys.
fn addressed(line: &Line, template: &str, key: &str) -> serde_json::Value {
    let mut patch = line.as_destination();
    match line.broker.kind() {
        BrokerKind::RabbitMq => {
            patch["rabbitmq"]["exchange"] = json!(template);
            patch["rabbitmq"]["routingKey"] = json!(key);
        }
        BrokerKind::Kafka => {
            patch["kafka"]["topic"] = json!(template);
            patch["kafka"]["keyTemplate"] = json!("{{ topic }}");
        }
        BrokerKind::Nats => patch["nats"]["subject"] = json!(format!("{template}.{key}")),
    }
    patch
}

/// The block of a destination whose address is the column `aggregate_type`.
fn from_column(line: &Line) -> serde_json::Value {
    let mut patch = line.as_destination();
    let (block, template, from) = match line.broker.kind() {
        BrokerKind::RabbitMq => ("rabbitmq", "exchange", "exchangeFrom"),
        BrokerKind::Kafka => ("kafka", "topic", "topicFrom"),
        BrokerKind::Nats => ("nats", "subject", "subjectFrom"),
    };
    // The template stays where it is: the column wins.
    patch[block][template] = json!("nowhere");
    patch[block][from] = json!("aggregate_type");
    patch
}

async fn addresses_and_keys_from_templates(kind: BrokerKind) {
    let line = Broker::shared(kind).await.line().await;
    let world = World::on(Kind::Sqlite)
        .await
        .destination("template", addressed(&line, "{{payload.to.line}}", "{{ topic }}.{{ data.n }}"))
        .destination("column", from_column(&line))
        .relay(json!({ "routes": [
            { "topics": ["plain"], "destinations": ["template"] },
            { "topics": ["routed"], "destinations": ["template"], "routingKey": "of.{{ payload.nothing }}.{{ key }}",
              "routingKeyMissingFieldDefault": "none" },
            { "topics": ["column"], "destinations": ["column"] },
        ] }));
    world.start().await;
    let row = |topic: &str, n: i64| {
        let payload = json!({ "n": n, "to": { "line": line.name } });
        OutboxRow::new(topic, n).key("k").payload(&payload.to_string())
    };
    let column = match kind {
        BrokerKind::Nats => format!("{}.column", line.name),
        _ => line.name.clone(),
    };
    let column = row("column", 3).set("aggregate_type", &format!("'{column}'"));
    world.db.insert_all([row("plain", 1), row("routed", 2), column]).await;
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    let mut arrived = line.wait_arrived("three messages", |arrived| arrived.len() == 3).await;
    arrived.sort_by_key(|message| message.json()["n"].as_i64());
    let keys: Vec<&str> = arrived.iter().map(|message| message.key.as_deref().unwrap()).collect();
    let name = &line.name;
    match kind {
        BrokerKind::RabbitMq => assert_eq!(keys, ["plain.1", "of.none.k", "column"]),
        BrokerKind::Kafka => assert_eq!(keys, ["plain", "of.none.k", "k"]),
        BrokerKind::Nats => {
            assert_eq!(keys, [format!("{name}.plain.1"), format!("{name}.routed.2"), format!("{name}.column")]);
        }
    }
    // An address that is empty fails the attempt, and says so.
    let empty = OutboxRow::new("column", 4).max_attempts(2);
    let id = world.db.insert(empty).await;
    let row = world.db.wait_outbox(&id, "dead").await;
    assert_eq!(number(&row, "attempt"), 2);
    assert!(text(&row, "last_error").starts_with("attempts:") && text(&row, "last_error").contains("empty"), "{row:#}");
    // A placeholder that nobody knows is refused before anything runs.
    let world = world.destination("template", addressed(&line, "{{ paylod.to }}", "{{ topic }}"));
    let folder = world.write_manifests(1, 2);
    let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    let said = format!("{out}{log}");
    assert!(!status.success() && said.contains("paylod.to") && said.contains("template"), "{said}");
    world.finish().await;
}

async fn header_precedence(kind: BrokerKind) {
    let line = Broker::shared(kind).await.line().await;
    let mut patch = line.as_destination();
    patch["headers"] = json!({ "X-One": "destination", "X-Two": "destination", "X-Topic": "destination" });
    let world = World::on(Kind::Sqlite)
        .await
        .destination("out", patch)
        .routes(&[("**", &["out"])])
        .source("hooks", json!({ "topic": "hooked" }));
    let worker = world.start().await;
    let headers = json!({
        "x-two": "row", "X-TOPIC": "row", "x-Attempt": "7", "X-Message-Id": "row",
        "Host": "elsewhere", "Content-Length": "3", "Transfer-Encoding": "chunked", "Connection": "close", "TE": "trailers",
        "Content-Encoding": "gzip", "Proxy-Connection": "close", "Nats-Msg-Id": "row", "nats-expected-stream": "other",
    });
    let id = world.db.insert(OutboxRow::new("order", 1).key("k").headers(headers)).await;
    world.db.wait_outbox(&id, "sent").await;
    let hooked = [("x-kept", "yes"), ("accept-encoding", "br"), ("x-two", "hook")];
    worker.post_with("hooks", &hooked, r#"{"id":1,"n":2}"#).await.accepted();
    let mut arrived = line.wait_arrived("two messages", |arrived| arrived.len() == 2).await;
    arrived.sort_by_key(|message| message.json()["n"].as_i64());
    let (row, hook) = (&arrived[0], &arrived[1]);
    for (name, value) in [("x-one", "destination"), ("x-two", "row"), ("x-topic", "order"), ("x-attempt", "0")] {
        assert_eq!(row.header(name), value, "{name} of {row:?}");
    }
    assert_eq!((row.id(), row.repeats), (id.as_str(), 1), "{row:?}");
    assert_eq!((hook.header("x-kept"), hook.header("x-one"), hook.header("x-two")), ("yes", "destination", "hook"));
    let framing = [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "te",
        "content-encoding",
        "proxy-connection",
        "accept-encoding",
    ];
    for name in framing {
        assert_eq!((row.header(name), hook.header(name)), ("", ""), "{name} was sent");
    }
    if kind == BrokerKind::Nats {
        assert_eq!(row.header("nats-expected-stream"), "");
        assert_ne!(row.header("nats-msg-id"), "row");
    }
    world.finish().await;
}

on_every_broker!(
    broker_down_spends_no_attempt,
    too_large_fails_alone,
    addresses_and_keys_from_templates,
    header_precedence,
);
