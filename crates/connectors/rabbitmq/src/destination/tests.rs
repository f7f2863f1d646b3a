//! What a row becomes on the wire, without a broker.

use bytes::Bytes;
use queuebox_core::{
    Uuid,
    template::{Template, Vocabulary},
};

use super::*;
use crate::config::{BrokerUrl, ConnectionConfig, TlsConfig};

fn destination(exchange: &str) -> RabbitDestination {
    RabbitDestination::new(DestinationConfig {
        connection: ConnectionConfig {
            url: BrokerUrl::Plain("amqp://127.0.0.1:1".to_owned()),
            username: None,
            password: None,
            tls: TlsConfig::default(),
            name: "test".to_owned(),
        },
        exchange: Address::Template(Template::parse(exchange, Vocabulary::Address).expect("template")),
        exchange_type: ExchangeType::Topic,
        declare_exchange: true,
        routing_key: Template::parse("{{ topic }}", Vocabulary::RoutingKey).expect("template"),
        delivery_mode: DeliveryMode::Persistent,
        timeout: Duration::from_secs(5),
        headers: vec![("X-Env".to_owned(), "prod".to_owned()), ("X-Topic".to_owned(), "spoofed".to_owned())],
    })
}

fn delivery() -> Delivery {
    Delivery {
        id: Uuid::from_u128(7),
        topic: "order.created".to_owned(),
        key: Some("k".to_owned()),
        aggregate_type: None,
        payload: Bytes::from_static(br#"{"a":{"b":12345678901234567890}}"#),
        headers: vec![
            ("x-env".to_owned(), "row".to_owned()),
            ("Content-Length".to_owned(), "3".to_owned()),
            ("Proxy-Authorization".to_owned(), "x".to_owned()),
            ("X-ATTEMPT".to_owned(), "99".to_owned()),
        ],
        attempt: 2,
        routing_key: None,
        time_left: Duration::from_secs(30),
    }
}

#[test]
fn properties_and_headers_are_those_of_the_contract() {
    let message = destination("ex").inner.prepare(&delivery()).expect("prepared");
    assert_eq!((message.exchange.as_str(), message.routing_key.as_str()), ("ex", "order.created"));
    let properties = &message.properties;
    assert_eq!(properties.message_id().as_ref().map(ShortString::as_str), Some("00000000-0000-0000-0000-000000000007"));
    assert_eq!(properties.content_type().as_ref().map(ShortString::as_str), Some("application/json"));
    assert_eq!(*properties.delivery_mode(), Some(2));
    let headers = properties.headers().as_ref().expect("headers");
    let given: Vec<_> = headers.inner().iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let text = |text: &str| AMQPValue::LongString(text.into());
    let expected =
        vec![("x-attempt", AMQPValue::LongInt(2)), ("x-env", text("row")), ("x-topic", text("order.created"))];
    assert_eq!(
        given, expected,
        "row before destination, standard before both, in any case; framing headers stay behind"
    );
}

#[test]
fn addresses_come_from_templates_and_empty_ones_fail_the_attempt() {
    let rendered = destination("{{ payload.a.b }}").inner.prepare(&delivery()).expect("prepared");
    assert_eq!(rendered.exchange.as_str(), "12345678901234567890");
    let route = Template::parse("route.{{ key }}", Vocabulary::RoutingKey).expect("template");
    let routed = Delivery { routing_key: Some(Arc::new(route)), ..delivery() };
    assert_eq!(destination("ex").inner.prepare(&routed).expect("prepared").routing_key.as_str(), "route.k");
    let empty = destination("{{ aggregateType }}").inner.prepare(&delivery()).err().expect("empty");
    assert_eq!(classify(&empty).class, Class::Transient);
}

#[test]
fn what_amqp_cannot_carry_is_refused() {
    for row in [
        Delivery { topic: "t".repeat(256), ..delivery() },
        Delivery { headers: vec![("n".repeat(256), String::new())], ..delivery() },
    ] {
        let error = destination("ex").inner.prepare(&row).err().expect("too long");
        assert_eq!(classify(&error).class, Class::Refused, "{error}");
        assert!(error.to_string().contains("256 bytes"), "{error}");
    }
    let large = Delivery { headers: vec![("h".to_owned(), "x".repeat(131_072))], ..delivery() };
    let message = destination("ex").inner.prepare(&large).expect("prepared");
    assert_eq!(classify(&message.check_headers(131_072).expect_err("no frame holds it")).class, Class::Refused);
}

#[tokio::test]
async fn nobody_there_is_not_connected_and_knocks_only_as_often_as_the_back_off_says() {
    let destination = destination("ex");
    let fault = destination.publish(delivery()).await.expect_err("nobody there");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    assert!(fault.detail.contains("127.0.0.1:1"), "{fault}");
    let again = destination.publish(delivery()).await.expect_err("still in the pause");
    assert_eq!(again, fault);
}
