//! Manifests after [`crate::check()`]: plain values with every default resolved, in which nothing can be wrong any more. Only
//! these can be opened: the catalog maps them into the configuration of engine, stores and connectors.
//!
//! Durations are `std::time::Duration`, sizes bytes, patterns and templates compiled, secrets still references.

use std::{collections::BTreeMap, time::Duration};

use queuebox_core::{
    message::Consumption,
    pattern::Pattern,
    retry::RetrySchedule,
    template::{Address, Template},
};
use url::Url;

pub use crate::spec::{
    auth::HmacAlgorithm,
    common::{IdempotencyKeyFallback, OnError, SecurityProtocol},
    destination::ExchangeType,
    relay::{OnSent, PodSpec, TlsMode},
    source::OffsetReset,
};
use crate::{crd::Kind, secret::Reference};

/// A Relay with its Sources and the Destinations that its routes name.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Relay {
    /// Namespace; `default` where a manifest names none.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID, where the manifest comes from a cluster.
    pub uid: Option<String>,
    /// Worker pods, as long as nothing scales.
    pub replicas: i32,
    /// Scaling by the backlog.
    pub autoscaling: Option<Autoscaling>,
    /// No workers.
    pub paused: bool,
    /// Worker pods that may be away at a time; `None` = no PodDisruptionBudget.
    pub max_unavailable: Option<i32>,
    /// Changes to the worker pods.
    pub pod: PodSpec,
    /// Time from the stop signal to the end.
    pub drain_timeout: Duration,
    /// The database.
    pub database: Database,
    /// Tested in order.
    pub routes: Vec<Route>,
    /// How the outbox is read.
    pub outbox: Outbox,
    /// How the inbox is filled and forwarded.
    pub inbox: Inbox,
    /// Deletes finished rows.
    pub retention: Retention,
    /// How idle workers are woken.
    pub capture: Capture,
    /// Ports and HTTP behaviour.
    pub http: Http,
    /// The admin API; `None` = off.
    pub admin: Option<Admin>,
    /// Sources of this Relay, by name.
    pub sources: Vec<Source>,
    /// Destinations that the routes name, by name.
    pub destinations: Vec<Destination>,
}

impl Relay {
    /// The UID, in local runs `local/<namespace>/<name>` (contract 2.7).
    pub fn uid(&self) -> String {
        self.uid.clone().unwrap_or_else(|| format!("local/{}/{}", self.namespace, self.name))
    }
}

/// `spec.autoscaling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Autoscaling {
    /// Lower bound, at least 1.
    pub min_replicas: i32,
    /// Upper bound.
    pub max_replicas: i32,
    /// Startable pending rows per worker.
    pub target_pending: i64,
    /// Age of the oldest startable row that is aimed at.
    pub target_oldest_age: Duration,
    /// Written in the manifest; without it `Delivering` judges by 5 minutes.
    pub has_target_oldest_age: bool,
}

/// `spec.database`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Database {
    /// Which, and where.
    pub server: DatabaseServer,
    /// Brings the tables to the newest version at start.
    pub migrate: bool,
    /// Connections per worker.
    pub pool_size: u32,
    /// Time to connect.
    pub connect_timeout: Duration,
    /// How long a start waits.
    pub startup_timeout: Duration,
    /// Name of the outbox.
    pub outbox_table: String,
    /// Name of the inbox.
    pub inbox_table: String,
    /// Renamed columns of the outbox: column of contract 2.1 → name.
    pub outbox_columns: BTreeMap<String, String>,
    /// Renamed columns of the inbox: column of contract 2.2 → name.
    pub inbox_columns: BTreeMap<String, String>,
}

/// A kind of database. SQL Server and MySQL are refused by the checks of this release.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "there is one of it in a process")]
pub enum DatabaseServer {
    /// PostgreSQL.
    Postgres(Server),
    /// SQLite.
    Sqlite {
        /// Path of the file.
        path: String,
        /// How long a statement waits for another writer.
        busy_timeout: Duration,
    },
}

impl DatabaseServer {
    /// `postgres`, `sqlite`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Postgres(_) => "postgres",
            Self::Sqlite { .. } => "sqlite",
        }
    }
}

/// A database server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Where, and who.
    pub login: DatabaseLogin,
    /// Schema of the tables; `None` = the search path.
    pub schema: Option<String>,
    /// Protection of the connection.
    pub tls: DatabaseTls,
}

/// Where a database is and who logs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DatabaseLogin {
    /// All in one URL, perhaps with `jdbc:` in front.
    Url(Reference),
    /// Part by part.
    Parts {
        /// Host.
        host: String,
        /// Port.
        port: u16,
        /// Database.
        database: String,
        /// User.
        username: String,
        /// Password.
        password: Option<Reference>,
    },
}

/// Protection of a connection to a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseTls {
    /// How much is checked.
    pub mode: TlsMode,
    /// Written in the manifest; otherwise a parameter of the URL may decide.
    pub has_mode: bool,
    /// CA and client certificate.
    pub files: Tls,
}

/// A private CA and a client certificate, PEM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tls {
    /// CA.
    pub ca: Option<Reference>,
    /// Our certificate; comes with `key`.
    pub cert: Option<Reference>,
    /// Key of our certificate.
    pub key: Option<Reference>,
}

/// One of `spec.routes`.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Any of these.
    pub topics: Vec<Pattern>,
    /// Names of Destinations; several = fan-out.
    pub destinations: Vec<String>,
    /// Reshapes the payload first.
    pub transform: Option<Transform>,
    /// Wins over the destination's; carries its default for missing fields.
    pub routing_key: Option<Template>,
}

/// A transform; its expression compiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transform {
    /// JSONata.
    pub expression: String,
    /// Longest time of one evaluation.
    pub timeout: Duration,
    /// Deepest nesting.
    pub max_depth: u32,
    /// What a failure means.
    pub on_error: OnError,
}

/// `spec.outbox`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outbox {
    /// What becomes of a row that was sent.
    pub on_sent: OnSent,
    /// Longest idle wait.
    pub poll_interval: Duration,
    /// Rows per round trip.
    pub batch_size: u32,
    /// Unfinished publishes per worker.
    pub max_in_flight: u32,
    /// Their payloads in bytes.
    pub max_in_flight_bytes: u64,
    /// Larger payloads are never loaded, in bytes.
    pub max_payload_bytes: u64,
    /// Back-off and ceiling of `Retry-After` for destinations that say nothing.
    pub schedule: RetrySchedule,
    /// For rows that QueueBox inserts.
    pub max_attempts: i32,
    /// Crashes until a row is dead.
    pub max_crashes: i32,
    /// The lease.
    pub claim_timeout: Duration,
    /// How often the gauges are counted.
    pub pending_gauge_interval: Duration,
}

/// `spec.inbox`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inbox {
    /// In front of every path; begins with a slash and does not end with one (the root is empty).
    pub base_path: String,
    /// Largest body in bytes.
    pub max_body_bytes: u64,
    /// Time to read a body.
    pub body_timeout: Duration,
    /// Bodies being read or stored, in bytes.
    pub max_bytes_in_flight: u64,
    /// How long an HTTP source tries to store.
    pub store_timeout: Duration,
    /// How long a broker source tries to store; zero = once.
    pub store_retry_window: Duration,
    /// Crashes until a row is dead.
    pub max_crashes: i32,
    /// Forwarding; `None` = off.
    pub relay: Option<InboxRelay>,
    /// How often the gauges are counted.
    pub pending_gauge_interval: Duration,
}

/// `spec.inbox.relay`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InboxRelay {
    /// Longest idle wait.
    pub poll_interval: Duration,
    /// Rows per round trip.
    pub batch_size: u32,
    /// Stamped on forwarded rows.
    pub max_attempts: i32,
}

/// `spec.retention`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Retention {
    /// Of the outbox; `None` = off.
    pub outbox: Option<TableRetention>,
    /// Of the inbox; `None` = off.
    pub inbox: Option<TableRetention>,
}

/// Retention of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRetention {
    /// What is kept.
    pub keep: Keep,
    /// Time between two runs.
    pub cleanup_interval: Duration,
    /// Rows per statement.
    pub batch_size: u32,
}

/// What a retention keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Younger rows.
    Age {
        /// `sent`, `processed`; `None` = all of them.
        finished: Option<Duration>,
        /// `dead`; `None` = all of them.
        dead: Option<Duration>,
    },
    /// The newest so many of each finished state.
    Count(u64),
}

/// `spec.capture`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// Woken by the database where it can.
    pub auto: bool,
    /// A direct connection, complete.
    pub connection: Option<Server>,
}

/// `spec.http`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    /// Port of the inbox routes.
    pub port: u16,
    /// Port of health, metrics, status and admin; equal to `port` in classic files without one.
    pub management_port: u16,
    /// So much of a failed answer is kept, in bytes.
    pub max_error_body_bytes: u64,
    /// Refuses private addresses.
    pub block_private_addresses: bool,
    /// Requests are still accepted for so long while stopping.
    pub shutdown_delay: Duration,
}

/// `spec.admin`, enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admin {
    /// Who may use it; `None` = anyone (`insecure: true`).
    pub auth: Option<InboundAuth>,
    /// Longest time of a tested transform.
    pub max_transform_timeout: Duration,
    /// Largest request in bytes.
    pub max_payload_bytes: u64,
}

/// A secret and the one before, either of which is accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// `…From`.
    pub current: Reference,
    /// `previous…From`.
    pub previous: Option<Reference>,
}

/// Check of incoming requests (contract 10.1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InboundAuth {
    /// `bearer`.
    Bearer(Accepted),
    /// `apiKey`.
    ApiKey {
        /// The key.
        key: Accepted,
        /// Name of the header.
        header: String,
    },
    /// `hmac`.
    Hmac {
        /// The secret.
        secret: Accepted,
        /// How it signs.
        form: Hmac,
        /// Older or newer requests are refused, where there is a timestamp header.
        timestamp_tolerance: Duration,
    },
    /// `standardWebhooks`.
    StandardWebhooks {
        /// The secret.
        secret: Accepted,
        /// Older or newer requests are refused.
        tolerance: Duration,
    },
    /// `stripe`.
    Stripe {
        /// The secret.
        secret: Accepted,
        /// Older or newer requests are refused.
        tolerance: Duration,
    },
    /// `github`.
    GitHub(Accepted),
}

impl InboundAuth {
    /// Headers that carry a credential; they are no origin of an attribute. What is only covered by a signature, such as
    /// `webhook-id`, is one.
    pub fn headers(&self) -> Vec<&str> {
        match self {
            Self::Bearer(_) => vec!["Authorization"],
            Self::ApiKey { header, .. } => vec![header],
            Self::Hmac { form, .. } => vec![&form.header],
            Self::StandardWebhooks { .. } => vec!["webhook-signature"],
            Self::Stripe { .. } => vec!["Stripe-Signature"],
            Self::GitHub(_) => vec!["X-Hub-Signature-256"],
        }
    }
}

/// How an HMAC is written (contract 10.1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hmac {
    /// Name of the header.
    pub header: String,
    /// Hash.
    pub algorithm: HmacAlgorithm,
    /// Before the digits.
    pub prefix: String,
    /// Header with the Unix time in milliseconds.
    pub timestamp_header: Option<String>,
    /// `<timestamp>.<body>` is signed in place of the body.
    pub signs_timestamp: bool,
}

/// A Source.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Source {
    /// Name; stored in `inbox.source`.
    pub name: String,
    /// Not receiving.
    pub paused: bool,
    /// Push or pull.
    pub consumption: Consumption,
    /// Topic of push rows; `None` for pull.
    pub topic: Option<Template>,
    /// Origins of the idempotency key.
    pub idempotency_key: Origins,
    /// Origins of the aggregate.
    pub aggregate_id: Origins,
    /// Origins of the event type.
    pub event_type: Origins,
    /// Holds each message for so long.
    pub initial_delay: Duration,
    /// Header with the time of publishing.
    pub scheduled_at_header: Option<String>,
    /// JSONPaths of the time of publishing.
    pub scheduled_at_paths: Vec<String>,
    /// Reshapes the body before it is stored.
    pub transform: Option<Transform>,
    /// Drops messages by their headers.
    pub filter: Filter,
    /// What it reads.
    pub connector: SourceConnector,
}

/// Where an attribute is read from; the order is that of contract 6.2.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origins {
    /// Header. For brokers always set, with the name of contract 6.2 or its replacement.
    pub header: Option<String>,
    /// JSONata; it compiles.
    pub expression: Option<String>,
    /// Definite JSONPaths.
    pub paths: Vec<String>,
}

/// Rules over headers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filter {
    /// All match.
    pub require: Vec<FilterRule>,
    /// None matches.
    pub exclude: Vec<FilterRule>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterRule {
    /// Name of the header.
    pub header: String,
    /// What it is tested for.
    pub test: FilterTest,
}

/// What a header is tested for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilterTest {
    /// One of these values; `equals` gives one.
    OneOf(Vec<String>),
    /// A topic pattern.
    Matches(Pattern),
    /// It is there.
    Exists,
}

/// What a Source reads.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceConnector {
    /// Webhooks.
    Http(HttpSource),
    /// A RabbitMQ queue.
    RabbitMq(RabbitMqSource),
    /// Kafka topics.
    Kafka(KafkaSource),
    /// A NATS stream.
    Nats(NatsSource),
}

impl SourceConnector {
    /// `http`, `rabbitmq`, `kafka`, `nats`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Http(_) => "http",
            Self::RabbitMq(_) => "rabbitmq",
            Self::Kafka(_) => "kafka",
            Self::Nats(_) => "nats",
        }
    }
}

/// Webhooks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpSource {
    /// Behind the base path; begins with a slash.
    pub path: String,
    /// Who may post; `None` = anyone.
    pub auth: Option<InboundAuth>,
    /// Requests a minute and process.
    pub requests_per_minute: Option<u32>,
}

/// Where RabbitMQ is and who logs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RabbitMqLogin {
    /// A URL with credentials.
    Url(Reference),
    /// A URL without.
    Parts {
        /// `amqp://` or `amqps://`.
        url: Url,
        /// User.
        username: Option<String>,
        /// Password.
        password: Option<Reference>,
    },
}

/// A RabbitMQ queue.
#[derive(Debug, Clone, PartialEq)]
pub struct RabbitMqSource {
    /// Where.
    pub login: RabbitMqLogin,
    /// TLS files.
    pub tls: Tls,
    /// Queue.
    pub queue_name: String,
    /// Messages that may be unacknowledged.
    pub prefetch_count: u16,
    /// Declares the queue.
    pub declare_queue: bool,
}

/// A Kafka cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaCluster {
    /// Comma separated.
    pub bootstrap_servers: String,
    /// Protection.
    pub security_protocol: SecurityProtocol,
    /// Login, for the SASL protocols.
    pub sasl: Option<Sasl>,
    /// TLS files.
    pub tls: Tls,
}

/// A SASL login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sasl {
    /// `PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512`.
    pub mechanism: String,
    /// User.
    pub username: String,
    /// Password.
    pub password: Reference,
}

/// Kafka topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaSource {
    /// Where.
    pub cluster: KafkaCluster,
    /// Consumer group.
    pub group_id: String,
    /// Topics.
    pub topics: Vec<String>,
    /// Where a partition without a committed offset begins.
    pub auto_offset_reset: OffsetReset,
    /// Records that may be unacknowledged.
    pub max_poll_records: u32,
    /// The record key is an origin of the idempotency key.
    pub idempotency_from_record_key: bool,
    /// What stands in for a missing key.
    pub idempotency_key_fallback: IdempotencyKeyFallback,
}

/// NATS servers and who logs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsServers {
    /// Comma separated.
    pub servers: String,
    /// Login.
    pub login: NatsLogin,
    /// TLS files.
    pub tls: Tls,
}

/// A NATS login.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NatsLogin {
    /// None.
    #[default]
    None,
    /// User and password.
    User {
        /// User.
        username: String,
        /// Password.
        password: Reference,
    },
    /// Token.
    Token(Reference),
}

/// A NATS stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsSource {
    /// Where.
    pub servers: NatsServers,
    /// Stream.
    pub stream: String,
    /// Durable consumer.
    pub durable: String,
    /// Only these subjects.
    pub filter_subject: Option<String>,
    /// Redelivered when not acknowledged for so long.
    pub ack_wait: Duration,
    /// Messages that may be unacknowledged.
    pub batch_size: u32,
    /// What stands in for a missing key.
    pub idempotency_key_fallback: IdempotencyKeyFallback,
}

/// A Destination, with what the Relay that uses it adds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Destination {
    /// Name.
    pub name: String,
    /// Holds its rows.
    pub paused: bool,
    /// Sent with each message.
    pub headers: Vec<(String, String)>,
    /// Reshapes the payload after the route's transform.
    pub transform: Option<Transform>,
    /// Unfinished publishes of the whole Relay.
    pub max_in_flight: u32,
    /// Publishes a second of the whole Relay, and at once.
    pub rate: Option<Rate>,
    /// When a failed row is tried again.
    pub schedule: RetrySchedule,
    /// Holds it after many failures; `None` = off.
    pub breaker: Option<Breaker>,
    /// Where it sends.
    pub connector: DestinationConnector,
}

/// `limits.requestsPerSecond`, `.burst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Publishes a second.
    pub per_second: u32,
    /// Publishes at once.
    pub burst: u32,
}

/// `breaker`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breaker {
    /// Failures in a row that open it.
    pub failures: u32,
    /// Held for so long.
    pub open_for: Duration,
}

/// Where a Destination sends.
#[derive(Debug, Clone, PartialEq)]
pub enum DestinationConnector {
    /// An HTTP endpoint.
    Http(HttpDestination),
    /// A RabbitMQ exchange.
    RabbitMq(RabbitMqDestination),
    /// A Kafka topic.
    Kafka(KafkaDestination),
    /// A NATS subject.
    Nats(NatsDestination),
}

impl DestinationConnector {
    /// `http`, `rabbitmq`, `kafka`, `nats`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Http(_) => "http",
            Self::RabbitMq(_) => "rabbitmq",
            Self::Kafka(_) => "kafka",
            Self::Nats(_) => "nats",
        }
    }

    /// Where it sends, for people: no credentials, no parameters.
    pub fn endpoint(&self) -> String {
        match self {
            Self::Http(http) => {
                let mut url = http.url.clone();
                url.set_query(None);
                url.set_fragment(None);
                url.to_string()
            }
            Self::RabbitMq(rabbit) => match &rabbit.login {
                RabbitMqLogin::Parts { url, .. } => url.to_string(),
                RabbitMqLogin::Url(reference) => reference.to_string(),
            },
            Self::Kafka(kafka) => kafka.cluster.bootstrap_servers.clone(),
            Self::Nats(nats) => nats.servers.servers.clone(),
        }
    }
}

/// An HTTP endpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct HttpDestination {
    /// Where every message is posted to.
    pub url: Url,
    /// Bounds the whole attempt.
    pub timeout: Duration,
    /// Credential that is sent.
    pub auth: Option<OutboundAuth>,
    /// Signature that is sent.
    pub signing: Option<Signing>,
    /// TLS files.
    pub tls: Tls,
    /// Statuses that make a message dead at once.
    pub permanent_statuses: Vec<StatusRule>,
}

/// One of `permanentStatuses`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusRule {
    /// This status, 300 to 599.
    Exactly(u16),
    /// `4xx`: all but 408, 425 and 429.
    ClientErrors,
    /// `5xx`.
    ServerErrors,
}

/// Credential of outgoing requests (contract 10.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutboundAuth {
    /// `bearer`.
    Bearer(Reference),
    /// `basic`.
    Basic {
        /// User.
        username: String,
        /// Password.
        password: Reference,
    },
    /// `header`.
    Header {
        /// Name.
        name: String,
        /// Value.
        value: Reference,
    },
    /// `oauth2`.
    OAuth2 {
        /// Client.
        client_id: String,
        /// Secret of the client.
        client_secret: Reference,
        /// Where tokens are given out.
        token_url: Url,
        /// Scope.
        scope: Option<String>,
        /// Further form fields.
        extra_params: BTreeMap<String, String>,
    },
}

/// Signature of outgoing requests (contract 10.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Signing {
    /// `standardWebhooks`; two secrets give two signatures.
    StandardWebhooks(Accepted),
    /// `hmac`.
    Hmac {
        /// The secret.
        secret: Reference,
        /// How it signs.
        form: Hmac,
    },
}

/// A RabbitMQ exchange.
#[derive(Debug, Clone, PartialEq)]
pub struct RabbitMqDestination {
    /// Where.
    pub login: RabbitMqLogin,
    /// TLS files.
    pub tls: Tls,
    /// Exchange.
    pub exchange: Address,
    /// Kind of the exchange.
    pub exchange_type: ExchangeType,
    /// Declares the exchange.
    pub declare_exchange: bool,
    /// Routing key; a route's wins.
    pub routing_key: Template,
    /// The broker keeps messages on disk.
    pub persistent: bool,
    /// Time until the confirm.
    pub timeout: Duration,
}

/// A Kafka topic.
#[derive(Debug, Clone, PartialEq)]
pub struct KafkaDestination {
    /// Where.
    pub cluster: KafkaCluster,
    /// Topic.
    pub topic: Address,
    /// Record key; a route's routing key wins.
    pub key: Template,
    /// The whole budget of one attempt.
    pub timeout: Duration,
}

/// A NATS subject.
#[derive(Debug, Clone, PartialEq)]
pub struct NatsDestination {
    /// Where.
    pub servers: NatsServers,
    /// Subject.
    pub subject: Address,
    /// Waits for the acknowledgement of JetStream.
    pub jet_stream: bool,
    /// Time until the acknowledgement.
    pub timeout: Duration,
}

/// A reference with the field that holds it, for whoever must make its value available (mounts, conditions).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedReference {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object.
    pub name: String,
    /// Field.
    pub path: String,
    /// What it refers to.
    pub reference: Reference,
}
