//! Brokers as scenarios see them: one view of RabbitMQ, Kafka and NATS JetStream, past the program and past all trouble.
//!
//! A [`Broker`] is a server with what keeps a test apart from others on it; a [`Line`] is one queue, topic or stream of it, which
//! can be a source, a destination, or both at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    time::Duration,
};

use async_nats::jetstream;
use lapin::{
    BasicProperties, Connection, ConnectionProperties,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::{AMQPValue, FieldTable},
};
use queuebox_testkit::{self as testkit, Kafka, KafkaProxy, Nats, Proxy, RabbitMq, eventually, eventually_ok, unique};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    message::{Header, Headers, Message as _, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use serde_json::{Value, json};

use crate::support::{PATIENCE, Worker};

/// Bound of one step of a direct client. A step that may meet a dead broker is repeated by its caller.
const STEP: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BrokerKind {
    RabbitMq,
    Kafka,
    Nats,
}

pub const BROKERS: [BrokerKind; 3] = [BrokerKind::RabbitMq, BrokerKind::Kafka, BrokerKind::Nats];

/// Makes of `async fn name(kind: BrokerKind)` a module `name` with one test per broker.
macro_rules! on_every_broker {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use crate::brokers::BrokerKind;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_rabbitmq() {
                super::$name(BrokerKind::RabbitMq).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_kafka() {
                super::$name(BrokerKind::Kafka).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_nats() {
                super::$name(BrokerKind::Nats).await;
            }
        }
    )+};
}
pub(crate) use on_every_broker;

#[derive(Debug, Clone)]
enum Server {
    RabbitMq { server: RabbitMq, vhost: String },
    Kafka(Kafka),
    Nats(Nats),
}

/// A server, and where the program finds it.
#[derive(Debug, Clone)]
pub struct Broker {
    server: Server,
    /// `url`, `bootstrapServers` or `servers` of manifests.
    pub address: String,
}

/// A TCP proxy in front of a broker.
#[derive(Debug)]
pub enum Way {
    Plain(Proxy),
    Kafka(KafkaProxy),
}

impl Deref for Way {
    type Target = Proxy;

    fn deref(&self) -> &Proxy {
        match self {
            Way::Plain(proxy) => proxy,
            Way::Kafka(proxy) => proxy,
        }
    }
}

impl Broker {
    /// The server that all tests share.
    pub async fn shared(kind: BrokerKind) -> Broker {
        match kind {
            BrokerKind::RabbitMq => Broker::rabbitmq(testkit::rabbitmq().await).await,
            BrokerKind::Kafka => Broker::kafka(testkit::kafka().await),
            BrokerKind::Nats => Broker::nats(testkit::nats().await),
        }
    }

    /// A server of the test's own, which it may stop.
    pub async fn private(kind: BrokerKind) -> Broker {
        match kind {
            BrokerKind::RabbitMq => Broker::rabbitmq(testkit::private_rabbitmq().await).await,
            BrokerKind::Kafka => Broker::kafka(testkit::private_kafka().await),
            BrokerKind::Nats => Broker::nats(testkit::private_nats().await),
        }
    }

    /// Around a RabbitMQ, in a virtual host of its own.
    pub async fn rabbitmq(server: RabbitMq) -> Broker {
        let vhost = eventually_ok("a virtual host", PATIENCE, || async {
            let name = unique("qb");
            let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
            server.try_api("PUT", &format!("/vhosts/{name}"), None).await.map_err(|error| error.to_string())?;
            let permissions = format!("/permissions/{name}/guest");
            server.try_api("PUT", &permissions, Some(all)).await.map(|_| name).map_err(|error| error.to_string())
        })
        .await;
        let address = format!("amqp://127.0.0.1:{}/{vhost}", server.port());
        let broker = Broker { server: Server::RabbitMq { server, vhost }, address };
        // A virtual host takes connections some time after it was made.
        eventually_ok("a connection", PATIENCE, || broker.amqp()).await;
        broker
    }

    pub fn kafka(server: Kafka) -> Broker {
        Broker { address: server.bootstrap(), server: Server::Kafka(server) }
    }

    pub fn nats(server: Nats) -> Broker {
        Broker { address: server.url(), server: Server::Nats(server) }
    }

    pub fn kind(&self) -> BrokerKind {
        match self.server {
            Server::RabbitMq { .. } => BrokerKind::RabbitMq,
            Server::Kafka(_) => BrokerKind::Kafka,
            Server::Nats(_) => BrokerKind::Nats,
        }
    }

    /// The same broker for the program behind a proxy; clients of the test go on past it.
    pub async fn behind_a_proxy(&self) -> (Broker, Way) {
        match &self.server {
            Server::RabbitMq { server, vhost } => {
                let proxy = Proxy::to(server.port()).await;
                let address = format!("amqp://127.0.0.1:{}/{vhost}", proxy.port());
                (Broker { address, ..self.clone() }, Way::Plain(proxy))
            }
            Server::Kafka(server) => {
                let proxy = server.proxy().await;
                (Broker { address: proxy.bootstrap(), ..self.clone() }, Way::Kafka(proxy))
            }
            Server::Nats(server) => {
                let proxy = Proxy::to(server.port()).await;
                (Broker { address: format!("nats://127.0.0.1:{}", proxy.port()), ..self.clone() }, Way::Plain(proxy))
            }
        }
    }

    pub async fn kill9(&self) {
        match &self.server {
            Server::RabbitMq { server, .. } => server.kill9().await,
            Server::Kafka(server) => server.kill9().await,
            Server::Nats(server) => server.kill9().await,
        }
    }

    pub async fn start(&self) {
        match &self.server {
            Server::RabbitMq { server, .. } => server.start().await,
            Server::Kafka(server) => server.start().await,
            Server::Nats(server) => server.start().await,
        }
    }

    pub async fn pause(&self) {
        match &self.server {
            Server::RabbitMq { server, .. } => server.pause().await,
            Server::Kafka(server) => server.pause().await,
            Server::Nats(server) => server.pause().await,
        }
    }

    pub async fn cont(&self) {
        match &self.server {
            Server::RabbitMq { server, .. } => server.cont().await,
            Server::Kafka(server) => server.cont().await,
            Server::Nats(server) => server.cont().await,
        }
    }

    /// Calls RabbitMQ's management API; `{vhost}` in the path is that of the test.
    pub async fn api(&self, method: &str, path: &str, body: Option<Value>) -> Value {
        eventually_ok(path, PATIENCE, || self.try_api(method, path, body.clone())).await
    }

    async fn try_api(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value, String> {
        let Server::RabbitMq { server, vhost } = &self.server else { panic!("only RabbitMQ has this") };
        let path = path.replace("{vhost}", vhost);
        server.try_api(method, &path, body).await.map_err(|error| format!("{error:#}"))
    }

    async fn amqp(&self) -> Result<Connection, String> {
        let Server::RabbitMq { server, vhost } = &self.server else { panic!("only RabbitMQ has this") };
        let url = server.url_of(vhost);
        let connecting = Connection::connect(&url, ConnectionProperties::default());
        let connected = tokio::time::timeout(STEP, connecting).await.map_err(|error| error.to_string())?;
        connected.map_err(|error| error.to_string())
    }

    fn kafka_config(&self) -> ClientConfig {
        let Server::Kafka(server) = &self.server else { panic!("only Kafka has this") };
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", server.bootstrap()).set("topic.metadata.refresh.interval.ms", "1000");
        config.set("log_level", "0");
        config
    }

    async fn jetstream(&self) -> Result<jetstream::Context, String> {
        let Server::Nats(server) = &self.server else { panic!("only NATS has this") };
        let connecting = async_nats::connect(server.url());
        let connected = tokio::time::timeout(STEP, connecting).await.map_err(|error| error.to_string())?;
        connected.map(jetstream::new).map_err(|error| error.to_string())
    }

    /// [`Broker::jetstream`] of a server that is there.
    pub async fn streams(&self) -> jetstream::Context {
        eventually_ok("NATS", PATIENCE, || self.jetstream()).await
    }

    /// Makes a new queue (with an exchange of its name), topic of one partition, or stream.
    pub async fn line(&self) -> Line {
        self.line_of(1).await
    }

    /// [`Broker::line`]; a topic has so many partitions.
    pub async fn line_of(&self, partitions: i32) -> Line {
        self.line_limited(partitions, None).await
    }

    /// A line whose name is given; it may be there already.
    pub async fn line_named(&self, name: &str) -> Line {
        let line = Line { broker: self.clone(), name: name.to_owned(), partitions: 1, bytes_max: None };
        line.make().await;
        line
    }

    /// [`Broker::line_of`] that takes no larger messages (Kafka; elsewhere the limit is the server's).
    pub async fn line_limited(&self, partitions: i32, bytes_max: Option<usize>) -> Line {
        let line = Line { broker: self.clone(), name: unique("qb"), partitions, bytes_max };
        line.make().await;
        line
    }
}

/// One queue, topic or stream.
#[derive(Debug, Clone)]
pub struct Line {
    pub broker: Broker,
    pub name: String,
    partitions: i32,
    bytes_max: Option<usize>,
}

/// A file with the password of RabbitMQ's user `guest`, one for all tests. It comes into being whole.
fn guest_password() -> std::path::PathBuf {
    let path = testkit::target_dir().join("guest-password");
    let part = path.with_file_name(unique("guest-password"));
    std::fs::write(&part, "guest\n").unwrap();
    std::fs::rename(part, &path).unwrap();
    path
}

/// Name of the consumer group and the durable of sources on a [`Line`].
const READER: &str = "queuebox";

impl Line {
    /// The same line, reached by the program through another way.
    pub fn through(&self, broker: &Broker) -> Line {
        Line { broker: broker.clone(), ..self.clone() }
    }

    fn block(&self, mut more: Value) -> Value {
        let address = &self.broker.address;
        let (kind, login) = match self.broker.kind() {
            BrokerKind::RabbitMq => {
                let password = json!({ "file": guest_password() });
                ("rabbitmq", json!({ "url": address, "username": "guest", "passwordFrom": password }))
            }
            BrokerKind::Kafka => ("kafka", json!({ "bootstrapServers": address })),
            BrokerKind::Nats => ("nats", json!({ "servers": address })),
        };
        more.as_object_mut().unwrap().extend(login.as_object().unwrap().clone());
        json!({ kind: more })
    }

    /// For `World::source`.
    pub fn as_source(&self) -> Value {
        self.block(match self.broker.kind() {
            BrokerKind::RabbitMq => json!({ "queueName": self.name, "prefetchCount": 100 }),
            BrokerKind::Kafka => json!({ "topics": [self.name], "groupId": self.group() }),
            BrokerKind::Nats => json!({ "stream": self.name, "durable": READER }),
        })
    }

    /// For `World::destination`: key or topic of the row as routing key, record key and last part of the subject.
    pub fn as_destination(&self) -> Value {
        self.block(match self.broker.kind() {
            BrokerKind::RabbitMq => json!({ "exchange": self.name }),
            BrokerKind::Kafka => json!({ "topic": self.name }),
            BrokerKind::Nats => json!({ "subject": format!("{}.{{{{ topic }}}}", self.name) }),
        })
    }

    fn group(&self) -> String {
        format!("{READER}-{}", self.name)
    }

    /// Makes the object and waits until it can be used.
    pub async fn make(&self) {
        eventually_ok("the object is made", PATIENCE, || self.try_make()).await;
    }

    async fn try_make(&self) -> Result<(), String> {
        let name = &self.name;
        match self.broker.kind() {
            BrokerKind::RabbitMq => {
                let exchange = json!({ "type": "topic", "durable": true });
                let put =
                    |path: String, body: Value| async move { self.broker.try_api("PUT", &path, Some(body)).await };
                put(format!("/exchanges/{{vhost}}/{name}"), exchange).await?;
                put(format!("/queues/{{vhost}}/{name}"), json!({ "durable": true })).await?;
                self.try_bind("#").await
            }
            BrokerKind::Kafka => {
                let admin: AdminClient<DefaultClientContext> = self.broker.kafka_config().create().unwrap();
                let limit = self.bytes_max.map(|bytes| bytes.to_string());
                let mut topic = NewTopic::new(name, self.partitions, TopicReplication::Fixed(1));
                if let Some(limit) = &limit {
                    topic = topic.set("max.message.bytes", limit);
                }
                let made = admin.create_topics(&[topic], &AdminOptions::new()).await.map_err(|e| e.to_string())?;
                match made.into_iter().next().unwrap() {
                    Ok(_) | Err((_, rdkafka::types::RDKafkaErrorCode::TopicAlreadyExists)) => {}
                    Err((_, code)) => return Err(code.to_string()),
                }
                let led = self.led_partitions().await;
                if led == self.partitions { Ok(()) } else { Err(format!("{led} partitions are led")) }
            }
            BrokerKind::Nats => {
                let subjects = vec![format!("{name}.>")];
                let config = jetstream::stream::Config { name: name.clone(), subjects, ..Default::default() };
                self.broker.jetstream().await?.create_stream(config).await.map(drop).map_err(|e| e.to_string())
            }
        }
    }

    /// Binds the queue to its exchange (RabbitMQ).
    pub async fn bind(&self, pattern: &str) {
        eventually_ok("the binding", PATIENCE, || self.try_bind(pattern)).await;
    }

    async fn try_bind(&self, pattern: &str) -> Result<(), String> {
        let path = format!("/bindings/{{vhost}}/e/{0}/q/{0}", self.name);
        self.broker.try_api("POST", &path, Some(json!({ "routing_key": pattern }))).await.map(drop)
    }

    /// Takes a binding of the queue away (RabbitMQ).
    pub async fn unbind(&self, pattern: &str) {
        let pattern = pattern.replace('#', "%23");
        self.broker.api("DELETE", &format!("/bindings/{{vhost}}/e/{0}/q/{0}/{pattern}", self.name), None).await;
    }

    async fn led_partitions(&self) -> i32 {
        let (config, name) = (self.broker.kafka_config(), self.name.clone());
        blocking(move || {
            let consumer: BaseConsumer = config.create().unwrap();
            let Ok(metadata) = consumer.fetch_metadata(Some(&name), STEP) else { return -1 };
            let led = metadata.topics()[0].partitions().iter().filter(|partition| partition.leader() >= 0).count();
            i32::try_from(led).unwrap()
        })
        .await
    }

    /// Removes the object with all that it holds; exchanges stay.
    pub async fn remove(&self) {
        match self.broker.kind() {
            BrokerKind::RabbitMq => {
                drop(self.broker.api("DELETE", &format!("/queues/{{vhost}}/{}", self.name), None).await)
            }
            BrokerKind::Kafka => {
                let admin: AdminClient<DefaultClientContext> = self.broker.kafka_config().create().unwrap();
                admin.delete_topics(&[&self.name], &AdminOptions::new()).await.unwrap();
                eventually("the topic is gone", PATIENCE, || async {
                    (self.led_partitions().await == 0).then_some(())
                })
                .await;
            }
            BrokerKind::Nats => {
                self.broker.streams().await.delete_stream(&self.name).await.unwrap();
            }
        }
    }

    /// Puts messages in, in order; all are with the broker when it returns.
    pub async fn publish(&self, messages: &[Message]) {
        self.try_publish(messages).await.unwrap();
    }

    /// [`Line::publish`], which may leave a part of the messages behind when the broker is in trouble.
    pub async fn try_publish(&self, messages: &[Message]) -> Result<(), String> {
        let publishing = async {
            match self.broker.kind() {
                BrokerKind::RabbitMq => self.publish_rabbitmq(messages).await,
                BrokerKind::Kafka => self.publish_kafka(messages).await,
                BrokerKind::Nats => self.publish_nats(messages).await,
            }
        };
        tokio::time::timeout(2 * STEP, publishing).await.map_err(|_| "the broker says nothing".to_owned())?
    }

    async fn publish_rabbitmq(&self, messages: &[Message]) -> Result<(), String> {
        let connection = self.broker.amqp().await?;
        let text = |error: lapin::Error| error.to_string();
        let channel = connection.create_channel().await.map_err(text)?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(text)?;
        let mut confirms = Vec::new();
        for message in messages {
            let headers: FieldTable = message
                .headers
                .iter()
                .map(|(name, value)| ((*name).into(), AMQPValue::LongString(value.as_str().into())))
                .collect::<BTreeMap<_, _>>()
                .into();
            let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
            if let Some(id) = &message.id {
                properties = properties.with_message_id(id.as_str().into());
            }
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let body = message.body.as_slice();
            let sent = channel.basic_publish("".into(), self.name.as_str().into(), options, body, properties).await;
            confirms.push(sent.map_err(text)?);
        }
        for confirm in confirms {
            match confirm.await.map_err(text)? {
                lapin::Confirmation::Ack(None) => {}
                other => return Err(format!("{other:?}")),
            }
        }
        let _ = connection.close(200, "done".into()).await;
        Ok(())
    }

    async fn publish_kafka(&self, messages: &[Message]) -> Result<(), String> {
        let mut config = self.broker.kafka_config();
        config.set("linger.ms", "1").set("message.timeout.ms", STEP.as_millis().to_string());
        let producer: FutureProducer = config.create().unwrap();
        let mut sent = Vec::new();
        for message in messages {
            let headers = message.headers.iter().fold(OwnedHeaders::new(), |headers, (name, value)| {
                headers.insert(Header { key: name, value: Some(value.as_bytes()) })
            });
            let mut record = FutureRecord::<str, [u8]>::to(&self.name).payload(&message.body).headers(headers);
            if let Some(key) = &message.key {
                record = record.key(key);
            }
            sent.push(producer.send_result(record).map_err(|(error, _)| error.to_string())?);
        }
        for outcome in sent {
            outcome.await.map_err(|error| error.to_string())?.map_err(|(error, _)| error.to_string())?;
        }
        Ok(())
    }

    async fn publish_nats(&self, messages: &[Message]) -> Result<(), String> {
        let context = self.broker.jetstream().await?;
        let mut sent = Vec::new();
        for message in messages {
            let mut headers = async_nats::HeaderMap::new();
            for (name, value) in &message.headers {
                headers.append(*name, value.as_str());
            }
            if let Some(id) = &message.id {
                headers.append("Nats-Msg-Id", id.as_str());
            }
            let subject = format!("{}.in", self.name);
            let body = message.body.clone().into();
            sent.push(context.publish_with_headers(subject, headers, body).await.map_err(|error| error.to_string())?);
        }
        for acknowledged in sent {
            acknowledged.await.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Messages of a source's line that are not acknowledged: those that wait and those that are handed out.
    pub async fn outstanding(&self) -> i64 {
        eventually_ok("what is not acknowledged", PATIENCE, || self.try_outstanding()).await
    }

    async fn try_outstanding(&self) -> Result<i64, String> {
        match self.broker.kind() {
            BrokerKind::RabbitMq => {
                let path = "/queues/{vhost}?disable_stats=true&enable_queue_totals=true";
                let queues = self.broker.try_api("GET", path, None).await?;
                let found = queues.as_array().unwrap().iter().find(|queue| queue["name"] == self.name.as_str());
                found.and_then(|queue| queue["messages"].as_i64()).ok_or_else(|| "no figures".to_owned())
            }
            BrokerKind::Kafka => {
                let (mut config, line) = (self.broker.kafka_config(), self.clone());
                config.set("group.id", self.group());
                blocking(move || {
                    let consumer: BaseConsumer = config.create().unwrap();
                    let mut asked = TopicPartitionList::new();
                    asked.add_partition_range(&line.name, 0, line.partitions - 1);
                    let committed = consumer.committed_offsets(asked, STEP).map_err(|error| error.to_string())?;
                    let mut lag = 0;
                    for element in committed.elements() {
                        let (low, high) = consumer
                            .fetch_watermarks(&line.name, element.partition(), STEP)
                            .map_err(|error| error.to_string())?;
                        lag += high - if let Offset::Offset(offset) = element.offset() { offset } else { low };
                    }
                    Ok(lag)
                })
                .await
            }
            BrokerKind::Nats => {
                let stream = self.broker.jetstream().await?.get_stream(&self.name).await.map_err(|e| e.to_string())?;
                Ok(match stream.consumer_info(READER).await {
                    Ok(info) => i64::try_from(info.num_pending).unwrap() + i64::try_from(info.num_ack_pending).unwrap(),
                    Err(_) => i64::try_from(stream.cached_info().state.messages).unwrap(),
                })
            }
        }
    }

    /// Waits until the broker has every acknowledgement.
    pub async fn all_acknowledged(&self) {
        eventually("everything acknowledged", PATIENCE, || async { (self.outstanding().await == 0).then_some(()) })
            .await;
    }

    /// All that the line of a destination holds.
    pub async fn arrived(&self) -> Vec<Arrived> {
        eventually_ok("what the line holds", PATIENCE, || self.try_arrived()).await
    }

    async fn try_arrived(&self) -> Result<Vec<Arrived>, String> {
        match self.broker.kind() {
            BrokerKind::RabbitMq => {
                let path = format!("/queues/{{vhost}}/{}/get", self.name);
                let all = json!({ "count": 100_000, "ackmode": "ack_requeue_true", "encoding": "auto" });
                let got = self.broker.try_api("POST", &path, Some(all)).await?;
                Ok(got.as_array().unwrap().iter().map(Arrived::of_rabbitmq).collect())
            }
            BrokerKind::Kafka => {
                let (mut config, line) = (self.broker.kafka_config(), self.clone());
                config.set("group.id", "reader").set("enable.auto.commit", "false");
                blocking(move || read_topic(&config.create().unwrap(), &line)).await
            }
            BrokerKind::Nats => {
                let stream = self.broker.jetstream().await?.get_stream(&self.name).await.map_err(|e| e.to_string())?;
                let state = stream.cached_info().state.clone();
                let mut messages = Vec::new();
                for sequence in state.first_sequence..=state.last_sequence {
                    if state.messages > 0 {
                        let raw = stream.get_raw_message(sequence).await.map_err(|error| error.to_string())?;
                        messages.push(Arrived::of_nats(&raw));
                    }
                }
                Ok(messages)
            }
        }
    }

    /// Waits until the line of a destination holds messages that satisfy `enough`, and returns them.
    pub async fn wait_arrived(&self, what: &str, enough: impl Fn(&[Arrived]) -> bool) -> Vec<Arrived> {
        eventually(what, PATIENCE, || async {
            let arrived = self.arrived().await;
            enough(&arrived).then_some(arrived)
        })
        .await
    }
}

fn read_topic(consumer: &BaseConsumer, line: &Line) -> Result<Vec<Arrived>, String> {
    let mut arrived = Vec::new();
    for partition in 0..line.partitions {
        let (low, high) = consumer.fetch_watermarks(&line.name, partition, STEP).map_err(|error| error.to_string())?;
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(&line.name, partition, Offset::Offset(low)).unwrap();
        consumer.assign(&from).map_err(|error| error.to_string())?;
        let mut next = low;
        while next < high {
            let record = consumer.poll(STEP).ok_or("records are missing")?.map_err(|error| error.to_string())?;
            next = record.offset() + 1;
            arrived.push(Arrived::of_kafka(&record));
        }
    }
    Ok(arrived)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// A message for a source.
#[derive(Debug, Clone, Default)]
pub struct Message {
    pub body: Vec<u8>,
    /// Record key (Kafka).
    pub key: Option<String>,
    /// `message_id` (RabbitMQ), `Nats-Msg-Id` (NATS).
    pub id: Option<String>,
    pub headers: Vec<(&'static str, String)>,
}

impl Message {
    pub fn new(body: impl Into<Vec<u8>>) -> Message {
        Message { body: body.into(), ..Message::default() }
    }

    /// Bodies `{"id":"<n>"}`.
    pub fn numbered(range: std::ops::Range<usize>) -> Vec<Message> {
        range.map(|n| Message::new(json!({ "id": n.to_string() }).to_string())).collect()
    }

    pub fn header(mut self, name: &'static str, value: &str) -> Message {
        self.headers.push((name, value.to_owned()));
        self
    }
}

/// A message that a destination sent.
#[derive(Debug, Clone)]
pub struct Arrived {
    pub body: Vec<u8>,
    /// Routing key, record key or subject.
    pub key: Option<String>,
    /// By name in lower case; RabbitMQ's properties are `message-id`, `content-type` and `delivery-mode`.
    pub headers: BTreeMap<String, String>,
    /// Headers of one name: how often at most.
    pub repeats: usize,
}

impl Arrived {
    fn of_rabbitmq(got: &Value) -> Arrived {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let properties = got["properties"].as_object().unwrap();
        let mut headers = BTreeMap::new();
        let mut repeats = 1;
        for (name, value) in properties.get("headers").and_then(Value::as_object).into_iter().flatten() {
            if headers.insert(name.to_lowercase(), text(value)).is_some() {
                repeats += 1;
            }
        }
        for name in ["message_id", "content_type", "delivery_mode"] {
            if let Some(value) = properties.get(name) {
                headers.insert(name.replace('_', "-"), text(value));
            }
        }
        assert_eq!(got["payload_encoding"], "string", "{got}");
        Arrived {
            body: text(&got["payload"]).into_bytes(),
            key: got["routing_key"].as_str().map(str::to_owned),
            headers,
            repeats,
        }
    }

    fn of_kafka(record: &impl rdkafka::message::Message) -> Arrived {
        let mut arrived = Arrived {
            body: record.payload().unwrap_or_default().to_vec(),
            key: record.key().map(|key| String::from_utf8(key.to_vec()).unwrap()),
            headers: BTreeMap::new(),
            repeats: 1,
        };
        for header in record.headers().iter().flat_map(|headers| headers.iter()) {
            let value = String::from_utf8(header.value.unwrap_or_default().to_vec()).unwrap();
            if arrived.headers.insert(header.key.to_lowercase(), value).is_some() {
                arrived.repeats += 1;
            }
        }
        arrived
    }

    fn of_nats(raw: &jetstream::message::StreamMessage) -> Arrived {
        let mut arrived = Arrived {
            body: raw.payload.to_vec(),
            key: Some(raw.subject.to_string()),
            headers: BTreeMap::new(),
            repeats: 1,
        };
        for (name, values) in raw.headers.iter() {
            arrived.repeats = arrived.repeats.max(values.len());
            let value = values.last().unwrap().to_string();
            if arrived.headers.insert(name.to_string().to_lowercase(), value).is_some() {
                arrived.repeats += 1;
            }
        }
        arrived
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// A header's value; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// The message id, in whatever place the broker has for it.
    pub fn id(&self) -> &str {
        let names = ["message-id", "x-message-id"];
        names.into_iter().map(|name| self.header(name)).find(|id| !id.is_empty()).unwrap_or_default()
    }
}

/// The distinct `id`s of bodies.
pub fn ids(arrived: &[Arrived]) -> BTreeSet<String> {
    arrived.iter().map(|message| message.json()["id"].as_str().unwrap().to_owned()).collect()
}

impl Worker {
    /// Waits until a component of `/health/ready` has this status, and returns its detail.
    pub async fn wait_component(&self, name: &str, status: &str) -> String {
        eventually(&format!("{name} is {status}"), PATIENCE, || async {
            let page = self.get("/health/ready").await.json();
            let component = &page["components"][name];
            (component["status"] == status).then(|| component["detail"].as_str().unwrap_or_default().to_owned())
        })
        .await
    }
}
