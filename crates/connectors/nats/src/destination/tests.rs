//! What a row becomes on the wire, without a server.

use bytes::Bytes;
use queuebox_core::template::{Address, Template, Vocabulary};

use super::*;
use crate::config::{ConnectionConfig, Login, TlsConfig};

fn config(subject: &str) -> DestinationConfig {
    DestinationConfig {
        connection: ConnectionConfig {
            servers: "127.0.0.1:1".to_owned(),
            login: Login::None,
            tls: TlsConfig::default(),
            name: "test".to_owned(),
        },
        subject: Address::Template(Template::parse(subject, Vocabulary::Address).expect("template")),
        jetstream: true,
        timeout: Duration::from_secs(5),
        headers: vec![("X-Env".to_owned(), "prod".to_owned()), ("X-Topic".to_owned(), "spoofed".to_owned())],
    }
}

fn delivery() -> Delivery {
    Delivery {
        id: Uuid::from_u128(7),
        topic: "order.created".to_owned(),
        key: Some("k".to_owned()),
        aggregate_type: None,
        payload: Bytes::from_static(br#"{"a":1}"#),
        headers: vec![
            ("x-env".to_owned(), "row".to_owned()),
            ("nats-expected-stream".to_owned(), "other".to_owned()),
            ("Content-Length".to_owned(), "3".to_owned()),
        ],
        attempt: 0,
        routing_key: None,
        time_left: Duration::from_secs(30),
    }
}

#[test]
fn headers_are_those_of_the_contract_and_counted_as_written() {
    let message = prepare(&config("orders.{{ key }}"), &delivery(), Some("m")).expect("prepared");
    assert_eq!(message.subject, "orders.k");
    let mut given: Vec<_> =
        message.headers.iter().map(|(name, values)| (name.to_string(), values[0].to_string())).collect();
    given.sort();
    let expected = [
        ("Nats-Msg-Id", "m"),
        ("x-attempt", "0"),
        ("x-env", "row"),
        ("x-message-id", "00000000-0000-0000-0000-000000000007"),
        ("x-message-key", "k"),
        ("x-topic", "order.created"),
    ];
    let expected: Vec<_> = expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    assert_eq!(given, expected);
    let written: usize = "NATS/1.0\r\n\r\n".len() + given.iter().map(|(n, v)| n.len() + v.len() + 4).sum::<usize>();
    assert_eq!(message.header_bytes, written);
    assert!(message.check_size(written + 7).is_ok(), "headers and payload just fit");
    let error = message.check_size(written + 6).expect_err("one byte too many");
    assert!(error.to_string().contains(&format!("{} bytes", written + 7)), "{error}");
    assert_eq!(classify(&error).class, Class::Refused);
}

#[test]
fn what_nats_cannot_carry_is_refused_and_an_empty_subject_fails_the_attempt() {
    for topic in ["a b", "a..b", ".a", "a.", "a.*", ">", "a\nb"] {
        let row = Delivery { topic: topic.to_owned(), ..delivery() };
        let error = prepare(&config("{{ topic }}"), &row, None).err().expect(topic);
        assert_eq!(classify(&error).class, Class::Refused, "{topic}: {error}");
    }
    for header in [("n", "a\r\nX: y"), ("näme", "v"), ("a:b", "v")] {
        let row = Delivery { headers: vec![(header.0.to_owned(), header.1.to_owned())], ..delivery() };
        let error = prepare(&config("s"), &row, None).err().expect(header.0);
        assert_eq!(classify(&error).class, Class::Refused, "{error}");
    }
    let empty = prepare(&config("{{ aggregateType }}"), &delivery(), None).err().expect("empty");
    assert_eq!(classify(&empty).class, Class::Transient);
}

#[test]
fn only_attempts_after_an_unknown_outcome_repeat_its_message_id() {
    let inner = &NatsDestination::new(config("s")).inner;
    let at = |attempt| Delivery { attempt, ..delivery() };
    let id = |attempt| inner.message_id(&at(attempt)).text;
    let learn = |attempt, result| inner.learn(&at(attempt), inner.message_id(&at(attempt)), &result);
    let lost = || Err(Error::Lost { subject: String::new(), reason: String::new() });
    let full = || Err(Error::Nacked { subject: String::new(), reason: String::new() });
    let first = inner.message_id(&at(0));
    let text = first.text.clone();
    assert!(text.starts_with("00000000-0000-0000-0000-000000000007."));
    assert_ne!(id(0), text, "a replay begins with attempt 0 and is new");
    inner.learn(&at(0), first, &lost());
    assert_eq!(id(1), text, "the stream may hold it already");
    learn(1, Err(Error::NotSent(String::new())));
    assert_eq!(id(1), text, "not connected spends no attempt");
    learn(1, full());
    assert_eq!(id(2), text, "refused this time, and yet the first one may be there");
    assert_ne!(id(0), text, "replayed after an unknown outcome: to be delivered again");
    assert_ne!(id(4), text, "somebody else tried in between");
    learn(2, Ok(()));
    assert_ne!(id(3), text, "done");
    learn(0, full());
    assert_ne!(id(1), text);
}

#[test]
fn unknown_outcomes_are_remembered_within_bounds() {
    let mut unknown = Unknown::default();
    for n in 0..20_000 {
        unknown.remember(Uuid::from_u128(n), 0, String::new());
    }
    assert_eq!((unknown.ids.len(), unknown.order.len()), (UNKNOWN_MAX, UNKNOWN_MAX));
}

#[tokio::test]
async fn nobody_there_is_not_connected_and_knocks_only_as_often_as_the_back_off_says() {
    let destination = NatsDestination::new(config("s"));
    let fault = destination.publish(delivery()).await.expect_err("nobody there");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    assert!(fault.detail.contains("127.0.0.1:1"), "{fault}");
    let again = destination.publish(delivery()).await.expect_err("still in the pause");
    assert_eq!(again, fault);
}
