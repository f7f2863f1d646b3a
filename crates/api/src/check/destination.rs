//! Rules of a Destination (contract 13.3).

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use queuebox_core::{
    retry::RetrySchedule,
    template::{Template, Vocabulary},
};

use super::{
    Case,
    broker::{self, KafkaFields, NatsFields, RabbitMqFields},
    http, relay,
};
use crate::{
    checked::{
        self, Breaker, DestinationConnector, HttpDestination, KafkaDestination, NatsDestination, RabbitMqDestination,
        Rate, StatusRule, Transform,
    },
    crd::CONNECTORS,
    spec::{
        DestinationSpec,
        common::AutoOrOff,
        destination::{
            DeliveryMode, HttpDestinationSpec, KafkaDestinationSpec, NatsDestinationSpec, RabbitMqDestinationSpec,
        },
    },
};

const THIRTY_SECONDS: Duration = Duration::from_secs(30);

/// A Destination after its own rules.
#[derive(Default)]
pub(super) struct Draft {
    spec: Option<DestinationSpec>,
    transform: Option<Transform>,
    connector: Option<DestinationConnector>,
}

pub(super) fn check(case: &Case<'_>) -> Draft {
    let Some(spec) = case.spec::<DestinationSpec>() else { return Draft::default() };
    let blocks = [spec.http.is_some(), spec.rabbitmq.is_some(), spec.kafka.is_some(), spec.nats.is_some()];
    let members: Vec<(&str, bool)> = CONNECTORS.into_iter().zip(blocks).collect();
    case.exactly_one("spec", &members);
    for (name, value) in spec.headers.iter().flatten() {
        let at = format!("spec.headers.{name}");
        if !http::is_token(name) {
            case.error(&at, format!("{name:?} is no header name"));
        }
        if !http::is_header_value(value) {
            case.error(&at, "holds control characters");
        }
    }
    if spec.limits.is_some_and(|limits| limits.burst.is_some() && limits.requests_per_second.is_none()) {
        case.error("spec.limits.burst", "needs requestsPerSecond");
    }
    let transform = case.transform("spec.transform", spec.transform.as_ref());
    let mut connector = None;
    if let Some(it) = &spec.http {
        connector = check_http(case, it).map(DestinationConnector::Http);
    }
    if let Some(it) = &spec.rabbitmq {
        connector = check_rabbitmq(case, it).map(DestinationConnector::RabbitMq);
    }
    if let Some(it) = &spec.kafka {
        connector = check_kafka(case, it).map(DestinationConnector::Kafka);
    }
    if let Some(it) = &spec.nats {
        connector = check_nats(case, it).map(DestinationConnector::Nats);
    }
    Draft { spec: Some(spec), transform, connector }
}

impl Draft {
    /// `backoff.initial` is at most `backoff.max`, with what the Relay says where the Destination says nothing.
    pub fn check_schedule(&self, case: &Case<'_>, relay: Option<&relay::Draft>) {
        let backoff = self.spec.as_ref().and_then(|spec| spec.backoff).unwrap_or_default();
        let of_relay = relay.map(relay::Draft::schedule);
        let initial = backoff.initial.map(|it| it.0).or(of_relay.map(|it| it.initial));
        let max = backoff.max.map(|it| it.0).or(of_relay.map(|it| it.max));
        if (backoff.initial.is_some() || backoff.max.is_some())
            && let (Some(initial), Some(max)) = (initial, max)
            && initial > max
        {
            let write = crate::value::format_duration;
            case.error("spec.backoff", format!("initial ({}) is above max ({})", write(initial), write(max)));
        }
    }

    /// The checked value, with what the Relay says where the Destination says nothing.
    pub fn finish(&self, case: &Case<'_>, relay: &relay::Draft) -> Option<checked::Destination> {
        let spec = self.spec.as_ref()?;
        let connector = self.connector.clone()?;
        let limits = spec.limits.unwrap_or_default();
        let backoff = spec.backoff.unwrap_or_default();
        let of_relay = relay.schedule();
        let breaker = spec.breaker.unwrap_or_default();
        let max_in_flight = match connector {
            DestinationConnector::Http(_) => 64,
            _ => relay.max_in_flight(),
        };
        Some(checked::Destination {
            name: case.object.name.clone(),
            paused: spec.paused.unwrap_or(false),
            headers: spec.headers.clone().unwrap_or_default().into_iter().collect(),
            transform: self.transform.clone(),
            max_in_flight: limits.max_in_flight.unwrap_or(max_in_flight),
            rate: limits
                .requests_per_second
                .map(|per_second| Rate { per_second, burst: limits.burst.unwrap_or(per_second) }),
            schedule: RetrySchedule {
                initial: backoff.initial.map_or(of_relay.initial, |it| it.0),
                max: backoff.max.map_or(of_relay.max, |it| it.0),
                retry_after_max: spec.retry_after_max.map_or(of_relay.retry_after_max, |it| it.0),
            },
            breaker: (breaker.mode.unwrap_or_default() == AutoOrOff::Auto).then(|| Breaker {
                failures: breaker.failures.unwrap_or(10),
                open_for: breaker.open_for.map_or(Duration::from_secs(10), |it| it.0),
            }),
            connector,
        })
    }
}

fn check_http(case: &Case<'_>, it: &HttpDestinationSpec) -> Option<HttpDestination> {
    let at = "spec.http";
    let url = http::url(case, &format!("{at}.url"), &it.url);
    let auth = http::outbound_auth(case, &format!("{at}.auth"), it.auth.as_ref());
    let signing = http::signing(case, &format!("{at}.signing"), it.signing.as_ref());
    let tls = case.tls(&format!("{at}.tls"), it.tls.as_ref());
    let permanent_statuses = statuses(case, it.permanent_statuses.as_deref().unwrap_or_default());
    Some(HttpDestination {
        url: url?,
        timeout: it.timeout.map_or(THIRTY_SECONDS, |timeout| timeout.0),
        auth,
        signing,
        tls,
        permanent_statuses,
    })
}

fn statuses(case: &Case<'_>, statuses: &[IntOrString]) -> Vec<StatusRule> {
    let rule = |status: &IntOrString| match status {
        IntOrString::Int(number) => {
            u16::try_from(*number).ok().filter(|it| (300..=599).contains(it)).map(StatusRule::Exactly)
        }
        IntOrString::String(word) if word == "4xx" => Some(StatusRule::ClientErrors),
        IntOrString::String(word) if word == "5xx" => Some(StatusRule::ServerErrors),
        IntOrString::String(_) => None,
    };
    let mut rules = Vec::new();
    for (index, status) in statuses.iter().enumerate() {
        match rule(status) {
            Some(rule) => rules.push(rule),
            None => case.error(
                &format!("spec.http.permanentStatuses[{index}]"),
                "write a number from 300 to 599, \"4xx\" or \"5xx\"",
            ),
        }
    }
    rules
}

fn check_rabbitmq(case: &Case<'_>, it: &RabbitMqDestinationSpec) -> Option<RabbitMqDestination> {
    let at = "spec.rabbitmq";
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
    let exchange = broker::address(case, at, "exchange", it.exchange.as_ref(), it.exchange_from);
    let routing_key =
        template_or(case, &format!("{at}.routingKey"), it.routing_key.as_ref(), "{{ topic }}", Vocabulary::RoutingKey);
    Some(RabbitMqDestination {
        login: login?,
        tls,
        exchange: exchange?,
        exchange_type: it.exchange_type.unwrap_or_default(),
        declare_exchange: it.declare_exchange.unwrap_or(true),
        routing_key: routing_key?,
        persistent: it.delivery_mode.unwrap_or_default() == DeliveryMode::Persistent,
        timeout: it.timeout.map_or(THIRTY_SECONDS, |timeout| timeout.0),
    })
}

fn template_or(
    case: &Case<'_>,
    at: &str,
    text: Option<&String>,
    default: &str,
    vocabulary: Vocabulary,
) -> Option<Template> {
    case.template(at, text.map_or(default, String::as_str), vocabulary)
}

fn check_kafka(case: &Case<'_>, it: &KafkaDestinationSpec) -> Option<KafkaDestination> {
    let at = "spec.kafka";
    let cluster = broker::kafka(
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
    );
    let topic = broker::address(case, at, "topic", it.topic.as_ref(), it.topic_from);
    let key =
        template_or(case, &format!("{at}.keyTemplate"), it.key_template.as_ref(), "{{ key }}", Vocabulary::RecordKey);
    let timeout = it.timeout.map_or(THIRTY_SECONDS, |timeout| timeout.0);
    if timeout < Duration::from_secs(2) {
        case.error(&format!("{at}.timeout"), "must be 2s or more");
    }
    Some(KafkaDestination { cluster, topic: topic?, key: key?, timeout })
}

fn check_nats(case: &Case<'_>, it: &NatsDestinationSpec) -> Option<NatsDestination> {
    let at = "spec.nats";
    let servers = broker::nats(
        case,
        at,
        &NatsFields {
            servers: &it.servers,
            username: it.username.as_ref(),
            password_from: it.password_from.as_ref(),
            token_from: it.token_from.as_ref(),
            tls: it.tls.as_ref(),
        },
    );
    let subject = broker::address(case, at, "subject", it.subject.as_ref(), it.subject_from);
    if it.jet_stream == Some(false) {
        case.warning(&format!("{at}.jetStream"), "without JetStream nothing is acknowledged, and messages may be lost");
    }
    Some(NatsDestination {
        servers,
        subject: subject?,
        jet_stream: it.jet_stream.unwrap_or(true),
        timeout: it.timeout.map_or(THIRTY_SECONDS, |timeout| timeout.0),
    })
}
