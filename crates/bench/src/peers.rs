//! The servers of a run: those that were named, and those that it starts itself.
//!
//! Starting servers is what the tests' kit does, and it does it every day; a second starter would be a second set of faults. So the kit is
//! used, behind the feature `servers`, which the container image leaves out: there the servers must be named.

use std::time::Duration;

use anyhow::{Context, bail};
use async_nats::jetstream;
use lapin::{
    ConnectionProperties, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
};

/// Servers that are there already.
#[derive(Debug, Clone, Default)]
pub struct Given {
    /// `postgres://…`, of a role that may create databases.
    pub database_url: Option<String>,
    /// `amqp://…` with credentials.
    pub rabbitmq_url: Option<String>,
    /// `host:port,…`.
    pub kafka_bootstrap: Option<String>,
    /// `nats://…`.
    pub nats_url: Option<String>,
}

/// Servers of a run. A started one ends with this value.
pub struct Peers {
    given: Given,
    #[cfg(feature = "servers")]
    started: Started,
}

#[cfg(feature = "servers")]
#[derive(Default)]
struct Started {
    postgres: Option<queuebox_testkit::Postgres>,
    rabbitmq: Option<queuebox_testkit::RabbitMq>,
    kafka: Option<queuebox_testkit::Kafka>,
    nats: Option<queuebox_testkit::Nats>,
}

/// Commits are flushed, pages are protected, and nothing cleans up in the middle of a rung that did not make the dirt.
#[cfg(feature = "servers")]
const POSTGRES: [(&str, &str); 6] = [
    ("fsync", "on"),
    ("full_page_writes", "on"),
    ("shared_buffers", "1GB"),
    ("max_wal_size", "8GB"),
    ("checkpoint_timeout", "15min"),
    ("autovacuum_naptime", "30s"),
];

/// One method: the named server, else a started one, else an error that names the option.
macro_rules! server {
    ($name:ident, $start:expr, $address:expr, $option:literal, $given:ident) => {
        /// Its address.
        ///
        /// # Errors
        /// It is not named and cannot be started.
        pub async fn $name(&mut self) -> anyhow::Result<String> {
            if let Some(given) = &self.given.$given {
                return Ok(given.clone());
            }
            #[cfg(feature = "servers")]
            {
                if self.started.$name.is_none() {
                    self.started.$name = Some($start.await?);
                }
                let Some(server) = &self.started.$name else { bail!("did not start") };
                #[allow(clippy::redundant_closure_call)]
                return Ok($address(server));
            }
            #[cfg(not(feature = "servers"))]
            bail!(concat!("name a server with ", $option, ": this build starts none by itself"));
        }
    };
}

impl Peers {
    /// Nothing is started yet.
    pub fn new(given: Given) -> Self {
        Self {
            given,
            #[cfg(feature = "servers")]
            started: Started::default(),
        }
    }

    server!(
        postgres,
        queuebox_testkit::try_private_postgres_with(&POSTGRES),
        queuebox_testkit::Postgres::url,
        "--database-url",
        database_url
    );
    server!(
        rabbitmq,
        queuebox_testkit::try_private_rabbitmq_with(""),
        queuebox_testkit::RabbitMq::url,
        "--rabbitmq-url",
        rabbitmq_url
    );
    server!(
        kafka,
        queuebox_testkit::try_private_kafka_with(""),
        queuebox_testkit::Kafka::bootstrap,
        "--kafka-bootstrap",
        kafka_bootstrap
    );
    server!(nats, queuebox_testkit::try_private_nats_with(""), queuebox_testkit::Nats::url, "--nats-url", nats_url);
}

/// A name that no earlier run has used.
pub fn fresh_name() -> String {
    format!("queuebox-bench-{}", &uuid::Uuid::new_v4().simple().to_string()[..8])
}

/// A stream with file storage for the subject `name`.
pub async fn nats_stream(url: &str, name: &str) -> anyhow::Result<()> {
    let client = async_nats::connect(url).await.context("cannot reach NATS")?;
    let config = jetstream::stream::Config {
        name: name.to_owned(),
        subjects: vec![name.to_owned()],
        storage: jetstream::stream::StorageType::File,
        ..Default::default()
    };
    jetstream::new(client).create_stream(config).await.context("cannot make a stream")?;
    Ok(())
}

/// Removes a stream, so that a given server is left as it was.
pub async fn drop_nats_stream(url: &str, name: &str) {
    if let Ok(client) = async_nats::connect(url).await {
        let _ = jetstream::new(client).delete_stream(name).await;
    }
}

/// A topic with four partitions.
pub async fn kafka_topic(bootstrap: &str, name: &str) -> anyhow::Result<()> {
    let admin = kafka_admin(bootstrap)?;
    let topic = NewTopic::new(name, 4, TopicReplication::Fixed(1));
    let made = admin.create_topics([&topic], &AdminOptions::new()).await.context("cannot reach Kafka")?;
    for result in made {
        if let Err((_, code)) = result {
            bail!("cannot make a topic: {code}");
        }
    }
    Ok(())
}

/// Removes a topic.
pub async fn drop_kafka_topic(bootstrap: &str, name: &str) {
    if let Ok(admin) = kafka_admin(bootstrap) {
        let _ = admin.delete_topics(&[name], &AdminOptions::new()).await;
    }
}

fn kafka_admin(bootstrap: &str) -> anyhow::Result<AdminClient<rdkafka::client::DefaultClientContext>> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", bootstrap).set("socket.timeout.ms", "20000");
    config.create().context("cannot make a Kafka client")
}

/// A quorum queue bound to a durable topic exchange, both of this name. RabbitMQ's own advice for what must survive is this kind;
/// a classic durable queue confirms a third fewer messages per second on the same disk (docs/performance.md).
pub async fn rabbitmq_queue(url: &str, name: &str) -> anyhow::Result<()> {
    let connecting = lapin::Connection::connect(url, ConnectionProperties::default());
    let connection =
        tokio::time::timeout(Duration::from_secs(20), connecting).await?.context("cannot reach RabbitMQ")?;
    let channel = connection.create_channel().await?;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(name.into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    channel.queue_declare(name.into(), durable, arguments).await?;
    channel
        .queue_bind(name.into(), name.into(), "#".into(), QueueBindOptions::default(), FieldTable::default())
        .await?;
    connection.close(200, "done".into()).await?;
    Ok(())
}

/// Removes both.
pub async fn drop_rabbitmq_queue(url: &str, name: &str) {
    let Ok(connection) = lapin::Connection::connect(url, ConnectionProperties::default()).await else { return };
    if let Ok(channel) = connection.create_channel().await {
        let _ = channel.queue_delete(name.into(), Default::default()).await;
        let _ = channel.exchange_delete(name.into(), Default::default()).await;
    }
    let _ = connection.close(200, "done".into()).await;
}
