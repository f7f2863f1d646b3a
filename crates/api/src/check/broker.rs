//! Rules of broker addresses and logins, the same for sources and destinations.

use queuebox_core::template::{Address, Vocabulary};
use url::Url;

use super::Case;
use crate::{
    checked::{KafkaCluster, NatsLogin, NatsServers, RabbitMqLogin, Sasl},
    spec::common::{ColumnName, SecretRef, SecurityProtocol, TlsSpec},
};

/// `rabbitmq.url`, `.urlFrom`, `.username`, `.passwordFrom`.
pub(super) struct RabbitMqFields<'s> {
    pub url: Option<&'s String>,
    pub url_from: Option<&'s SecretRef>,
    pub username: Option<&'s String>,
    pub password_from: Option<&'s SecretRef>,
}

pub(super) fn rabbitmq(case: &Case<'_>, at: &str, fields: &RabbitMqFields<'_>) -> Option<RabbitMqLogin> {
    case.exactly_one(at, &[("url", fields.url.is_some()), ("urlFrom", fields.url_from.is_some())]);
    let reference = case.optional_reference(&format!("{at}.urlFrom"), fields.url_from);
    let password = case.optional_reference(&format!("{at}.passwordFrom"), fields.password_from);
    if fields.url_from.is_some() {
        if fields.username.is_some() || fields.password_from.is_some() {
            case.error(at, "urlFrom holds the login; leave username and passwordFrom out");
        }
        return reference.map(RabbitMqLogin::Url);
    }
    if fields.username.is_some() != fields.password_from.is_some() {
        case.error(at, "username and passwordFrom go together");
    }
    let at = format!("{at}.url");
    let text = fields.url?;
    let url = match Url::parse(text) {
        Ok(url) if matches!(url.scheme(), "amqp" | "amqps") => url,
        _ => {
            case.error(&at, "must begin with amqp:// or amqps://");
            return None;
        }
    };
    if url.host_str().is_none_or(str::is_empty) {
        case.error(&at, "has no host");
        return None;
    }
    if !url.username().is_empty() || url.password().is_some() {
        case.error_with_hint(&at, "holds credentials", "write username and passwordFrom, or urlFrom for all");
        return None;
    }
    Some(RabbitMqLogin::Parts { url, username: fields.username.cloned(), password })
}

/// The fields of a Kafka cluster.
pub(super) struct KafkaFields<'s> {
    pub servers: &'s str,
    pub protocol: Option<SecurityProtocol>,
    pub mechanism: Option<&'s String>,
    pub username: Option<&'s String>,
    pub password_from: Option<&'s SecretRef>,
    pub tls: Option<&'s TlsSpec>,
}

const MECHANISMS: [&str; 3] = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"];

pub(super) fn kafka(case: &Case<'_>, at: &str, fields: &KafkaFields<'_>) -> KafkaCluster {
    servers(case, &format!("{at}.bootstrapServers"), fields.servers, |server| {
        let (host, port) = server.rsplit_once(':').unwrap_or((server, ""));
        (host.is_empty() || port.parse::<u16>().is_err()).then_some("write host:port, comma separated")
    });
    let security_protocol = fields.protocol.unwrap_or_default();
    let password = case.optional_reference(&format!("{at}.saslPasswordFrom"), fields.password_from);
    if let Some(mechanism) = fields.mechanism.filter(|mechanism| !MECHANISMS.contains(&mechanism.as_str())) {
        case.error(&format!("{at}.saslMechanism"), format!("{mechanism:?} is none of {}", MECHANISMS.join(", ")));
    }
    let sasl = match (fields.mechanism, fields.username, password) {
        (Some(mechanism), Some(username), Some(password)) => {
            Some(Sasl { mechanism: mechanism.clone(), username: username.clone(), password })
        }
        (mechanism, username, password) => {
            let lacks = [
                ("saslMechanism", mechanism.is_none()),
                ("saslUsername", username.is_none()),
                ("saslPasswordFrom", password.is_none()),
            ];
            for (field, _) in lacks.iter().filter(|(_, lacks)| *lacks && security_protocol.is_sasl()) {
                case.error(&format!("{at}.{field}"), format!("is missing: {} needs it", security_protocol.as_str()));
            }
            None
        }
    };
    if !security_protocol.is_sasl() && (fields.mechanism.is_some() || fields.username.is_some()) {
        let message = format!("{} logs nobody in: the sasl fields have no effect", security_protocol.as_str());
        case.warning(&format!("{at}.securityProtocol"), message);
    }
    KafkaCluster {
        bootstrap_servers: fields.servers.to_owned(),
        security_protocol,
        sasl: sasl.filter(|_| security_protocol.is_sasl()),
        tls: case.tls(&format!("{at}.tls"), fields.tls),
    }
}

/// The fields of NATS servers.
pub(super) struct NatsFields<'s> {
    pub servers: &'s str,
    pub username: Option<&'s String>,
    pub password_from: Option<&'s SecretRef>,
    pub token_from: Option<&'s SecretRef>,
    pub tls: Option<&'s TlsSpec>,
}

pub(super) fn nats(case: &Case<'_>, at: &str, fields: &NatsFields<'_>) -> NatsServers {
    servers(case, &format!("{at}.servers"), fields.servers, |server| {
        let (scheme, rest) = server.split_once("://").unwrap_or(("nats", server));
        if !matches!(scheme, "nats" | "tls" | "ws" | "wss") {
            return Some("write host:port, or a URL that begins with nats:// or tls://");
        }
        if rest.contains('@') {
            return Some("holds credentials: write username and passwordFrom, or tokenFrom");
        }
        (rest.is_empty() || rest.contains(char::is_whitespace)).then_some("has no host")
    });
    let password = case.optional_reference(&format!("{at}.passwordFrom"), fields.password_from);
    let token = case.optional_reference(&format!("{at}.tokenFrom"), fields.token_from);
    if fields.username.is_some() != fields.password_from.is_some() {
        case.error(at, "username and passwordFrom go together");
    }
    if fields.token_from.is_some() && (fields.username.is_some() || fields.password_from.is_some()) {
        case.error(at, "give username and passwordFrom, or tokenFrom, not both");
    }
    let login = match (fields.username, password, token) {
        (_, _, Some(token)) => NatsLogin::Token(token),
        (Some(username), Some(password), None) => NatsLogin::User { username: username.clone(), password },
        _ => NatsLogin::None,
    };
    NatsServers { servers: fields.servers.to_owned(), login, tls: case.tls(&format!("{at}.tls"), fields.tls) }
}

fn servers(case: &Case<'_>, at: &str, servers: &str, problem: impl Fn(&str) -> Option<&'static str>) {
    if servers.is_empty() {
        return;
    }
    for server in servers.split(',').map(str::trim) {
        if server.is_empty() {
            case.error(at, "has an empty entry");
        } else if let Some(message) = problem(server) {
            // Never the entry itself: it may hold a password.
            case.error(at, message);
        }
    }
}

/// `exchange` and `exchangeFrom`, and the like: one of them; the column wins.
pub(super) fn address(
    case: &Case<'_>,
    at: &str,
    field: &str,
    template: Option<&String>,
    column: Option<ColumnName>,
) -> Option<Address> {
    let compiled = template.and_then(|text| case.template(&format!("{at}.{field}"), text, Vocabulary::Address));
    match (column, template) {
        (Some(column), _) => Some(Address::Column(column.into())),
        (None, Some(_)) => compiled.map(Address::Template),
        (None, None) => {
            case.error(at, format!("give {field} or {field}From"));
            None
        }
    }
}
