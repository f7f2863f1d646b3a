//! One record as it goes out: address, key and headers of a message (contract 7.3, 7.4).

use std::borrow::Cow;

use bytes::Bytes;
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

/// A rendered message.
pub(super) struct Record {
    pub topic: String,
    pub key: Option<String>,
    pub payload: Bytes,
    headers: Vec<(Cow<'static, str>, String)>,
}

impl Record {
    /// Renders `delivery` for this destination.
    pub(super) fn of(config: &DestinationConfig, delivery: &Delivery) -> Result<Self, KafkaFault> {
        let context = TemplateContext::from(delivery);
        let topic = config.topic.render(&context).ok_or(KafkaFault::EmptyTopic)?;
        if !is_topic(&topic) {
            return Err(KafkaFault::InvalidTopic { topic });
        }
        let key = match &delivery.routing_key {
            Some(route) => route.render(&context),
            None => config.key.render(&context),
        };
        Ok(Self {
            topic,
            key: Some(key).filter(|key| !key.is_empty()),
            payload: delivery.payload.clone(),
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
        self.headers.iter().fold(OwnedHeaders::new_with_capacity(self.headers.len()), |headers, (name, value)| {
            headers.insert(Header { key: name, value: Some(value.as_str()) })
        })
    }
}

/// Order and precedence of contract 7.4: the destination's, the row's, the standard ones; a later one replaces an earlier
/// one of the same name in any case.
fn headers_of(config: &DestinationConfig, delivery: &Delivery) -> Vec<(Cow<'static, str>, String)> {
    let mut headers: Vec<(Cow<'static, str>, String)> =
        Vec::with_capacity(config.headers.len() + delivery.headers.len() + 3);
    for (name, value) in &config.headers {
        set(&mut headers, Cow::Owned(name.clone()), value.clone());
    }
    for (name, value) in delivery.headers.iter().filter(|(name, _)| !is_one_hop(name)) {
        set(&mut headers, Cow::Owned(name.clone()), value.clone());
    }
    set(&mut headers, Cow::Borrowed("x-message-id"), delivery.id.to_string());
    set(&mut headers, Cow::Borrowed("x-topic"), delivery.topic.clone());
    set(&mut headers, Cow::Borrowed("x-attempt"), delivery.attempt.to_string());
    headers
}

fn set(headers: &mut Vec<(Cow<'static, str>, String)>, name: Cow<'static, str>, value: String) {
    headers.retain(|(given, _)| !given.eq_ignore_ascii_case(&name));
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
        let record = Record::of(&config("orders"), &delivery()).unwrap();
        let headers: Vec<(&str, &str)> = record.headers.iter().map(|(name, value)| (&**name, value.as_str())).collect();
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

    #[test]
    fn addresses_and_keys_from_templates() {
        let mut message = delivery();
        assert_eq!(Record::of(&config("t-{{ payload.region }}"), &message).unwrap().topic, "t-eu");
        assert_eq!(Record::of(&config("orders"), &message).unwrap().key.as_deref(), Some("k1"));
        message.routing_key = Some(Arc::new(Template::parse("{{ payload.region }}", Vocabulary::RoutingKey).unwrap()));
        assert_eq!(Record::of(&config("orders"), &message).unwrap().key.as_deref(), Some("eu"));
        message.routing_key = Some(Arc::new(Template::parse("{{ payload.none }}", Vocabulary::RoutingKey).unwrap()));
        assert_eq!(Record::of(&config("orders"), &message).unwrap().key, None);
    }

    #[test]
    fn an_address_that_is_empty_or_no_topic_fails_the_attempt() {
        let message = delivery();
        assert_eq!(Record::of(&config("{{ payload.none }}"), &message).err(), Some(KafkaFault::EmptyTopic));
        for bad in ["a b", "a/b", "..", &"x".repeat(250)] {
            assert!(matches!(Record::of(&config(bad), &message), Err(KafkaFault::InvalidTopic { .. })), "{bad}");
        }
    }
}
