//! The client library's producers and what is known about their connection.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    time::Duration,
};

use rdkafka::{
    ClientContext,
    admin::{AdminClient, AdminOptions, ResourceSpecifier},
    config::{ClientConfig, RDKafkaLogLevel},
    error::{KafkaError, RDKafkaErrorCode},
    message::{DeliveryResult, Message},
    producer::{BaseRecord, NoCustomPartitioner, Producer, ProducerContext, PurgeConfig, ThreadedProducer},
};
use tokio::{sync::oneshot, time::Instant};

use super::{not_queued, record::Record};
use crate::{
    client::{DropElsewhere, Fingerprint, log, overrides, properties},
    config::DestinationConfig,
    fault::{KafkaFault, Undelivered, reason_of},
};

/// At most so many topics are known to take smaller batches than we make.
const NARROW_MAX: usize = 1024;

/// After this time larger batches are tried again: the limit may have been raised.
const NARROW_HOLDS: Duration = Duration::from_secs(600);

/// Pause between two questions about a topic that is just being made.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A topic's limit is looked up at most this often.
const LIMIT_HOLDS: Duration = Duration::from_secs(60);

/// Longest wait for a topic's limit, which is only told to people.
const LIMIT_WAIT: Duration = Duration::from_secs(2);

const UNKNOWN: u8 = 0;
const UP: u8 = 1;
const FAILED: u8 = 2;

/// What is known about the connection.
#[derive(Debug, Default)]
pub(super) struct Link {
    state: AtomicU8,
    /// Acknowledged records.
    acks: AtomicU64,
    /// The library's last complaint, for people.
    complaint: Mutex<Option<Complaint>>,
}

#[derive(Debug, Clone)]
struct Complaint {
    text: String,
    login: bool,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    pub(super) fn up(&self) {
        let before = self.state.compare_exchange(UNKNOWN, UP, Ordering::AcqRel, Ordering::Acquire);
        if before.is_ok() {
            *self.complaint.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The cluster is asked before the next record.
    pub(super) fn doubt(&self, why: &str) {
        if self.state.compare_exchange(UP, UNKNOWN, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            tracing::debug!(why, "the Kafka cluster is asked before the next record");
        }
    }

    pub(super) fn acks(&self) -> u64 {
        self.acks.load(Ordering::Relaxed)
    }

    /// The producers are not used again.
    pub(super) fn give_up(&self) {
        self.state.store(FAILED, Ordering::Release);
    }

    /// The producers can never be used again.
    pub(super) fn failed_for_good(&self) -> bool {
        self.state.load(Ordering::Acquire) == FAILED
    }

    fn complain(&self, code: RDKafkaErrorCode, text: &str) {
        use RDKafkaErrorCode as C;
        let login = matches!(code, C::Authentication | C::SaslAuthenticationFailed | C::UnsupportedSASLMechanism);
        match code {
            C::Fatal => self.give_up(),
            C::AllBrokersDown => self.doubt(text),
            _ if login => self.doubt(text),
            _ => {}
        }
        let mut complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        // "All brokers are down" follows the complaint that says why.
        if code != C::AllBrokersDown || complaint.is_none() {
            *complaint = Some(Complaint { text: text.to_owned(), login });
        }
    }

    fn unreachable(&self, servers: &str, otherwise: &str) -> KafkaFault {
        let servers = servers.to_owned();
        match self.complaint.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            Some(Complaint { text, login: true }) => KafkaFault::Login { servers, reason: text },
            Some(Complaint { text, .. }) => KafkaFault::Unreachable { servers, reason: text },
            None => KafkaFault::Unreachable { servers, reason: otherwise.to_owned() },
        }
    }
}

/// Receives the library's reports on its polling thread.
struct Reports {
    link: Arc<Link>,
}

impl ClientContext for Reports {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.link.complain(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown), reason);
    }
}

type Answer = oneshot::Sender<Result<(), Undelivered>>;

impl ProducerContext<NoCustomPartitioner> for Reports {
    type DeliveryOpaque = Box<Answer>;

    fn delivery(&self, result: &DeliveryResult<'_>, answer: Box<Answer>) {
        let outcome = match result {
            Ok(_) => {
                self.link.acks.fetch_add(1, Ordering::Relaxed);
                self.link.up();
                Ok(())
            }
            Err((error, message)) => Err(Undelivered {
                code: error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown),
                assigned: message.partition() >= 0,
                given_up: false,
            }),
        };
        // Nobody waits any more where the publish was given up.
        let _ = answer.send(outcome);
    }
}

type Native = DropElsewhere<ThreadedProducer<Reports>>;

/// One producer for nearly everything, a second one that sends records alone, made when the first batch is refused as a
/// whole; both for one set of credentials.
pub(super) struct Producers {
    servers: String,
    /// What every client of this cluster needs.
    shared: ClientConfig,
    config: ClientConfig,
    fingerprint: Fingerprint,
    link: Arc<Link>,
    batching: Native,
    single: OnceLock<Option<Native>>,
    /// Topics whose limit is below our batch size, so that their records go alone.
    narrow: RwLock<HashMap<String, Instant>>,
    limits: tokio::sync::Mutex<HashMap<String, (Instant, Option<u64>)>>,
}

impl Producers {
    /// Blocks for as long as the library needs to start its threads and to read certificates.
    pub(super) fn new(config: &DestinationConfig) -> Result<Self, KafkaFault> {
        let (shared, fingerprint) = properties(&config.cluster)?;
        let mut native = shared.clone();
        let timeout_ms = config.timeout.as_millis().max(1);
        native
            .set("acks", "all")
            .set("enable.idempotence", "true")
            // The whole budget of a record, the library's own retries included.
            .set("delivery.timeout.ms", timeout_ms.to_string())
            .set("request.timeout.ms", timeout_ms.to_string())
            // Java's partitioner, so that a key stays in the partition where other producers of the topic put it.
            .set("partitioner", "murmur2_random")
            // How long a topic may be unknown before its records fail; a topic that brokers make on demand needs a moment.
            .set("topic.metadata.propagation.max.ms", (timeout_ms / 2).min(5_000).to_string())
            .set("topic.metadata.refresh.interval.ms", "60000")
            // The topic's limit counts, not one of ours.
            .set("message.max.bytes", "1000000000")
            // Measured on a busy machine: 0 costs half the throughput in requests, 5 (the default) only adds latency.
            .set("linger.ms", "1")
            .set("batch.size", "1000000");
        overrides(&mut native, &config.cluster);
        let link = Arc::new(Link::default());
        let servers = config.cluster.bootstrap_servers.clone();
        let batching = start(&native, &link, &servers)?;
        Ok(Self {
            servers,
            shared,
            config: native,
            fingerprint,
            link,
            batching,
            single: OnceLock::new(),
            narrow: RwLock::default(),
            limits: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Sends a record and waits for its own outcome, until `deadline`.
    pub(super) async fn send(self: &Arc<Self>, record: &Record<'_>, deadline: Instant) -> Result<(), Undelivered> {
        if self.is_narrow(&record.topic) {
            return self.send_alone(record, deadline).await;
        }
        match hand_over(&self.batching, record, deadline).await {
            Err(failed) if failed.blames_the_batch() => {
                let outcome = self.send_alone(record, deadline).await;
                if outcome.is_ok() {
                    self.learn_narrow(&record.topic);
                }
                outcome
            }
            outcome => outcome,
        }
    }

    async fn send_alone(self: &Arc<Self>, record: &Record<'_>, deadline: Instant) -> Result<(), Undelivered> {
        if self.single.get().is_none() {
            let producers = self.clone();
            let _ = tokio::task::spawn_blocking(move || producers.start_single()).await;
        }
        match self.single.get() {
            Some(Some(single)) => hand_over(single, record, deadline).await,
            _ => Err(not_queued(RDKafkaErrorCode::CriticalSystemResource)),
        }
    }

    /// Blocks like [`Producers::new`].
    fn start_single(&self) {
        self.single.get_or_init(|| {
            let mut config = self.config.clone();
            config.set("batch.num.messages", "1").set("linger.ms", "0");
            start(&config, &self.link, &self.servers)
                .inspect_err(|fault| tracing::warn!(%fault, "no second Kafka producer"))
                .ok()
        });
    }

    fn is_narrow(&self, topic: &str) -> bool {
        let narrow = self.narrow.read().unwrap_or_else(PoisonError::into_inner);
        narrow.get(topic).is_some_and(|learned| learned.elapsed() < NARROW_HOLDS)
    }

    fn learn_narrow(&self, topic: &str) {
        let mut narrow = self.narrow.write().unwrap_or_else(PoisonError::into_inner);
        if narrow.len() >= NARROW_MAX {
            narrow.clear();
        }
        if narrow.insert(topic.to_owned(), Instant::now()).is_none() {
            tracing::info!(
                topic,
                "the topic takes smaller batches than QueueBox makes; its records are sent one by one for a while"
            );
        }
    }

    /// Asks the cluster for `topic`, or, without one, whether it answers.
    pub(super) async fn ask(self: &Arc<Self>, topic: Option<&str>, deadline: Instant) -> Result<(), KafkaFault> {
        loop {
            let fault = match self.metadata(topic, deadline).await? {
                None => return Ok(()),
                Some(RDKafkaErrorCode::UnknownTopic | RDKafkaErrorCode::UnknownTopicOrPartition) => {
                    KafkaFault::TopicMissing {
                        topic: topic.unwrap_or_default().to_owned(),
                        servers: self.servers.clone(),
                        declared: true,
                    }
                }
                Some(RDKafkaErrorCode::TopicAuthorizationFailed) => KafkaFault::NotAuthorized {
                    topic: topic.unwrap_or_default().to_owned(),
                    servers: self.servers.clone(),
                    declared: true,
                },
                Some(RDKafkaErrorCode::InvalidTopic) => {
                    KafkaFault::InvalidTopic { topic: topic.unwrap_or_default().to_owned() }
                }
                // It is being made, or a leader is being elected.
                Some(code) => KafkaFault::Unreachable {
                    servers: self.servers.clone(),
                    reason: format!("topic {:?}: {code}", topic.unwrap_or_default()),
                },
            };
            let passing = matches!(fault, KafkaFault::Unreachable { .. });
            if !passing || Instant::now() + ASK_AGAIN >= deadline {
                return Err(fault);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// One question; the inner error is the topic's.
    async fn metadata(
        self: &Arc<Self>,
        topic: Option<&str>,
        deadline: Instant,
    ) -> Result<Option<RDKafkaErrorCode>, KafkaFault> {
        let producers = self.clone();
        let topic = topic.map(str::to_owned);
        let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let answer = tokio::task::spawn_blocking(move || {
            let client = producers.batching.get().ok_or(KafkaFault::Closed)?.client();
            let metadata = client
                .fetch_metadata(topic.as_deref(), wait)
                .map_err(|error| producers.link.unreachable(&producers.servers, &reason_of(&error)))?;
            Ok(topic.and_then(|_| metadata.topics().first()?.error()).map(RDKafkaErrorCode::from))
        });
        answer.await.unwrap_or_else(|_| Err(self.link.unreachable(&self.servers, "the runtime is stopping")))
    }

    /// Makes the library look for a missing topic again, without waiting for it.
    pub(super) fn refresh(self: &Arc<Self>, topic: &str) {
        let producers = self.clone();
        let topic = topic.to_owned();
        tokio::task::spawn_blocking(move || {
            if let Some(batching) = producers.batching.get() {
                let _ = batching.client().fetch_metadata(Some(&topic), LIMIT_WAIT);
            }
        });
    }

    /// `max.message.bytes` of a topic, if the cluster tells it soon. Only for the text of a refusal.
    pub(super) async fn limit_of(&self, topic: &str, deadline: Instant) -> Option<u64> {
        let mut limits = self.limits.lock().await;
        if let Some((asked, limit)) = limits.get(topic)
            && asked.elapsed() < LIMIT_HOLDS
        {
            return *limit;
        }
        let wait = LIMIT_WAIT.min(deadline.saturating_duration_since(Instant::now()));
        let limit = tokio::time::timeout(wait, describe_limit(self.shared.clone(), topic, wait)).await.ok().flatten();
        if limits.len() >= NARROW_MAX {
            limits.clear();
        }
        limits.insert(topic.to_owned(), (Instant::now(), limit));
        limit
    }

    /// Takes back whatever these producers still hold; every record of it ends as ambiguous. They cannot be used afterwards:
    /// the gap breaks the idempotent sequence.
    pub(super) fn take_back(&self) {
        let single = self.single.get().and_then(Option::as_ref);
        for producer in std::iter::once(&self.batching).chain(single).filter_map(DropElsewhere::get) {
            producer.purge(PurgeConfig::default().queue().inflight());
        }
    }

    /// Waits until nothing is in flight, at most `wait`.
    pub(super) async fn flush(self: Arc<Self>, wait: Duration) {
        let flushed = tokio::task::spawn_blocking(move || {
            let singles = self.single.get().and_then(Option::as_ref);
            for producer in std::iter::once(&self.batching).chain(singles).filter_map(DropElsewhere::get) {
                if producer.flush(wait).is_err() {
                    tracing::warn!(
                        servers = self.servers,
                        in_flight = producer.in_flight_count(),
                        "Kafka producer closed with records in flight"
                    );
                }
            }
        });
        let _ = flushed.await;
    }
}

fn start(config: &ClientConfig, link: &Arc<Link>, servers: &str) -> Result<Native, KafkaFault> {
    config
        .create_with_context(Reports { link: link.clone() })
        .map(DropElsewhere::new)
        .map_err(|error| KafkaFault::Client { servers: servers.to_owned(), reason: reason_of(&error) })
}

/// Gives a record to a producer and waits for its outcome.
async fn hand_over(producer: &Native, record: &Record<'_>, deadline: Instant) -> Result<(), Undelivered> {
    let receive = {
        let (answer, receive) = oneshot::channel();
        let mut wire = BaseRecord::with_opaque_to(&record.topic, Box::new(answer))
            .payload(record.payload)
            .headers(record.wire_headers());
        if let Some(key) = &record.key {
            wire = wire.key(key.as_str());
        }
        let producer = producer.get().ok_or(not_queued(RDKafkaErrorCode::CriticalSystemResource))?;
        // The failed record is large and of no use any more.
        producer.send(wire).map_err(|(error, _)| {
            not_queued(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::InvalidArgument))
        })?;
        receive
    };
    match tokio::time::timeout_at(deadline, receive).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_closed)) => Err(Undelivered { code: RDKafkaErrorCode::DestroyBroker, assigned: true, given_up: false }),
        Err(_late) => Err(Undelivered { code: RDKafkaErrorCode::MessageTimedOut, assigned: true, given_up: true }),
    }
}

async fn describe_limit(config: ClientConfig, topic: &str, wait: Duration) -> Option<u64> {
    let made = tokio::task::spawn_blocking(move || config.create_with_context::<_, AdminClient<Quiet>>(Quiet))
        .await
        .ok()?
        .ok()?;
    let admin = DropElsewhere::new(made);
    let options = AdminOptions::new().request_timeout(Some(wait));
    let answer = admin.get()?.describe_configs(&[ResourceSpecifier::Topic(topic)], &options).await.ok()?;
    let resource = answer.into_iter().next()?.ok()?;
    resource.get("max.message.bytes")?.value.as_ref()?.parse().ok()
}

/// The context of a client whose complaints concern nobody.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        log(level, facility, text);
    }

    fn error(&self, _error: KafkaError, reason: &str) {
        log(RDKafkaLogLevel::Debug, "ADMIN", reason);
    }
}
