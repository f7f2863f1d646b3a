//! The Kafka that all tests share, past and through a proxy, one with logins and certificates, and a client that shows what a
//! broker holds.

use std::{collections::HashMap, time::Duration};

use queuebox_conformance::destination::Arrived;
use queuebox_core::{
    Uuid,
    template::{Address, Template, Vocabulary},
};
use queuebox_kafka::{Cluster, DestinationConfig, OffsetReset, Sasl, Secret, SecurityProtocol, SourceConfig, Tls};
use queuebox_testkit::{Authority, Kafka, KafkaProxy, free_port, kafka, private_kafka_with, unique};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewPartitions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    message::{Header, Headers, Message, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};

/// A password with everything that URLs, shells and property files trip over (case D39).
pub const PASSWORD: &str = "p@s:s/w%o#r?d&[é]'\"\\;=%41";

/// User of [`PASSWORD`].
pub const USER: &str = "app";

/// The broker that all tests share.
pub async fn world() -> World {
    static WARM: tokio::sync::OnceCell<()> = tokio::sync::OnceCell::const_new();
    log();
    let world = World { kafka: kafka().await };
    WARM.get_or_init(|| async { world.direct().warm().await }).await;
    world
}

/// `RUST_LOG=queuebox_kafka=debug,librdkafka=debug` shows what happened in a test that fails.
fn log() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
}

/// See [`world`].
pub struct World {
    kafka: Kafka,
}

impl World {
    /// A client past every proxy.
    pub fn direct(&self) -> Direct {
        Direct { bootstrap: self.kafka.bootstrap() }
    }

    /// The cluster past every proxy.
    pub fn cluster(&self) -> Cluster {
        plain(self.kafka.bootstrap())
    }

    /// A proxy for this test alone.
    pub async fn proxy(&self) -> KafkaProxy {
        self.kafka.proxy().await
    }
}

/// A cluster without a login.
pub fn plain(bootstrap_servers: String) -> Cluster {
    Cluster { bootstrap_servers, ..Cluster::default() }
}

/// A broker of one test that wants logins and certificates.
pub struct Guarded {
    kafka: Kafka,
    sasl_port: u16,
    tls_port: u16,
    sasl_tls_port: u16,
    /// Who signed the broker's certificate, and admits clients.
    pub authority: Authority,
}

impl Guarded {
    /// Starts it.
    pub async fn start() -> Self {
        log();
        let (sasl_port, tls_port, sasl_tls_port, authority) = (free_port(), free_port(), free_port(), Authority::new());
        let (password, server) = (escaped(PASSWORD), authority.server());
        let (ca, folder) = (authority.ca_path().display(), authority.ca_path().parent().unwrap());
        let keystore = folder.join("broker.pem");
        std::fs::write(&keystore, server.key_pem() + &server.cert_pem()).unwrap();
        let more =
            format!("SASL://127.0.0.1:{sasl_port},TLS://127.0.0.1:{tls_port},SASLTLS://127.0.0.1:{sasl_tls_port}");
        let plain =
            format!("org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}=\"{password}\";");
        let scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;";
        let kafka = private_kafka_with(&format!(
            "listeners={{listeners}},{more}\nadvertised.listeners={{advertised.listeners}},{more}\n\
             listener.security.protocol.map={{listener.security.protocol.map}},SASL:SASL_PLAINTEXT,TLS:SSL,\
             SASLTLS:SASL_SSL\n\
             listener.name.sasl.sasl.enabled.mechanisms=PLAIN\n\
             listener.name.sasl.plain.sasl.jaas.config={plain}\n\
             listener.name.sasltls.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512\n\
             listener.name.sasltls.plain.sasl.jaas.config={plain}\n\
             listener.name.sasltls.scram-sha-256.sasl.jaas.config={scram}\n\
             listener.name.sasltls.scram-sha-512.sasl.jaas.config={scram}\n\
             listener.name.sasltls.ssl.keystore.type=PEM\nlistener.name.sasltls.ssl.keystore.location={keystore}\n\
             listener.name.tls.ssl.keystore.type=PEM\nlistener.name.tls.ssl.keystore.location={keystore}\n\
             listener.name.tls.ssl.truststore.type=PEM\nlistener.name.tls.ssl.truststore.location={ca}\n\
             listener.name.tls.ssl.client.auth=required\n",
            keystore = keystore.display()
        ))
        .await;
        let guarded = Self { kafka, sasl_port, tls_port, sasl_tls_port, authority };
        guarded.direct().warm().await;
        guarded
    }

    /// A client that needs no login.
    pub fn direct(&self) -> Direct {
        Direct { bootstrap: self.kafka.bootstrap() }
    }

    /// The cluster with a login.
    pub fn sasl_cluster(&self, password: &str) -> Cluster {
        Cluster {
            bootstrap_servers: format!("127.0.0.1:{}", self.sasl_port),
            security_protocol: SecurityProtocol::SaslPlaintext,
            sasl: Some(Sasl { mechanism: "PLAIN".into(), username: USER.into(), password: Secret::fixed(password) }),
            ..Cluster::default()
        }
    }

    /// The cluster with a login over TLS.
    pub fn sasl_tls_cluster(&self, mechanism: &str, username: &str, password: &str) -> Cluster {
        let (mechanism, username, password) = (mechanism.into(), username.into(), Secret::fixed(password));
        Cluster {
            bootstrap_servers: format!("127.0.0.1:{}", self.sasl_tls_port),
            security_protocol: SecurityProtocol::SaslSsl,
            sasl: Some(Sasl { mechanism, username, password }),
            tls: Tls { ca: Some(Secret::fixed(self.authority.ca_pem())), ..Tls::default() },
            ..Cluster::default()
        }
    }

    /// Makes a user who logs in by SCRAM.
    pub async fn make_scram_user(&self, name: &str, password: &str) {
        for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
            let credential = format!("{mechanism}=[password={password}]");
            let user = ["--alter", "--entity-type", "users", "--entity-name", name, "--add-config", &credential];
            self.kafka.tool("kafka.admin.ConfigCommand", &user).await;
        }
    }

    /// The cluster that wants a certificate.
    pub fn tls_cluster(&self, tls: Tls) -> Cluster {
        Cluster {
            bootstrap_servers: format!("127.0.0.1:{}", self.tls_port),
            security_protocol: SecurityProtocol::Ssl,
            tls,
            ..Cluster::default()
        }
    }
}

/// For a quoted word of JAAS inside a file of properties: both have escapes, and the file is Latin-1.
fn escaped(password: &str) -> String {
    let quoted = password.replace('\\', "\\\\").replace('"', "\\\"");
    quoted
        .chars()
        .map(|c| match c {
            '\\' => "\\\\".to_owned(),
            c if c.is_ascii() => c.to_string(),
            c => format!("\\u{:04x}", u32::from(c)),
        })
        .collect()
}

/// A client that looks at the broker and fills it.
#[derive(Clone)]
pub struct Direct {
    bootstrap: String,
}

impl Direct {
    /// A client of this broker.
    pub fn to(bootstrap: String) -> Self {
        Self { bootstrap }
    }

    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap).set("topic.metadata.refresh.interval.ms", "1000");
        config
    }

    /// Waits until a fresh broker gives ids to idempotent producers, which on a busy machine takes longer than the time-outs of
    /// these tests.
    pub async fn warm(&self) {
        let topic = self.new_topic(1, &[]).await;
        let producer: FutureProducer = self.config().set("enable.idempotence", "true").create().unwrap();
        let sent = producer.send(FutureRecord::<str, str>::to(&topic).payload("{}"), Duration::from_secs(60)).await;
        sent.map_err(|(error, _)| error).unwrap();
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.config().create().unwrap()
    }

    /// Makes a topic with a name of its own and waits until it is known.
    pub async fn new_topic(&self, partitions: i32, settings: &[(&str, &str)]) -> String {
        let name = unique("qb-");
        self.make_topic(&name, partitions, settings).await;
        name
    }

    /// Makes a topic and waits until it is known.
    pub async fn make_topic(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        for (name, value) in settings {
            topic = topic.set(name, value);
        }
        let made = self.admin().create_topics(&[topic], &AdminOptions::new()).await.unwrap();
        made.into_iter().for_each(|result| drop(result.unwrap()));
        self.wait_for_topic(name, partitions).await;
    }

    async fn wait_for_topic(&self, name: &str, partitions: i32) {
        let (client, name) = (self.clone(), name.to_owned());
        queuebox_testkit::eventually("the topic is known", Duration::from_secs(20), || {
            let (client, name) = (client.clone(), name.clone());
            async move { (client.partitions(&name).await == partitions).then_some(()) }
        })
        .await;
    }

    async fn partitions(&self, topic: &str) -> i32 {
        let (client, topic) = (self.clone(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = client.config().create().unwrap();
            let metadata = consumer.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap();
            let found = metadata.topics()[0].partitions();
            let led = found.iter().filter(|partition| partition.leader() >= 0).count();
            i32::try_from(led).unwrap()
        })
        .await
    }

    /// More partitions for a topic.
    pub async fn add_partitions(&self, topic: &str, total: usize) {
        self.admin().create_partitions(&[NewPartitions::new(topic, total)], &AdminOptions::new()).await.unwrap();
        self.wait_for_topic(topic, i32::try_from(total).unwrap()).await;
    }

    /// Removes a topic.
    pub async fn remove_topic(&self, topic: &str) {
        self.admin().delete_topics(&[topic], &AdminOptions::new()).await.unwrap();
        let (client, name) = (self.clone(), topic.to_owned());
        queuebox_testkit::eventually("the topic is gone", Duration::from_secs(20), || {
            let (client, name) = (client.clone(), name.clone());
            async move { (client.partitions(&name).await == 0).then_some(()) }
        })
        .await;
    }

    /// Produces records in order; all are acknowledged when it returns.
    pub async fn produce(&self, topic: &str, records: Vec<Record>) {
        let producer: FutureProducer = self.config().set("linger.ms", "1").create().unwrap();
        let sent: Vec<_> = records
            .iter()
            .map(|record| {
                let headers = record.headers.iter().fold(OwnedHeaders::new(), |headers, (name, value)| {
                    headers.insert(Header { key: name, value: Some(value.as_slice()) })
                });
                let mut out = FutureRecord::<str, [u8]>::to(topic).headers(headers);
                if let Some(body) = &record.body {
                    out = out.payload(body.as_slice());
                }
                if let Some(partition) = record.partition {
                    out = out.partition(partition);
                }
                if let Some(key) = &record.key {
                    out = out.key(key.as_str());
                }
                producer.send_result(out).map_err(|(error, _)| error).unwrap()
            })
            .collect();
        for outcome in sent {
            outcome.await.unwrap().map_err(|(error, _)| error).unwrap();
        }
    }

    /// Everything that a topic holds, by partition and offset.
    pub async fn read(&self, topic: &str) -> Vec<Stored> {
        let (client, topic) = (self.clone(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer =
                client.config().set("group.id", "reader").set("enable.auto.commit", "false").create().unwrap();
            let metadata = consumer.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap();
            let mut stored = Vec::new();
            for partition in metadata.topics()[0].partitions() {
                let (low, high) = consumer.fetch_watermarks(&topic, partition.id(), Duration::from_secs(10)).unwrap();
                let mut from = TopicPartitionList::new();
                from.add_partition_offset(&topic, partition.id(), Offset::Offset(low)).unwrap();
                consumer.assign(&from).unwrap();
                let mut next = low;
                while next < high {
                    let Some(record) = consumer.poll(Duration::from_secs(10)) else { panic!("records are missing") };
                    let record = record.unwrap();
                    next = record.offset() + 1;
                    stored.push(Stored::of(&record));
                }
            }
            stored
        })
        .await
    }

    /// What a group has committed, by partition; `None` = nothing.
    pub async fn committed(&self, group: &str, topic: &str) -> Vec<Option<i64>> {
        let (client, group, topic) = (self.clone(), group.to_owned(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = client.config().set("group.id", &group).create().unwrap();
            let metadata = consumer.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap();
            let mut asked = TopicPartitionList::new();
            for partition in metadata.topics()[0].partitions() {
                asked.add_partition(&topic, partition.id());
            }
            let found = consumer.committed_offsets(asked, Duration::from_secs(10)).unwrap();
            let offset = |offset| if let Offset::Offset(offset) = offset { Some(offset) } else { None };
            found.elements().iter().map(|element| offset(element.offset())).collect()
        })
        .await
    }

    /// Records that a group has not committed.
    pub async fn lag(&self, group: &str, topic: &str) -> u64 {
        let committed = self.committed(group, topic).await;
        let (client, topic) = (self.clone(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = client.config().create().unwrap();
            let lag = committed.iter().enumerate().map(|(partition, committed)| {
                let partition = i32::try_from(partition).unwrap();
                let (low, high) = consumer.fetch_watermarks(&topic, partition, Duration::from_secs(10)).unwrap();
                high - committed.unwrap_or(low)
            });
            u64::try_from(lag.sum::<i64>()).unwrap()
        })
        .await
    }

    /// Members of a group that hold partitions or wait for some.
    pub async fn members(&self, group: &str) -> usize {
        let (client, group) = (self.clone(), group.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = client.config().create().unwrap();
            let groups = consumer.fetch_group_list(Some(&group), Duration::from_secs(10)).unwrap();
            groups.groups().iter().map(|group| group.members().len()).sum()
        })
        .await
    }
}

/// A record to produce.
#[derive(Clone, Default)]
pub struct Record {
    pub partition: Option<i32>,
    pub key: Option<String>,
    /// `None` = a tombstone.
    pub body: Option<Vec<u8>>,
    pub headers: Vec<(String, Vec<u8>)>,
}

/// Records `{"id":"<name>-<n>"}` for a partition.
pub fn numbered(partition: i32, range: std::ops::Range<usize>) -> Vec<Record> {
    range.map(|n| Record { partition: Some(partition), body: Some(body(partition, n)), ..Record::default() }).collect()
}

/// The body of record `n` of a partition.
pub fn body(partition: i32, n: usize) -> Vec<u8> {
    format!(r#"{{"id":"{partition}-{n}"}}"#).into_bytes()
}

/// A record as the broker has it.
#[derive(Debug, Clone)]
pub struct Stored {
    pub partition: i32,
    pub key: Option<String>,
    pub body: Vec<u8>,
    /// In order, names as sent.
    pub headers: Vec<(String, String)>,
}

impl Stored {
    fn of(record: &impl Message) -> Self {
        let headers = record.headers().map_or_else(Vec::new, |headers| {
            headers
                .iter()
                .map(|header| {
                    (header.key.to_owned(), String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned())
                })
                .collect()
        });
        Self {
            partition: record.partition(),
            key: record.key().map(|key| String::from_utf8_lossy(key).into_owned()),
            body: record.payload().unwrap_or_default().to_vec(),
            headers,
        }
    }

    /// The message id.
    pub fn id(&self) -> Option<Uuid> {
        self.header("x-message-id")?.parse().ok()
    }

    /// A header's last value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().rev().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// As the suite wants it.
    pub fn arrived(self) -> Arrived {
        let headers: HashMap<String, String> =
            self.headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone())).collect();
        Arrived { id: self.id(), key: self.key, body: self.body, headers }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// A destination on `topic` (a template) with a time-out.
pub fn destination(cluster: Cluster, topic: &str, timeout: Duration) -> DestinationConfig {
    DestinationConfig {
        cluster,
        topic: Address::Template(Template::parse(topic, Vocabulary::Address).unwrap()),
        key: Template::parse("{{ key }}", Vocabulary::RecordKey).unwrap(),
        headers: Vec::new(),
        timeout,
    }
}

/// A source of `group` on `topics`.
pub fn source(cluster: Cluster, group: &str, topics: &[&str], max_poll_records: u32) -> SourceConfig {
    SourceConfig {
        cluster,
        group_id: group.to_owned(),
        topics: topics.iter().map(ToString::to_string).collect(),
        auto_offset_reset: OffsetReset::Earliest,
        max_poll_records,
    }
}
