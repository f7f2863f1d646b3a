//! Rules of a Source (contract 13.2).

use std::time::Duration;

use queuebox_core::{
    message::Consumption,
    pattern::Pattern,
    template::{Placeholder, Template, Vocabulary},
};

use super::{
    Case,
    broker::{self, KafkaFields, NatsFields, RabbitMqFields},
    http,
};
use crate::{
    checked::{
        self, Filter, FilterRule, FilterTest, HttpSource, KafkaSource, NatsSource, Origins, RabbitMqSource,
        SourceConnector,
    },
    crd::CONNECTORS,
    spec::{
        SourceSpec,
        common::IdempotencyKeyFallback,
        source::{
            AttributeHeadersSpec, ConsumptionName, FilterRuleSpec, FilterSpec, HttpSourceSpec, KafkaSourceSpec,
            NatsSourceSpec, RabbitMqSourceSpec,
        },
    },
};

/// Headers that are never stored, and so no origin of anything.
const SECRET_HEADERS: [&str; 3] = ["Authorization", "Proxy-Authorization", "Cookie"];

/// A Source after its own rules.
#[derive(Default)]
pub(super) struct Draft {
    /// Name of its Relay; empty where it is missing.
    pub relay: String,
    /// Path of an http source.
    pub http_path: Option<String>,
    /// Whole only if the case has no problem.
    pub checked: Option<checked::Source>,
}

pub(super) fn check(case: &Case<'_>) -> Draft {
    let Some(spec) = case.spec::<SourceSpec>() else { return Draft::default() };
    let blocks = [spec.http.is_some(), spec.rabbitmq.is_some(), spec.kafka.is_some(), spec.nats.is_some()];
    let members: Vec<(&str, bool)> = CONNECTORS.into_iter().zip(blocks).collect();
    case.exactly_one("spec", &members);

    let consumption = match spec.consumption.unwrap_or_default() {
        ConsumptionName::Push => Consumption::Push,
        ConsumptionName::Pull => Consumption::Pull,
    };
    let mut origins = Attributes {
        idempotency_key: Origins {
            header: None,
            expression: spec.idempotency_key_expression.clone(),
            paths: case.paths("spec.idempotencyKeyPath", spec.idempotency_key_path.as_ref()),
        },
        aggregate_id: Origins {
            header: None,
            expression: spec.aggregate_id_expression.clone(),
            paths: case.paths("spec.aggregateIdPath", spec.aggregate_id_path.as_ref()),
        },
        event_type: Origins {
            header: None,
            expression: spec.event_type_expression.clone(),
            paths: case.paths("spec.eventTypePath", spec.event_type_path.as_ref()),
        },
    };
    for (path, expression) in [
        ("spec.idempotencyKeyExpression", &spec.idempotency_key_expression),
        ("spec.aggregateIdExpression", &spec.aggregate_id_expression),
        ("spec.eventTypeExpression", &spec.event_type_expression),
    ] {
        if let Some(expression) = expression {
            case.expression(path, expression);
        }
    }
    let mut has_event_type = origins.event_type.expression.is_some() || spec.event_type_path.is_some();
    let mut connector = None;
    if let Some(it) = &spec.http {
        has_event_type |= it.event_type_header.is_some();
        connector = check_http(case, it, &spec, &mut origins).map(SourceConnector::Http);
    }
    if let Some(it) = &spec.rabbitmq {
        has_event_type |= it.event_type_from_header == Some(true);
        origins.of_broker(case, "spec.rabbitmq", it.attribute_headers.as_ref(), &spec);
        connector = check_rabbitmq(case, it).map(SourceConnector::RabbitMq);
    }
    if let Some(it) = &spec.kafka {
        has_event_type |= it.event_type_from_header == Some(true);
        origins.of_broker(case, "spec.kafka", it.attribute_headers.as_ref(), &spec);
        connector = Some(SourceConnector::Kafka(check_kafka(case, it)));
    }
    if let Some(it) = &spec.nats {
        has_event_type |= it.event_type_from_header == Some(true);
        origins.of_broker(case, "spec.nats", it.attribute_headers.as_ref(), &spec);
        connector = Some(SourceConnector::Nats(check_nats(case, it)));
    }
    let topic = topic(case, &spec, consumption, has_event_type);
    let initial_delay = spec.initial_delay.map_or(Duration::ZERO, |delay| delay.0);
    check_publish_time(case, &spec, initial_delay);
    let scheduled_at_paths = case.paths("spec.scheduledAtPath", spec.scheduled_at_path.as_ref());
    let transform = case.transform("spec.transform", spec.transform.as_ref());
    let filter = filter(case, spec.filter.as_ref());
    Draft {
        relay: spec.relay_ref.name.clone(),
        http_path: spec.http.as_ref().map(|it| it.path.clone()).filter(|path| !path.is_empty()),
        checked: connector.map(|connector| checked::Source {
            name: case.object.name.clone(),
            paused: spec.paused.unwrap_or(false),
            consumption,
            topic,
            idempotency_key: origins.idempotency_key,
            aggregate_id: origins.aggregate_id,
            event_type: origins.event_type,
            initial_delay,
            scheduled_at_header: spec.scheduled_at_header.clone(),
            scheduled_at_paths,
            transform,
            filter,
            connector,
        }),
    }
}

struct Attributes {
    idempotency_key: Origins,
    aggregate_id: Origins,
    event_type: Origins,
}

impl Attributes {
    /// Headers under their own or new names, and `$.id` where nothing is said about the path of the key.
    fn of_broker(&mut self, case: &Case<'_>, at: &str, headers: Option<&AttributeHeadersSpec>, spec: &SourceSpec) {
        let default = AttributeHeadersSpec::default();
        let headers = headers.unwrap_or(&default);
        let named = |field: &str, given: Option<&String>, default: &str| {
            let name = given.cloned().unwrap_or_else(|| default.to_owned());
            case.header_name(&format!("{at}.attributeHeaders.{field}"), &name);
            Some(name)
        };
        self.idempotency_key.header = named("idempotencyKey", headers.idempotency_key.as_ref(), "x-idempotency-key");
        self.aggregate_id.header = named("aggregateId", headers.aggregate_id.as_ref(), "x-aggregate-id");
        self.event_type.header = named("eventType", headers.event_type.as_ref(), "x-event-type");
        if spec.idempotency_key_path.is_none() {
            self.idempotency_key.paths = vec!["$.id".to_owned()];
        }
    }
}

fn topic(case: &Case<'_>, spec: &SourceSpec, consumption: Consumption, has_event_type: bool) -> Option<Template> {
    if consumption == Consumption::Pull {
        if spec.topic.is_some() {
            case.error_with_hint(
                "spec.topic",
                "a pull Source has no topic",
                "leave it out, or write consumption: push",
            );
        }
        return None;
    }
    let default = if spec.http.is_some() { "{{ eventType }}" } else { "{{ source }}" };
    let template = case.template("spec.topic", spec.topic.as_deref().unwrap_or(default), Vocabulary::SourceTopic)?;
    if template.placeholders().any(|placeholder| *placeholder == Placeholder::EventType) && !has_event_type {
        let origin = if spec.http.is_some() { "http.eventTypeHeader" } else { "eventTypeFromHeader: true" };
        case.error_with_hint(
            "spec.topic",
            if spec.topic.is_some() {
                "uses the event type, which has no origin"
            } else {
                "is {{ eventType }} where nothing is said, and the event type has no origin"
            },
            &format!("give eventTypePath, eventTypeExpression or {origin}, or write a topic without eventType"),
        );
    }
    Some(template)
}

fn check_publish_time(case: &Case<'_>, spec: &SourceSpec, initial_delay: Duration) {
    let given = [
        ("spec.scheduledAtHeader", spec.scheduled_at_header.is_some()),
        ("spec.scheduledAtPath", spec.scheduled_at_path.is_some()),
    ];
    for (path, _) in given.iter().filter(|(_, given)| *given && initial_delay.is_zero()) {
        case.error_with_hint(
            path,
            "needs initialDelay above zero",
            "messages are put in order of publishing within that delay",
        );
    }
    if let Some(name) = &spec.scheduled_at_header {
        case.header_name("spec.scheduledAtHeader", name);
    }
}

fn check_http(case: &Case<'_>, it: &HttpSourceSpec, spec: &SourceSpec, origins: &mut Attributes) -> Option<HttpSource> {
    http::check_route_path(case, "spec.http.path", &it.path);
    let auth = http::inbound_auth(case, "spec.http.auth", it.auth.as_ref());
    let secret: Vec<&str> = SECRET_HEADERS
        .into_iter()
        .chain(auth.as_ref().map(checked::InboundAuth::headers).unwrap_or_default())
        .collect();
    let named = |field: &str, name: Option<&String>| {
        let name = name?;
        let at = format!("spec.http.{field}");
        case.header_name(&at, name);
        if secret.iter().any(|header| header.eq_ignore_ascii_case(name)) {
            case.error(&at, format!("{name} is a secret header, which is neither stored nor read for this"));
        }
        Some(name.clone())
    };
    origins.idempotency_key.header = named("idempotencyKeyHeader", it.idempotency_key_header.as_ref());
    origins.event_type.header = named("eventTypeHeader", it.event_type_header.as_ref());
    origins.aggregate_id.header = named("aggregateIdHeader", it.aggregate_id_header.as_ref());
    let has_key = it.idempotency_key_header.is_some()
        || spec.idempotency_key_path.is_some()
        || spec.idempotency_key_expression.is_some();
    if !has_key {
        case.error_with_hint(
            "spec",
            "the idempotency key has no origin",
            match auth {
                Some(checked::InboundAuth::StandardWebhooks { .. }) => {
                    "give http.idempotencyKeyHeader: webhook-id, the id of the event in Standard Webhooks"
                }
                _ => "give idempotencyKeyPath (such as $.id), idempotencyKeyExpression or http.idempotencyKeyHeader",
            },
        );
    }
    if let Some(name) =
        spec.scheduled_at_header.as_ref().filter(|name| secret.iter().any(|it| it.eq_ignore_ascii_case(name)))
    {
        case.error("spec.scheduledAtHeader", format!("{name} is a secret header"));
    }
    Some(HttpSource {
        path: it.path.clone(),
        auth,
        requests_per_minute: it.rate_limit.map(|limit| limit.requests_per_minute),
    })
}

fn check_rabbitmq(case: &Case<'_>, it: &RabbitMqSourceSpec) -> Option<RabbitMqSource> {
    let at = "spec.rabbitmq";
    if it.idempotency_key_fallback == Some(IdempotencyKeyFallback::Position) {
        case.error(&format!("{at}.idempotencyKeyFallback"), "RabbitMQ messages have no position; write digest");
    }
    let login = broker::rabbitmq(
        case,
        at,
        &RabbitMqFields {
            url: it.url.as_ref(),
            url_from: it.url_from.as_ref(),
            username: it.username.as_ref(),
            password_from: it.password_from.as_ref(),
        },
    );
    let tls = case.tls(&format!("{at}.tls"), it.tls.as_ref());
    Some(RabbitMqSource {
        login: login?,
        tls,
        queue_name: it.queue_name.clone(),
        prefetch_count: it.prefetch_count.and_then(|count| u16::try_from(count).ok()).unwrap_or(10),
        declare_queue: it.declare_queue.unwrap_or(false),
    })
}

fn check_kafka(case: &Case<'_>, it: &KafkaSourceSpec) -> KafkaSource {
    let at = "spec.kafka";
    for (index, topic) in it.topics.iter().enumerate() {
        let is_name = topic.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if !topic.is_empty() && !is_name {
            case.error(
                &format!("{at}.topics[{index}]"),
                format!("{topic:?} is no Kafka topic: write letters, digits, \".\", \"_\" and \"-\""),
            );
        }
        if !topic.is_empty() && it.topics[..index].contains(topic) {
            case.error(&format!("{at}.topics[{index}]"), format!("{topic:?} stands twice"));
        }
    }
    KafkaSource {
        cluster: broker::kafka(
            case,
            at,
            &KafkaFields {
                servers: &it.bootstrap_servers,
                protocol: it.security_protocol,
                mechanism: it.sasl_mechanism.as_ref(),
                username: it.sasl_username.as_ref(),
                password_from: it.sasl_password_from.as_ref(),
                tls: it.tls.as_ref(),
            },
        ),
        group_id: it.group_id.clone(),
        topics: it.topics.clone(),
        auto_offset_reset: it.auto_offset_reset.unwrap_or_default(),
        max_poll_records: it.max_poll_records.unwrap_or(100),
        idempotency_from_record_key: it.idempotency_from_record_key.unwrap_or(false),
        idempotency_key_fallback: it.idempotency_key_fallback.unwrap_or_default(),
    }
}

fn check_nats(case: &Case<'_>, it: &NatsSourceSpec) -> NatsSource {
    let at = "spec.nats";
    for (field, name) in [("stream", &it.stream), ("durable", &it.durable)] {
        if name.chars().any(|character| character.is_whitespace() || matches!(character, '.' | '*' | '>' | '/' | '\\'))
        {
            case.error(
                &format!("{at}.{field}"),
                format!("{name:?} must not hold blanks, \".\", \"*\", \">\" or slashes"),
            );
        }
    }
    NatsSource {
        servers: broker::nats(
            case,
            at,
            &NatsFields {
                servers: &it.servers,
                username: it.username.as_ref(),
                password_from: it.password_from.as_ref(),
                token_from: it.token_from.as_ref(),
                tls: it.tls.as_ref(),
            },
        ),
        stream: it.stream.clone(),
        durable: it.durable.clone(),
        filter_subject: it.filter_subject.clone(),
        ack_wait: it.ack_wait.map_or(Duration::from_secs(30), |wait| wait.0),
        batch_size: it.batch_size.unwrap_or(100),
        idempotency_key_fallback: it.idempotency_key_fallback.unwrap_or_default(),
    }
}

fn filter(case: &Case<'_>, filter: Option<&FilterSpec>) -> Filter {
    let Some(filter) = filter else { return Filter::default() };
    let rules = |field: &str, rules: Option<&Vec<FilterRuleSpec>>| {
        let rules = rules.into_iter().flatten().enumerate();
        rules.filter_map(|(index, rule)| filter_rule(case, &format!("spec.filter.{field}[{index}]"), rule)).collect()
    };
    Filter { require: rules("require", filter.require.as_ref()), exclude: rules("exclude", filter.exclude.as_ref()) }
}

fn filter_rule(case: &Case<'_>, at: &str, rule: &FilterRuleSpec) -> Option<FilterRule> {
    case.header_name(&format!("{at}.header"), &rule.header);
    case.exactly_one(
        at,
        &[
            ("equals", rule.equals.is_some()),
            ("in", rule.one_of.is_some()),
            ("matches", rule.matches.is_some()),
            ("exists", rule.exists.is_some()),
        ],
    );
    let test = if let Some(value) = &rule.equals {
        FilterTest::OneOf(vec![value.clone()])
    } else if let Some(values) = &rule.one_of {
        FilterTest::OneOf(values.clone())
    } else if let Some(pattern) = &rule.matches {
        match Pattern::parse(pattern) {
            Ok(pattern) => FilterTest::Matches(pattern),
            Err(error) => {
                case.error(&format!("{at}.matches"), error.to_string());
                return None;
            }
        }
    } else {
        rule.exists?;
        FilterTest::Exists
    };
    Some(FilterRule { header: rule.header.clone(), test })
}
