//! The order of origins (contract 6.2).

use queuebox_core::ports::{Admission, Received};
use queuebox_engine::{
    expression::Expression,
    intake::{KeyFallback, SourceConfig, SourceKind},
};

use crate::intake::{message, source, with_headers, world};

const BODY: &str = r#"{"id":"path","key":"path","type":"path","x":"expression"}"#;
const EMPTY: &str = "{}";
const EMPTY_DIGEST: &str = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

fn with_expressions(mut config: SourceConfig) -> SourceConfig {
    for origins in [&mut config.idempotency_key, &mut config.aggregate_id, &mut config.event_type] {
        origins.expression = Some(Expression::compile("x").unwrap());
    }
    config
}

/// A message with headers, a broker's id and a record key.
fn full(body: &str) -> Received {
    Received {
        message_id: Some("broker".into()),
        record_key: Some("record".into()),
        position: Some("t/0/5".into()),
        ..with_headers(
            body,
            &[("X-Idempotency-Key", "header"), ("x-aggregate-id", "header"), ("X-EVENT-TYPE", "header")],
        )
    }
}

/// The same without the headers.
fn bare(body: &str) -> Received {
    Received { headers: Vec::new(), ..full(body) }
}

/// Key, aggregate and event type of one message.
async fn read(config: SourceConfig, received: Received) -> (String, Option<String>, Option<String>) {
    let world = world(config);
    let answer = world.admit(received).await;
    assert!(matches!(answer, Admission::Stored(_)), "{answer:?}");
    let row = world.inbox.only_row().row;
    (row.idempotency_key, row.aggregate_id, row.event_type)
}

fn expect(key: &str, aggregate: Option<&str>, event_type: Option<&str>) -> (String, Option<String>, Option<String>) {
    (key.to_owned(), aggregate.map(str::to_owned), event_type.map(str::to_owned))
}

#[tokio::test(start_paused = true)]
async fn key_origin_order() {
    use SourceKind::{Http, Kafka, Nats, RabbitMq};
    let (header, path, expression) = (Some("header"), Some("path"), Some("expression"));

    assert_eq!(read(with_expressions(source(Http)), full(BODY)).await, expect("header", header, header));
    assert_eq!(read(with_expressions(source(Http)), bare(BODY)).await, expect("expression", expression, expression));
    assert_eq!(read(source(Http), bare(BODY)).await, expect("path", path, path));

    for kind in [RabbitMq, Kafka, Nats] {
        assert_eq!(
            read(with_expressions(source(kind)), full(BODY)).await,
            expect("header", expression, expression),
            "{kind:?}"
        );
        assert_eq!(read(source(kind), full(BODY)).await, expect("header", path, path), "{kind:?}");
        assert_eq!(read(source(kind), full(EMPTY)).await, expect("header", header, header), "{kind:?}");
        assert_eq!(
            read(with_expressions(source(kind)), bare(BODY)).await,
            expect("expression", expression, expression),
            "{kind:?}"
        );
        assert_eq!(read(source(kind), bare(BODY)).await, expect("path", path, path), "{kind:?}");
        let record = (kind == Kafka).then_some("record");
        assert_eq!(read(source(kind), bare(EMPTY)).await, expect("broker", record, None), "{kind:?}");
        assert_eq!(read(source(kind), message(EMPTY)).await, expect(EMPTY_DIGEST, None, None), "{kind:?}");
    }

    let kafka = |record_key: bool, fallback| SourceConfig {
        idempotency_from_record_key: record_key,
        key_fallback: fallback,
        ..source(Kafka)
    };
    let record = || Received { message_id: None, ..bare(EMPTY) };
    assert_eq!(read(kafka(false, KeyFallback::Digest), record()).await.0, EMPTY_DIGEST);
    assert_eq!(read(kafka(false, KeyFallback::Position), record()).await.0, "t/0/5");
    assert_eq!(read(kafka(true, KeyFallback::Position), record()).await.0, "record");
}

#[tokio::test(start_paused = true)]
async fn attribute_headers_are_renamed() {
    let mut config = source(SourceKind::Nats);
    config.idempotency_key.header = Some("my-key".into());
    config.aggregate_id.header = Some("my-aggregate".into());
    let received = with_headers(EMPTY, &[("X-Idempotency-Key", "old"), ("My-Key", "new"), ("my-aggregate", "a")]);
    assert_eq!(read(config, received).await, expect("new", Some("a"), None));
}

#[tokio::test(start_paused = true)]
async fn of_several_paths_the_first_with_a_value_counts() {
    let mut config = source(SourceKind::Http);
    for path in ["$.second", "$.third"] {
        config.idempotency_key.paths.push(queuebox_engine::json::Path::parse(path).unwrap());
    }
    assert_eq!(read(config, message(r#"{"third":3,"id":null,"second":2}"#)).await.0, "2");
}

/// case D25
#[tokio::test(start_paused = true)]
async fn payload_keeps_its_digits() {
    let world = world(source(SourceKind::Http));
    let body = r#"{"id":12345678901234567890,"key":-9223372036854775808,"dec":0.12345678901234567890123,"money":1.10}"#;
    world.admit(message(body)).await;
    let row = world.inbox.only_row().row;
    assert_eq!(row.idempotency_key, "12345678901234567890");
    assert_eq!(row.aggregate_id.as_deref(), Some("-9223372036854775808"));
    assert_eq!(row.payload, body);
}
