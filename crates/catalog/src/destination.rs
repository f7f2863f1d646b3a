//! Builds destinations.

use std::sync::Arc;

use http::HeaderName;
use queuebox_api::{Reference, SecretResolver, checked};
use queuebox_core::ports::Destination;
use queuebox_engine::config::{BreakerConfig, DestinationConfig, Rate};
use queuebox_http::{
    HttpDestination, HttpDestinationConfig,
    destination::{OAuth2, OutboundAuth, Signing, StatusRule, signing::HmacSigning},
};

use crate::{
    CatalogError, optional_transform,
    secret::{http_tls, optional, secret},
};

const KIND: &str = "Destination";

/// A destination with the rules of its traffic.
pub(crate) fn build(
    destination: &checked::Destination,
    relay: &checked::Relay,
    secrets: &Arc<dyn SecretResolver>,
) -> Result<DestinationConfig, CatalogError> {
    let name = format!("queuebox {}/{}", relay.name, destination.name);
    let port: Arc<dyn Destination> = match &destination.connector {
        checked::DestinationConnector::Http(http) => Arc::new(self::http(destination, http, relay, secrets)?),
        checked::DestinationConnector::RabbitMq(rabbitmq) => {
            Arc::new(self::rabbitmq(destination, rabbitmq, name, secrets))
        }
        checked::DestinationConnector::Kafka(kafka) => Arc::new(self::kafka(destination, kafka, secrets)),
        checked::DestinationConnector::Nats(nats) => Arc::new(self::nats(destination, nats, name, secrets)),
    };
    Ok(DestinationConfig {
        port,
        paused: destination.paused,
        max_in_flight: destination.max_in_flight,
        rate: destination.rate.map(|rate| Rate { per_second: rate.per_second, burst: rate.burst }),
        schedule: destination.schedule,
        breaker: destination
            .breaker
            .map(|breaker| BreakerConfig { failures: breaker.failures, open_for: breaker.open_for }),
        transform: optional_transform(destination.transform.as_ref(), KIND, &destination.name)?.map(Arc::new),
    })
}

fn http(
    destination: &checked::Destination,
    http: &checked::HttpDestination,
    relay: &checked::Relay,
    secrets: &Arc<dyn SecretResolver>,
) -> Result<HttpDestination, CatalogError> {
    let error = |reason: String| CatalogError::new(KIND, &destination.name, reason);
    let mut config = HttpDestinationConfig::new(http.url.clone());
    config.timeout = http.timeout;
    config.headers.clone_from(&destination.headers);
    config.auth = http.auth.as_ref().map(|auth| outbound_auth(auth, secrets)).transpose().map_err(error)?;
    config.signing = http.signing.as_ref().map(|signing| self::signing(signing, secrets)).transpose().map_err(error)?;
    config.tls = http_tls(&http.tls, secrets);
    config.permanent_statuses = http
        .permanent_statuses
        .iter()
        .map(|rule| match rule {
            checked::StatusRule::Exactly(status) => StatusRule::Exactly(*status),
            checked::StatusRule::ClientErrors => StatusRule::ClientErrors,
            checked::StatusRule::ServerErrors => StatusRule::ServerErrors,
        })
        .collect();
    config.error_body_bytes_max = usize::try_from(relay.http.max_error_body_bytes).unwrap_or(usize::MAX);
    config.block_private_addresses = relay.http.block_private_addresses;
    config.idle_connections_max = destination.max_in_flight as usize;
    HttpDestination::new(config).map_err(|reason| error(reason.to_string()))
}

fn outbound_auth(auth: &checked::OutboundAuth, secrets: &Arc<dyn SecretResolver>) -> Result<OutboundAuth, String> {
    let read = |reference: &Reference| secret(reference, secrets);
    Ok(match auth {
        checked::OutboundAuth::Bearer(token) => OutboundAuth::Bearer(read(token)),
        checked::OutboundAuth::Basic { username, password } => {
            OutboundAuth::Basic { username: username.clone(), password: read(password) }
        }
        checked::OutboundAuth::Header { name, value } => {
            OutboundAuth::Header { name: header_name(name)?, value: read(value) }
        }
        checked::OutboundAuth::OAuth2 { client_id, client_secret, token_url, scope, extra_params } => {
            OutboundAuth::OAuth2(OAuth2 {
                client_id: client_id.clone(),
                client_secret: read(client_secret),
                token_url: token_url.clone(),
                scope: scope.clone(),
                extra_params: extra_params.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
            })
        }
    })
}

fn signing(signing: &checked::Signing, secrets: &Arc<dyn SecretResolver>) -> Result<Signing, String> {
    Ok(match signing {
        checked::Signing::StandardWebhooks(accepted) => Signing::StandardWebhooks {
            secret: secret(&accepted.current, secrets),
            previous: optional(accepted.previous.as_ref(), secrets),
        },
        checked::Signing::Hmac { secret: reference, form } => Signing::Hmac(HmacSigning {
            secret: secret(reference, secrets),
            header: header_name(&form.header)?,
            algorithm: algorithm(form.algorithm),
            prefix: form.prefix.clone(),
            timestamp_header: form.timestamp_header.as_deref().map(header_name).transpose()?,
            format: payload_format(form.signs_timestamp),
        }),
    })
}

pub(crate) fn header_name(name: &str) -> Result<HeaderName, String> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("{name:?} is not a header name"))
}

pub(crate) fn algorithm(algorithm: checked::HmacAlgorithm) -> queuebox_http::auth::HmacAlgorithm {
    match algorithm {
        checked::HmacAlgorithm::HmacSha256 => queuebox_http::auth::HmacAlgorithm::Sha256,
        checked::HmacAlgorithm::HmacSha512 => queuebox_http::auth::HmacAlgorithm::Sha512,
    }
}

pub(crate) fn payload_format(signs_timestamp: bool) -> queuebox_http::auth::HmacPayloadFormat {
    if signs_timestamp {
        queuebox_http::auth::HmacPayloadFormat::TimestampDotBody
    } else {
        queuebox_http::auth::HmacPayloadFormat::Body
    }
}

fn rabbitmq(
    destination: &checked::Destination,
    rabbitmq: &checked::RabbitMqDestination,
    name: String,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_rabbitmq::RabbitDestination {
    use queuebox_rabbitmq::config::{DeliveryMode, DestinationConfig, ExchangeType};
    queuebox_rabbitmq::RabbitDestination::new(DestinationConfig {
        connection: rabbitmq_connection(&rabbitmq.login, &rabbitmq.tls, name, secrets),
        exchange: rabbitmq.exchange.clone(),
        exchange_type: match rabbitmq.exchange_type {
            checked::ExchangeType::Topic => ExchangeType::Topic,
            checked::ExchangeType::Direct => ExchangeType::Direct,
            checked::ExchangeType::Fanout => ExchangeType::Fanout,
        },
        declare_exchange: rabbitmq.declare_exchange,
        routing_key: rabbitmq.routing_key.clone(),
        delivery_mode: if rabbitmq.persistent { DeliveryMode::Persistent } else { DeliveryMode::Transient },
        timeout: rabbitmq.timeout,
        headers: destination.headers.clone(),
    })
}

pub(crate) fn rabbitmq_connection(
    login: &checked::RabbitMqLogin,
    tls: &checked::Tls,
    name: String,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_rabbitmq::config::ConnectionConfig {
    use queuebox_rabbitmq::config::{BrokerUrl, ConnectionConfig, TlsConfig};
    let one = |reference: &Option<Reference>| optional(reference.as_ref(), secrets);
    let (url, username, password) = match login {
        checked::RabbitMqLogin::Url(reference) => (BrokerUrl::Secret(secret(reference, secrets)), None, None),
        checked::RabbitMqLogin::Parts { url, username, password } => {
            (BrokerUrl::Plain(url.to_string()), username.clone(), one(password))
        }
    };
    let tls = TlsConfig { ca: one(&tls.ca), cert: one(&tls.cert), key: one(&tls.key) };
    ConnectionConfig { url, username, password, tls, name }
}

fn kafka(
    destination: &checked::Destination,
    kafka: &checked::KafkaDestination,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_kafka::KafkaDestination {
    queuebox_kafka::KafkaDestination::new(queuebox_kafka::config::DestinationConfig {
        cluster: kafka_cluster(&kafka.cluster, secrets),
        topic: kafka.topic.clone(),
        key: kafka.key.clone(),
        headers: destination.headers.clone(),
        timeout: kafka.timeout,
    })
}

pub(crate) fn kafka_cluster(
    cluster: &checked::KafkaCluster,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_kafka::config::Cluster {
    use queuebox_kafka::config::{Cluster, Sasl, SecurityProtocol, Tls};
    let one = |reference: &Option<Reference>| optional(reference.as_ref(), secrets);
    Cluster {
        bootstrap_servers: cluster.bootstrap_servers.clone(),
        security_protocol: match cluster.security_protocol {
            checked::SecurityProtocol::Plaintext => SecurityProtocol::Plaintext,
            checked::SecurityProtocol::Ssl => SecurityProtocol::Ssl,
            checked::SecurityProtocol::SaslPlaintext => SecurityProtocol::SaslPlaintext,
            checked::SecurityProtocol::SaslSsl => SecurityProtocol::SaslSsl,
        },
        sasl: cluster.sasl.as_ref().map(|sasl| Sasl {
            mechanism: sasl.mechanism.clone(),
            username: sasl.username.clone(),
            password: secret(&sasl.password, secrets),
        }),
        tls: Tls { ca: one(&cluster.tls.ca), cert: one(&cluster.tls.cert), key: one(&cluster.tls.key) },
        properties: Vec::new(),
    }
}

fn nats(
    destination: &checked::Destination,
    nats: &checked::NatsDestination,
    name: String,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_nats::NatsDestination {
    queuebox_nats::NatsDestination::new(queuebox_nats::config::DestinationConfig {
        connection: nats_connection(&nats.servers, name, secrets),
        subject: nats.subject.clone(),
        jetstream: nats.jet_stream,
        timeout: nats.timeout,
        headers: destination.headers.clone(),
    })
}

pub(crate) fn nats_connection(
    servers: &checked::NatsServers,
    name: String,
    secrets: &Arc<dyn SecretResolver>,
) -> queuebox_nats::config::ConnectionConfig {
    use queuebox_nats::config::{ConnectionConfig, Login, TlsConfig};
    let one = |reference: &Option<Reference>| optional(reference.as_ref(), secrets);
    ConnectionConfig {
        servers: servers.servers.clone(),
        login: match &servers.login {
            checked::NatsLogin::None => Login::None,
            checked::NatsLogin::User { username, password } => {
                Login::Password { username: username.clone(), password: secret(password, secrets) }
            }
            checked::NatsLogin::Token(token) => Login::Token(secret(token, secrets)),
        },
        tls: TlsConfig { ca: one(&servers.tls.ca), cert: one(&servers.tls.cert), key: one(&servers.tls.key) },
        name,
    }
}
