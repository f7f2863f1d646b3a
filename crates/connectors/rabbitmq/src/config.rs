//! What a RabbitMQ connector is built from: plain values, checked by whoever reads manifests.
//!
//! Secrets are asked for at each connection, so that a rotated one is used from the next connection on.

use std::time::Duration;

use queuebox_core::{
    Secret,
    template::{Address, Template},
};

/// A connection is up within this time, from name resolution to the login, or the attempt has failed.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two missed ones end a connection, so a broker that is silent is noticed within 20 seconds. A `heartbeat` parameter of
/// the URL wins.
pub const HEARTBEAT_S: u16 = 10;

/// Where the broker is.
#[derive(Debug, Clone)]
pub enum BrokerUrl {
    /// `url`: `amqp://` or `amqps://`, without credentials.
    Plain(String),
    /// `urlFrom`: with credentials, percent-encoded.
    Secret(Secret),
}

/// PEM texts of a `tls` block (contract 10.2), read anew for each connection.
#[derive(Debug, Clone, Default)]
pub struct TlsConfig {
    /// `caFrom`: one or more CA certificates. They replace the system's roots.
    pub ca: Option<Secret>,
    /// `certFrom`: our certificate, with its chain.
    pub cert: Option<Secret>,
    /// `keyFrom`: its private key.
    pub key: Option<Secret>,
}

/// How to reach the broker and log in.
#[derive(Debug, Clone)]
pub struct ConnectionConfig {
    /// Host, port, virtual host; without a path the virtual host is `/`. The query parameters `heartbeat`, `frame_max`,
    /// `channel_max` and `auth_mechanism` (`plain`, or `external` for a login by certificate) are read.
    pub url: BrokerUrl,
    /// Wins over the URL's. Taken as it is, not percent-decoded.
    pub username: Option<String>,
    /// Wins over the URL's. Taken as it is, not percent-decoded.
    pub password: Option<Secret>,
    /// For `amqps://`.
    pub tls: TlsConfig,
    /// Shown in the broker's list of connections, such as `queuebox shop/orders`.
    pub name: String,
}

/// `rabbitmq.exchangeType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExchangeType {
    /// Routes by pattern.
    #[default]
    Topic,
    /// Routes by equality.
    Direct,
    /// Routes to every bound queue.
    Fanout,
}

/// `rabbitmq.deliveryMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeliveryMode {
    /// 2: a durable queue writes the message to disk before it is confirmed.
    #[default]
    Persistent,
    /// 1: the message may be lost when the broker restarts.
    Transient,
}

/// `Destination.spec.rabbitmq` (contract 13.3).
#[derive(Debug, Clone)]
pub struct DestinationConfig {
    /// Broker and login.
    pub connection: ConnectionConfig,
    /// `exchange` or `exchangeFrom`.
    pub exchange: Address,
    /// Type with which the exchange is declared.
    pub exchange_type: ExchangeType,
    /// Declare the exchange, durable; otherwise it must exist.
    pub declare_exchange: bool,
    /// The destination's `routingKey`; the route's wins.
    pub routing_key: Template,
    /// Written to disk or not.
    pub delivery_mode: DeliveryMode,
    /// From the call until the confirm.
    pub timeout: Duration,
    /// `Destination.spec.headers`; a row header of the same name wins.
    pub headers: Vec<(String, String)>,
}

/// `Source.spec.rabbitmq` (contract 13.2).
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Broker and login.
    pub connection: ConnectionConfig,
    /// `queueName`.
    pub queue: String,
    /// Most messages that are unacknowledged at a time, 1 to 65535.
    pub prefetch: u16,
    /// Declare the queue, durable; otherwise it must exist.
    pub declare_queue: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_url_never_prints() {
        let url = BrokerUrl::Secret(Secret::fixed("amqp://u:canary-7731@h"));
        assert!(!format!("{url:?}").contains("canary"));
    }
}
