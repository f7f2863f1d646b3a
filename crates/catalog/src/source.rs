//! Builds sources: the intake's half (attributes, filter, transform) and the connector's half.

use std::{sync::Arc, time::Duration};

use queuebox_api::{SecretResolver, checked};
use queuebox_core::{
    ports::Source,
    template::{Template, Vocabulary},
};
use queuebox_engine::{
    expression::{Bounds, Expression},
    filter::{Filter, Rule, Test},
    intake::{KeyFallback, Origins, PublishTime, SourceConfig, SourceKind, StoreLimits},
    json::Path,
};
use queuebox_http::{
    HttpSource,
    auth::{Accepted, Auth, HmacAuth},
    port::{ByteBudget, DataPortConfig},
};

use crate::{
    CatalogError,
    destination::{algorithm, header_name, kafka_cluster, nats_connection, payload_format, rabbitmq_connection},
    optional_transform,
    secret::{optional, secret},
};

const KIND: &str = "Source";

/// An HTTP source: its route, and its intake.
pub struct HttpSourceParts {
    /// For the data port.
    pub route: HttpSource,
    /// For the worker.
    pub intake: SourceConfig,
}

/// A broker source: its poller, and its intake.
pub struct BrokerSource {
    /// Receives.
    pub source: Arc<dyn Source>,
    /// For the worker.
    pub intake: SourceConfig,
    /// Stands still.
    pub paused: bool,
}

/// All sources of a Relay.
pub struct Sources {
    /// Routes of the data port.
    pub http: Vec<HttpSourceParts>,
    /// Pollers.
    pub brokers: Vec<BrokerSource>,
    /// The data port.
    pub port: DataPortConfig,
}

pub(crate) fn build(relay: &checked::Relay, secrets: &Arc<dyn SecretResolver>) -> Result<Sources, CatalogError> {
    let port = DataPortConfig {
        base_path: relay.inbox.base_path.clone(),
        body_bytes_max: usize::try_from(relay.inbox.max_body_bytes).unwrap_or(usize::MAX),
        body_timeout: relay.inbox.body_timeout,
        budget: ByteBudget::new(usize::try_from(relay.inbox.max_bytes_in_flight).unwrap_or(usize::MAX)),
        ..DataPortConfig::default()
    };
    let mut sources = Sources { http: Vec::new(), brokers: Vec::new(), port };
    for source in &relay.sources {
        let name = format!("queuebox {}/{}", relay.name, source.name);
        let poller: Arc<dyn Source> = match &source.connector {
            checked::SourceConnector::Http(http) => {
                sources.http.push(HttpSourceParts {
                    route: route(source, http, secrets)?,
                    intake: intake(source, relay, SourceKind::Http)?,
                });
                continue;
            }
            checked::SourceConnector::RabbitMq(rabbitmq) => {
                Arc::new(queuebox_rabbitmq::RabbitSource::new(queuebox_rabbitmq::config::SourceConfig {
                    connection: rabbitmq_connection(&rabbitmq.login, &rabbitmq.tls, name, secrets),
                    queue: rabbitmq.queue_name.clone(),
                    prefetch: rabbitmq.prefetch_count,
                    declare_queue: rabbitmq.declare_queue,
                }))
            }
            checked::SourceConnector::Kafka(kafka) => {
                Arc::new(queuebox_kafka::KafkaSource::new(queuebox_kafka::config::SourceConfig {
                    cluster: kafka_cluster(&kafka.cluster, secrets),
                    group_id: kafka.group_id.clone(),
                    topics: kafka.topics.clone(),
                    auto_offset_reset: match kafka.auto_offset_reset {
                        checked::OffsetReset::Earliest => queuebox_kafka::config::OffsetReset::Earliest,
                        checked::OffsetReset::Latest => queuebox_kafka::config::OffsetReset::Latest,
                    },
                    max_poll_records: kafka.max_poll_records,
                }))
            }
            checked::SourceConnector::Nats(nats) => {
                Arc::new(queuebox_nats::NatsSource::new(queuebox_nats::config::SourceConfig {
                    connection: nats_connection(&nats.servers, name, secrets),
                    stream: nats.stream.clone(),
                    durable: nats.durable.clone(),
                    filter_subject: nats.filter_subject.clone(),
                    ack_wait: nats.ack_wait,
                    batch_size: nats.batch_size as usize,
                }))
            }
        };
        let kind = match poller.kind() {
            "rabbitmq" => SourceKind::RabbitMq,
            "kafka" => SourceKind::Kafka,
            _ => SourceKind::Nats,
        };
        let intake = intake(source, relay, kind)?;
        sources.brokers.push(BrokerSource { source: poller, intake, paused: source.paused });
    }
    Ok(sources)
}

fn route(
    source: &checked::Source,
    http: &checked::HttpSource,
    secrets: &Arc<dyn SecretResolver>,
) -> Result<HttpSource, CatalogError> {
    let auth = http
        .auth
        .as_ref()
        .map(|auth| inbound_auth(auth, secrets))
        .transpose()
        .map_err(|reason| CatalogError::new(KIND, &source.name, reason))?;
    let mut route = HttpSource::new(source.name.clone(), http.path.clone());
    route.paused = source.paused;
    route.auth = auth;
    route.requests_per_minute = http.requests_per_minute;
    Ok(route)
}

/// The check of incoming requests, for sources and for the admin API.
pub fn inbound_auth(auth: &checked::InboundAuth, secrets: &Arc<dyn SecretResolver>) -> Result<Auth, String> {
    let accepted = |accepted: &checked::Accepted| Accepted {
        current: secret(&accepted.current, secrets),
        previous: optional(accepted.previous.as_ref(), secrets),
    };
    Ok(match auth {
        checked::InboundAuth::Bearer(token) => Auth::Bearer { token: accepted(token) },
        checked::InboundAuth::ApiKey { key, header } => {
            Auth::ApiKey { key: accepted(key), header: header_name(header)? }
        }
        checked::InboundAuth::Hmac { secret, form, timestamp_tolerance } => Auth::Hmac(HmacAuth {
            secret: accepted(secret),
            header: header_name(&form.header)?,
            algorithm: algorithm(form.algorithm),
            prefix: form.prefix.clone(),
            timestamp_header: form.timestamp_header.as_deref().map(header_name).transpose()?,
            tolerance_ms: u64::try_from(timestamp_tolerance.as_millis()).unwrap_or(u64::MAX),
            format: payload_format(form.signs_timestamp),
        }),
        checked::InboundAuth::StandardWebhooks { secret, tolerance } => {
            Auth::StandardWebhooks { secret: accepted(secret), tolerance_s: tolerance.as_secs() }
        }
        checked::InboundAuth::Stripe { secret, tolerance } => {
            Auth::Stripe { secret: accepted(secret), tolerance_s: tolerance.as_secs() }
        }
        checked::InboundAuth::GitHub(secret) => Auth::GitHub { secret: accepted(secret) },
    })
}

fn intake(source: &checked::Source, relay: &checked::Relay, kind: SourceKind) -> Result<SourceConfig, CatalogError> {
    let error = |reason: String| CatalogError::new(KIND, &source.name, reason);
    let (from_record_key, fallback) = match &source.connector {
        checked::SourceConnector::Kafka(kafka) => {
            (kafka.idempotency_from_record_key, key_fallback(kafka.idempotency_key_fallback))
        }
        checked::SourceConnector::Nats(nats) => (false, key_fallback(nats.idempotency_key_fallback)),
        _ => (false, KeyFallback::Digest),
    };
    let topic = match &source.topic {
        Some(topic) => topic.clone(),
        // Pull rows have no topic; what stands here is never rendered.
        None => Template::parse("{{ source }}", Vocabulary::SourceTopic).map_err(|reason| error(reason.to_string()))?,
    };
    let has_publish_time = source.scheduled_at_header.is_some() || !source.scheduled_at_paths.is_empty();
    let published_at = if has_publish_time {
        let paths = paths(&source.scheduled_at_paths).map_err(error)?;
        Some(PublishTime { header: source.scheduled_at_header.clone(), paths })
    } else {
        None
    };
    Ok(SourceConfig {
        name: source.name.clone(),
        kind,
        consumption: source.consumption,
        topic,
        idempotency_key: origins(&source.idempotency_key).map_err(error)?,
        aggregate_id: origins(&source.aggregate_id).map_err(error)?,
        event_type: origins(&source.event_type).map_err(error)?,
        idempotency_from_record_key: from_record_key,
        key_fallback: fallback,
        initial_delay: source.initial_delay,
        published_at,
        filter: filter(&source.filter),
        transform: optional_transform(source.transform.as_ref(), KIND, &source.name)?,
        expression_bounds: Bounds::default(),
        store_within: store_within(relay, kind),
        limits: StoreLimits::default(),
    })
}

fn store_within(relay: &checked::Relay, kind: SourceKind) -> Duration {
    if kind.is_broker() { relay.inbox.store_retry_window } else { relay.inbox.store_timeout }
}

fn key_fallback(fallback: checked::IdempotencyKeyFallback) -> KeyFallback {
    match fallback {
        checked::IdempotencyKeyFallback::Digest => KeyFallback::Digest,
        checked::IdempotencyKeyFallback::Position => KeyFallback::Position,
    }
}

fn origins(origins: &checked::Origins) -> Result<Origins, String> {
    let expression = origins.expression.as_deref().map(Expression::compile).transpose();
    Ok(Origins {
        header: origins.header.clone(),
        expression: expression.map_err(|error| error.to_string())?,
        paths: paths(&origins.paths)?,
    })
}

fn paths(paths: &[String]) -> Result<Vec<Path>, String> {
    paths.iter().map(|path| Path::parse(path).map_err(|error| error.to_string())).collect()
}

fn filter(filter: &checked::Filter) -> Filter {
    let rules = |rules: &[checked::FilterRule]| {
        rules
            .iter()
            .map(|rule| Rule {
                header: rule.header.clone(),
                test: match &rule.test {
                    checked::FilterTest::OneOf(values) => Test::In(values.clone()),
                    checked::FilterTest::Matches(pattern) => Test::Matches(pattern.clone()),
                    checked::FilterTest::Exists => Test::Exists,
                },
            })
            .collect()
    };
    Filter { require: rules(&filter.require), exclude: rules(&filter.exclude) }
}
