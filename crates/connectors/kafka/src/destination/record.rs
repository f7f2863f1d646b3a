//! One record as it goes out: address, key and headers of a message (contract 7.3, 7.4).

use std::borrow::Cow;

use queuebox_core::{ports::Delivery, template::TemplateContext};
use rdkafka::message::{Header, OwnedHeaders};

use crate::{config::DestinationConfig, fault::KafkaFault};

/// Bytes that a record and its batch need besides key, body and headers, at most (record batch header and varints).
const OVERHEAD_BYTES: u64 = 61 + 21;

/// Headers that belong to one hop of HTTP and are never sent on from a row (contract 7.4).
const ONE_HOP: [&str; 10] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "content-encoding",
];

/// A rendered message. It borrows what it can: this is done for every message.
pub(super) struct Record<'a> {
    pub topic: Cow<'a, str>,
    pub key: Option<String>,
    pub payload: &'a [u8],
    headers: Vec<(&'a str, Cow<'a, str>)>,
}

impl<'a> Record<'a> {
    /// Renders `delivery` for this destination; `declared` is the topic, where it is always the same.
    pub(super) fn of(
        config: &'a DestinationConfig,
        declared: Option<&'a str>,
        delivery: &'a Delivery,
    ) -> Result<Self, KafkaFault> {
        let context = TemplateContext::from(delivery);
        let topic = match declared {
            Some(declared) => Cow::Borrowed(declared),
            None => Cow::Owned(config.topic.render(&context).ok_or(KafkaFault::EmptyTopic)?),
        };
        if !is_topic(&topic) {
            return Err(KafkaFault::InvalidTopic { topic: topic.into_owned() });
        }
        let key = match &delivery.routing_key {
            Some(route) => route.render(&context),
            None => config.key.render(&context),
        };
        Ok(Self {
            topic,
            key: Some(key).filter(|key| !key.is_empty()),
            payload: &delivery.payload,
            headers: headers_of(config, delivery),
        })
    }

    /// Key, body, headers and what a batch of one adds, in bytes.
    pub(super) fn size(&self) -> u64 {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len() + 10).sum();
        let bytes = self.payload.len() + self.key.as_ref().map_or(0, String::len) + headers;
        u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(OVERHEAD_BYTES)
    }

    /// The headers in the library's form; made for each send because the library takes them.
    pub(super) fn wire_headers(&self) -> OwnedHeaders {
        let empty = OwnedHeaders::new_with_capacity(self.headers.len());
        self.headers
            .iter()
            .fold(empty, |headers, (name, value)| headers.insert(Header { key: name, value: Some(value.as_bytes()) }))
    }
}

/// Order and precedence of contract 7.4: the destination's, the row's, the standard ones; a later one replaces an earlier
/// one of the same name in any case.
fn headers_of<'a>(config: &'a DestinationConfig, delivery: &'a Delivery) -> Vec<(&'a str, Cow<'a, str>)> {
    let attempt = if delivery.attempt == 0 { "0".into() } else { delivery.attempt.to_string().into() };
    let standard: [(&'a str, Cow<'a, str>); 3] = [
        ("x-message-id", delivery.id.to_string().into()),
        ("x-topic", delivery.topic.as_str().into()),
        ("x-attempt", attempt),
    ];
    let given = delivery.headers.iter().filter(|(name, _)| !is_one_hop(name));
    let mut headers = Vec::with_capacity(config.headers.len() + delivery.headers.len() + standard.len());
    for (name, value) in config.headers.iter().chain(given) {
        set(&mut headers, name, value.as_str().into());
    }
    for (name, value) in standard {
        set(&mut headers, name, value);
    }
    headers
}

fn set<'a>(headers: &mut Vec<(&'a str, Cow<'a, str>)>, name: &'a str, value: Cow<'a, str>) {
    headers.retain(|(given, _)| !given.eq_ignore_ascii_case(name));
    headers.push((name, value));
}

fn is_one_hop(name: &str) -> bool {
    let proxy = name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("proxy-"));
    proxy
        || name.eq_ignore_ascii_case("accept-encoding")
        || ONE_HOP.iter().any(|known| name.eq_ignore_ascii_case(known))
}

/// Kafka's own rule for topic names.
fn is_topic(name: &str) -> bool {
    (1..=249).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use bytes::Bytes;
    use queuebox_core::{
        Uuid,
        template::{Address, Template, Vocabulary},
    };

    use super::*;
    use crate::config::Cluster;

    fn config(topic: &str) -> DestinationConfig {
        DestinationConfig {
            cluster: Cluster::default(),
            topic: Address::Template(Template::parse(topic, Vocabulary::Address).unwrap()),
            key: Template::parse("{{ key }}", Vocabulary::RecordKey).unwrap(),
            headers: vec![("X-Team".into(), "a".into()), ("x-kept".into(), "d".into())],
            timeout: Duration::from_secs(30),
        }
    }

    fn delivery() -> Delivery {
        Delivery {
            id: Uuid::nil(),
            topic: "order.created".into(),
            key: Some("k1".into()),
            aggregate_type: None,
            payload: Bytes::from_static(br#"{"region":"eu"}"#),
            headers: vec![
                ("x-team".into(), "row".into()),
                ("X-Topic".into(), "forged".into()),
                ("Host".into(), "h".into()),
                ("Proxy-Thing".into(), "p".into()),
                ("traceparent".into(), "00-1-2-01".into()),
            ],
            attempt: 2,
            routing_key: None,
            time_left: Duration::from_secs(30),
        }
    }

    #[test]
    fn header_precedence() {
        let (config, message) = (config("orders"), delivery());
        let record = Record::of(&config, None, &message).unwrap();
        let headers: Vec<(&str, &str)> = record.headers.iter().map(|(name, value)| (*name, &**value)).collect();
        assert_eq!(
            headers,
            [
                ("x-kept", "d"),
                ("x-team", "row"),
                ("traceparent", "00-1-2-01"),
                ("x-message-id", "00000000-0000-0000-0000-000000000000"),
                ("x-topic", "order.created"),
                ("x-attempt", "2"),
            ]
        );
    }

    fn topic_of(template: &str, message: &Delivery) -> Result<String, KafkaFault> {
        Record::of(&config(template), None, message).map(|record| record.topic.into_owned())
    }

    fn key_of(message: &Delivery) -> Option<String> {
        Record::of(&config("orders"), None, message).unwrap().key
    }

    #[test]
    fn addresses_and_keys_from_templates() {
        let mut message = delivery();
        assert_eq!(topic_of("t-{{ payload.region }}", &message).as_deref(), Ok("t-eu"));
        assert_eq!(key_of(&message).as_deref(), Some("k1"));
        message.routing_key = Some(Arc::new(Template::parse("{{ payload.region }}", Vocabulary::RoutingKey).unwrap()));
        assert_eq!(key_of(&message).as_deref(), Some("eu"));
        message.routing_key = Some(Arc::new(Template::parse("{{ payload.none }}", Vocabulary::RoutingKey).unwrap()));
        assert_eq!(key_of(&message), None);
    }

    #[test]
    fn an_address_that_is_empty_or_no_topic_fails_the_attempt() {
        let message = delivery();
        assert_eq!(topic_of("{{ payload.none }}", &message), Err(KafkaFault::EmptyTopic));
        for bad in ["a b", "a/b", "..", &"x".repeat(250)] {
            assert!(matches!(topic_of(bad, &message), Err(KafkaFault::InvalidTopic { .. })), "{bad}");
        }
    }
}
