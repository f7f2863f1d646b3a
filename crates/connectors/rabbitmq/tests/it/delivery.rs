//! What arrives, and what is received.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldArray, FieldTable},
};
use queuebox_conformance::source::{FakeIntake, Running};
use queuebox_core::{
    Class,
    ports::Destination,
    template::{Address, Template, Vocabulary},
};
use queuebox_rabbitmq::{DeliveryMode, DestinationConfig, RabbitDestination, RabbitSource};
use queuebox_testkit::{eventually, private_rabbitmq_with};

use crate::support::{self, Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn properties_and_headers_are_those_of_the_contract() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_exchange("ex").await;
    client.declare_queue("q").await;
    client.bind("q", "ex", "#").await;
    for (mode, expected) in [(DeliveryMode::Persistent, "2"), (DeliveryMode::Transient, "1")] {
        let destination =
            RabbitDestination::new(DestinationConfig { delivery_mode: mode, ..support::destination(&url) });
        let mut row = support::row(3, "order.created");
        row.attempt = 2;
        row.headers = vec![("traceparent".into(), "00-a-b-01".into()), ("x-note".into(), "grüße".into())];
        destination.publish(row.clone()).await.unwrap();
        let arrived = client.take_all("q").await.pop().expect("one message");
        assert_eq!((arrived.id, arrived.key.as_deref()), (Some(row.id), Some("order.created")));
        assert_eq!(arrived.body, row.payload);
        let expected = [
            ("content-type", "application/json"),
            ("delivery-mode", expected),
            ("x-topic", "order.created"),
            ("x-attempt", "2"),
            ("traceparent", "00-a-b-01"),
            ("x-note", "grüße"),
        ];
        for (name, value) in expected {
            assert_eq!(arrived.headers.get(name).map(String::as_str), Some(value), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_from_a_template_is_missing_for_its_own_rows_only() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_exchange("good").await;
    client.declare_queue("q").await;
    client.bind("q", "good", "#").await;
    let exchange = Address::Template(Template::parse("{{ topic }}", Vocabulary::Address).unwrap());
    let destination =
        RabbitDestination::new(DestinationConfig { exchange, declare_exchange: false, ..support::destination(&url) });
    let rows: Vec<_> = (0..40).map(|n| support::row(n, if n % 4 == 0 { "bad" } else { "good" })).collect();
    let outcomes = futures::future::join_all(rows.iter().map(|row| destination.publish(row.clone()))).await;
    for (row, outcome) in rows.iter().zip(outcomes) {
        match outcome {
            Ok(()) => assert_eq!(row.topic, "good"),
            Err(fault) => {
                assert_eq!((row.topic.as_str(), fault.class), ("bad", Class::Transient), "{fault}");
                assert!(fault.detail.contains("\"bad\""), "{fault}");
            }
        }
    }
    destination.probe().await.expect("the broker is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_of_another_type_is_named() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_exchange("ex").await;
    let config =
        DestinationConfig { exchange_type: queuebox_rabbitmq::ExchangeType::Fanout, ..support::destination(&url) };
    let destination = RabbitDestination::new(config);
    for outcome in [destination.probe().await, destination.publish(support::row(0, "t")).await] {
        let fault = outcome.expect_err("it is a topic exchange");
        assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "exchange"));
        assert!(fault.detail.contains("\"ex\"") && fault.detail.contains("inequivalent"), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_header_and_the_properties_are_received() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_queue("q").await;
    let mut table = FieldTable::default();
    table.insert("n".into(), AMQPValue::LongLongInt(-7));
    table.insert("b".into(), AMQPValue::Boolean(true));
    table.insert("t".into(), AMQPValue::Timestamp(1_700_000_000));
    table.insert(
        "a".into(),
        AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1), AMQPValue::Boolean(false)])),
    );
    table.insert("x".into(), AMQPValue::ByteArray(vec![0xff, 0x00].into()));
    table.insert("v".into(), AMQPValue::Void);
    let properties = BasicProperties::default()
        .with_headers(table)
        .with_message_id("m-1".into())
        .with_correlation_id("c-1".into())
        .with_timestamp(1_700_000_001);
    client.publish("q", b"not json", properties).await;
    let running = Running::start(Arc::new(RabbitSource::new(support::source(&url, "q"))), FakeIntake::new());
    running.intake.stores(1).await;
    let (_, got, _) = running.intake.log().remove(0);
    let expected =
        [("a", "[1,false]"), ("b", "true"), ("n", "-7"), ("t", "2023-11-14T22:13:20Z"), ("x", "base64:/wA=")];
    let expected: Vec<_> = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(got.headers, expected);
    assert_eq!(got.body, Bytes::from_static(b"not json"));
    assert_eq!((got.message_id.as_deref(), got.correlation_id.as_deref()), (Some("m-1"), Some("c-1")));
    assert_eq!((got.published_at_us, got.position), (Some(1_700_000_001_000_000), None));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_with_an_alarm_holds_the_rows() {
    let broker = private_rabbitmq_with("disk_free_limit.absolute = 900000GB\n").await;
    let config = DestinationConfig { timeout: Duration::from_secs(3), ..support::destination(&broker.url()) };
    let destination = RabbitDestination::new(config);
    // The broker tells a publisher when it publishes, and still handles that message.
    eventually("the broker tells", Duration::from_secs(60), || async {
        destination.publish(support::row(0, "t")).await.err().filter(|fault| fault.code == "blocked")
    })
    .await;
    for outcome in [destination.publish(support::row(0, "t")).await, destination.probe().await] {
        let fault = outcome.expect_err("held");
        assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "blocked"), "{fault}");
    }
}
