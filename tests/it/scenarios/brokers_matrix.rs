//! Every source to every destination, on every database: `webhook_reaches_its_destination` and its siblings of brokers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::{
    brokers::{Arrived, BROKERS, Broker, BrokerKind, Line, Message},
    support::{Kind, PATIENCE, World, on_every_database, text},
};

const ENDS: [&str; 4] = ["http", "rabbitmq", "kafka", "nats"];

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn name(kind: BrokerKind) -> &'static str {
    match kind {
        BrokerKind::RabbitMq => "rabbitmq",
        BrokerKind::Kafka => "kafka",
        BrokerKind::Nats => "nats",
    }
}

/// What goes from one end to another: its id says so.
fn body(from: &str, to: &str) -> Value {
    json!({ "id": format!("{from}-{to}"), "to": to, "order": format!("order of {from}"), "text": "é" })
}

/// Sixteen messages, one per pair of ends, each routed by its own event type; then all of them once more.
async fn each_source_to_each_destination(kind: Kind) {
    let (mut inlets, mut outlets) = (BTreeMap::new(), BTreeMap::new());
    let mut world = World::on(kind).await.routes(&[
        ("to.http", &["receiver"]),
        ("to.rabbitmq", &["rabbitmq"]),
        ("to.kafka", &["kafka"]),
        ("to.nats", &["nats"]),
    ]);
    let attributes = json!({ "topic": "to.{{ eventType }}", "eventTypePath": "$.to", "aggregateIdPath": "$.order" });
    let merged = |mut block: Value| {
        block.as_object_mut().unwrap().extend(attributes.as_object().unwrap().clone());
        block
    };
    world = world.source("http", merged(json!({ "http": { "path": "/http" } })));
    for broker in BROKERS {
        let server = Broker::shared(broker).await;
        let (inlet, outlet) = (server.line().await, server.line().await);
        world =
            world.source(name(broker), merged(inlet.as_source())).destination(name(broker), outlet.as_destination());
        inlets.insert(name(broker), inlet);
        outlets.insert(name(broker), outlet);
    }
    let worker = world.start().await;
    for round in 0..2 {
        for to in ENDS {
            let headers = [("traceparent", TRACE), ("x-correlation-id", "c-7"), ("x-source", "forged")];
            let answer = worker.post_with("http", &headers, body("http", to).to_string()).await;
            assert_eq!(answer.status, [202, 200][round]);
        }
        for (from, inlet) in &inlets {
            let messages = ENDS.map(|to| {
                let message = Message::new(body(from, to).to_string());
                message.header("traceparent", TRACE).header("x-correlation-id", "c-7").header("x-source", "forged")
            });
            inlet.publish(&messages).await;
        }
    }
    world.db.wait_states("inbox", &[("processed", 16)]).await;
    world.db.wait_states("outbox", &[("sent", 16)]).await;
    for inlet in inlets.values() {
        inlet.all_acknowledged().await;
    }
    worker.wait_metric("queuebox_inbox_messages_total", &[("status", "duplicate")], |n| n >= 16.0).await;
    check_the_webhooks(&world).await;
    for (to, outlet) in &outlets {
        check_the_line(&world, to, outlet).await;
    }
    world.finish().await;
}

/// Headers that a message from `from` to `to` arrives with, besides the standard ones.
async fn of_the_relay(world: &World, from: &str, to: &str) -> Vec<(&'static str, String)> {
    let sql = format!("SELECT id FROM inbox WHERE source = '{from}' AND idempotency_key = '{from}-{to}'");
    let row = world.db.row(&sql).await;
    vec![
        ("x-source", from.to_owned()),
        ("x-inbox-id", text(&row, "id").to_owned()),
        ("x-idempotency-key", format!("{from}-{to}")),
        ("x-correlation-id", "c-7".to_owned()),
        ("traceparent", TRACE.to_owned()),
        ("x-topic", format!("to.{to}")),
        ("x-attempt", "0".to_owned()),
    ]
}

async fn outbox_id(world: &World, inbox_id: &str) -> String {
    let rows = world.db.rows("SELECT id, headers FROM outbox").await;
    let row = rows.iter().find(|row| row["headers"]["x-inbox-id"] == inbox_id).unwrap();
    text(row, "id").to_owned()
}

async fn check_the_webhooks(world: &World) {
    let requests = world.receiver.wait_for(4, PATIENCE).await;
    assert_eq!(requests.len(), 4);
    for from in ENDS {
        let request = requests.iter().find(|request| request.json()["id"] == format!("{from}-http")).unwrap();
        assert_eq!(request.json(), body(from, "http"));
        for (header, value) in of_the_relay(world, from, "http").await {
            let all: Vec<_> = request.headers.get_all(header).iter().collect();
            assert_eq!(all, [value.as_str()], "{header} from {from}");
        }
        assert_eq!(request.header("x-message-id"), outbox_id(world, request.header("x-inbox-id")).await);
        assert_eq!(request.header("x-message-key"), format!("order of {from}"));
        assert_eq!(request.header("content-type"), "application/json");
    }
}

async fn check_the_line(world: &World, to: &str, outlet: &Line) {
    let arrived = outlet.arrived().await;
    let bodies: BTreeSet<String> = arrived.iter().map(|message| message.json()["id"].to_string()).collect();
    assert_eq!((arrived.len(), bodies.len()), (4, 4), "{arrived:#?}");
    for from in ENDS {
        let wanted = format!("{from}-{to}");
        let message = arrived.iter().find(|message| message.json()["id"] == wanted).unwrap();
        assert_eq!(message.json(), body(from, to));
        assert_eq!(message.repeats, 1, "{message:?}");
        for (header, value) in of_the_relay(world, from, to).await {
            assert_eq!(message.header(header), value, "{header} of {wanted}");
        }
        assert_eq!(message.id(), outbox_id(world, message.header("x-inbox-id")).await);
        check_the_protocol(outlet, message, from);
    }
}

/// What contract 7.3 and 7.4 say about one protocol only.
fn check_the_protocol(outlet: &Line, message: &Arrived, from: &str) {
    let (order, topic) = (format!("order of {from}"), message.header("x-topic"));
    let key = message.key.as_deref();
    match outlet.broker.kind() {
        BrokerKind::RabbitMq => {
            assert_eq!(key, Some(topic));
            assert_eq!((message.header("content-type"), message.header("delivery-mode")), ("application/json", "2"));
        }
        BrokerKind::Kafka => assert_eq!(key, Some(order.as_str())),
        BrokerKind::Nats => {
            assert_eq!(key, Some(format!("{}.{topic}", outlet.name).as_str()));
            assert_eq!(message.header("x-message-key"), order);
        }
    }
}

mod webhook_reaches_its_destination {
    use super::*;

    on_every_database!(each_source_to_each_destination);

    async fn each_source_to_each_destination(kind: Kind) {
        super::each_source_to_each_destination(kind).await;
    }
}
