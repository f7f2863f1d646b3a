//! One broker for all tests of this binary, a virtual host per test, a way past the trouble and a way through a proxy.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    message::BasicGetMessage,
    options::{
        BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
        QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
    },
    types::{AMQPValue, FieldTable},
};
use queuebox_conformance::destination::{Arrived, delivery};
use queuebox_core::{
    Uuid,
    ports::Delivery,
    template::{Address, Template, Vocabulary},
};
use queuebox_rabbitmq::{
    BrokerUrl, ConnectionConfig, DeliveryMode, DestinationConfig, ExchangeType, Secret, SourceConfig, TlsConfig,
};
use queuebox_testkit::{RabbitMq, eventually, eventually_ok, private_rabbitmq_with, unique};
use serde_json::{Value, json};
use tokio::{sync::OnceCell, time::Instant};

/// `max_message_size` of the broker of this binary.
pub const MESSAGE_BYTES_MAX: usize = 200_000;

/// The broker of this binary; tests that stop one have their own.
pub async fn broker() -> RabbitMq {
    static BROKER: OnceCell<RabbitMq> = OnceCell::const_new();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    let start = || async { private_rabbitmq_with(&format!("max_message_size = {MESSAGE_BYTES_MAX}\n")).await };
    BROKER.get_or_init(start).await.clone()
}

/// A connection to `url` with its credentials inside.
pub fn connection(url: &str) -> ConnectionConfig {
    ConnectionConfig {
        url: BrokerUrl::Secret(Secret::fixed(url)),
        username: None,
        password: None,
        tls: TlsConfig::default(),
        name: "queuebox test".to_owned(),
    }
}

/// A destination to exchange `ex` that is declared, with the topic as routing key.
pub fn destination(url: &str) -> DestinationConfig {
    DestinationConfig {
        connection: connection(url),
        exchange: Address::Template(Template::parse("ex", Vocabulary::Address).unwrap()),
        exchange_type: ExchangeType::Topic,
        declare_exchange: true,
        routing_key: Template::parse("{{ topic }}", Vocabulary::RoutingKey).unwrap(),
        delivery_mode: DeliveryMode::Persistent,
        timeout: Duration::from_secs(10),
        headers: Vec::new(),
    }
}

/// A source from a queue that must exist.
pub fn source(url: &str, queue: &str) -> SourceConfig {
    SourceConfig { connection: connection(url), queue: queue.to_owned(), prefetch: 10, declare_queue: false }
}

/// A row with a new id.
pub fn row(n: usize, topic: &str) -> Delivery {
    Delivery { topic: topic.to_owned(), ..delivery(n) }
}

/// A client past the trouble.
pub struct Client {
    /// Its channel, in confirm mode.
    pub channel: Channel,
    connection: Connection,
    got: Mutex<Vec<Arrived>>,
}

impl Client {
    pub async fn connect(url: &str) -> Self {
        // A virtual host takes connections some time after it was made.
        let connection = eventually_ok("a connection", Duration::from_secs(60), || {
            Connection::connect(url, ConnectionProperties::default())
        })
        .await;
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        Self { channel, connection, got: Mutex::default() }
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    pub async fn declare_exchange(&self, exchange: &str) {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let kind = lapin::ExchangeKind::Topic;
        self.channel.exchange_declare(exchange.into(), kind, options, FieldTable::default()).await.unwrap();
    }

    pub async fn declare_queue(&self, queue: &str) {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(queue.into(), options, FieldTable::default()).await.unwrap();
    }

    pub async fn bind(&self, queue: &str, exchange: &str, pattern: &str) {
        let options = QueueBindOptions::default();
        let table = FieldTable::default();
        self.channel.queue_bind(queue.into(), exchange.into(), pattern.into(), options, table).await.unwrap();
    }

    pub async fn delete_queue(&self, queue: &str) {
        self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
    }

    /// To a queue, confirmed.
    pub async fn publish(&self, queue: &str, body: &[u8], properties: BasicProperties) {
        let options = BasicPublishOptions::default();
        let confirm = self.channel.basic_publish("".into(), queue.into(), options, body, properties).await.unwrap();
        assert!(confirm.await.unwrap().is_ack());
    }

    /// Everything that the queue holds or has held, as far as this client took it.
    pub async fn take_all(&self, queue: &str) -> Vec<Arrived> {
        while let Some(message) = self.channel.basic_get(queue.into(), BasicGetOptions::default()).await.unwrap() {
            message.delivery.ack(BasicAckOptions::default()).await.unwrap();
            self.got.lock().unwrap().push(arrived(&message));
        }
        self.got.lock().unwrap().clone()
    }
}

fn arrived(message: &BasicGetMessage) -> Arrived {
    let properties = &message.delivery.properties;
    let text = |value: &AMQPValue| match value {
        AMQPValue::LongString(text) => String::from_utf8(text.as_bytes().to_vec()).unwrap(),
        AMQPValue::LongInt(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let mut headers: HashMap<String, String> = properties
        .headers()
        .iter()
        .flat_map(|table| table.inner())
        .map(|(name, value)| (name.to_string().to_lowercase(), text(value)))
        .collect();
    for (name, value) in [("content-type", properties.content_type()), ("message-id", properties.message_id())] {
        if let Some(value) = value {
            headers.insert(name.to_owned(), value.to_string());
        }
    }
    if let Some(mode) = properties.delivery_mode() {
        headers.insert("delivery-mode".to_owned(), mode.to_string());
    }
    Arrived {
        id: properties.message_id().as_ref().and_then(|id| Uuid::parse_str(id.as_str()).ok()),
        key: Some(message.delivery.routing_key.to_string()),
        body: message.delivery.data.clone(),
        headers,
    }
}

/// Messages of a queue that are not acknowledged. The broker's figures are up to a second old, so they are believed when
/// they have stood still for longer.
pub async fn outstanding(broker: &RabbitMq, vhost: &str, queue: &str) -> u64 {
    let mut last: Option<(u64, Instant)> = None;
    loop {
        let now = queue_figures(broker, vhost, queue).await["messages"].as_u64();
        match (now, last) {
            (Some(count), Some((before, since))) if count == before => {
                if since.elapsed() > Duration::from_millis(2_200) {
                    return count;
                }
            }
            (Some(count), _) => last = Some((count, Instant::now())),
            (None, _) => {}
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// What the broker says about a queue: the plain totals, since the sampled statistics are older.
pub async fn queue_figures(broker: &RabbitMq, vhost: &str, queue: &str) -> Value {
    let path = format!("/queues/{vhost}?disable_stats=true&enable_queue_totals=true");
    eventually("the figures of a queue", Duration::from_secs(30), || async {
        let queues = broker.try_api("GET", &path, None).await.ok()?;
        queues.as_array()?.iter().find(|found| found["name"] == queue).cloned()
    })
    .await
}

/// A fresh virtual host. The handle's HTTP client keeps connections that end with the runtime of the test that made them,
/// so a call may have to be repeated.
pub async fn fresh_vhost(broker: &RabbitMq) -> String {
    let name = unique("qb");
    let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
    for (path, body) in [(format!("/vhosts/{name}"), None), (format!("/permissions/{name}/guest"), Some(all))] {
        eventually_ok("a virtual host", Duration::from_secs(10), || broker.try_api("PUT", &path, body.clone())).await;
    }
    name
}
