//! NATS as a source: one durable pull consumer of one stream, acknowledged after the store (contract 6.7).
//!
//! ```text
//!   connect ──► find or make the durable ──► pull ──► intake ──► ack ─┐
//!      ▲                                     ▲  ▲──────────────────────┘ stored
//!      │                                     └── pause ◄── nak ◄──────── not stored
//!      └── back-off ◄── connection, stream or durable gone
//! ```
//!
//! A pull asks for at most `batch_size` messages and is used up before the next one, so no more than that are ever
//! unacknowledged. Each pull ends by itself after [`PULL_WAIT`], so that a server that has forgotten it costs seconds.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_nats::jetstream::{
    self, AckKind,
    consumer::{AckPolicy, Consumer, DeliverPolicy, pull},
    context::{ConsumerInfoErrorKind, GetStreamError, GetStreamErrorKind},
    stream::Stream,
};
use async_trait::async_trait;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use queuebox_core::{
    Fault,
    ports::{Admission, Intake, Received, Source, source::SourceHealth},
    redact::redact,
    retry::Backoff,
};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{CONNECT_TIMEOUT, SourceConfig},
    fault::Error,
    link::Link,
};

/// Longest wait of one pull for messages.
const PULL_WAIT: Duration = Duration::from_secs(5);

/// Bytes per call of the intake: no further message is added above this.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// A batch that is not full waits this long for another message, and no longer than [`LINGER_MAX`] in all.
const LINGER: Duration = Duration::from_millis(1);

/// See [`LINGER`].
const LINGER_MAX: Duration = Duration::from_millis(5);

/// How long a stop waits for the batch that is being stored. What is stored later and not acknowledged comes again, and is
/// a duplicate.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// `max_ack_pending` of a durable that is made here, at least; the server's own default.
const ACK_PENDING_MIN: usize = 1000;

/// A named entrance from a stream.
pub struct NatsSource {
    config: SourceConfig,
    health: Mutex<SourceHealth>,
}

/// Why receiving ended.
enum End {
    Stopped,
    Failed(Error),
}

/// Messages of one pull.
struct Pull {
    messages: pull::Batch,
    /// Received and not yet handed to the intake.
    held: VecDeque<jetstream::Message>,
    /// Nothing more comes: the pull is used up, or failed.
    end: Option<Result<(), String>>,
    asked: usize,
}

impl NatsSource {
    /// A source that connects when it runs.
    pub fn new(config: SourceConfig) -> Self {
        let source = Self { config, health: Mutex::new(SourceHealth::Up) };
        source.down("not connected yet");
        source
    }

    fn say(&self, health: SourceHealth) {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }

    fn down(&self, reason: &str) {
        let stream = &self.config.stream;
        let text =
            if reason.contains(stream.as_str()) { reason.to_owned() } else { format!("stream \"{stream}\": {reason}") };
        self.say(SourceHealth::Down(redact(&text)));
    }

    fn failed(&self, reason: impl ToString) -> End {
        End::Failed(self.error(reason))
    }

    fn error(&self, reason: impl ToString) -> Error {
        Error::Consumer {
            stream: self.config.stream.clone(),
            durable: self.config.durable.clone(),
            reason: reason.to_string(),
        }
    }

    /// One connection, until it fails or the source is stopped.
    async fn serve(&self, intake: &Arc<dyn Intake>, stop: &CancellationToken, backoff: &mut Backoff) -> End {
        let link = tokio::select! {
            () = stop.cancelled() => return End::Stopped,
            opened = Link::open(&self.config.connection, CONNECT_TIMEOUT) => match opened {
                Ok(link) => link,
                Err(error) => return End::Failed(error),
            },
        };
        let end = tokio::select! {
            end = self.receive(&link, intake, stop, backoff) => end,
            () = link.lost() => self.failed("the connection ended"),
        };
        link.close().await;
        end
    }

    async fn receive(
        &self,
        link: &Link,
        intake: &Arc<dyn Intake>,
        stop: &CancellationToken,
        backoff: &mut Backoff,
    ) -> End {
        let consumer = tokio::select! {
            () = stop.cancelled() => return End::Stopped,
            found = self.durable(link) => match found {
                Ok(consumer) => consumer,
                Err(error) => return End::Failed(error),
            },
        };
        let progress_every = progress_period(&consumer);
        let mut pauses = Backoff::storing();
        loop {
            let asking = consumer.batch().max_messages(self.config.batch_size).expires(PULL_WAIT).messages();
            let mut pull = match timeout(CONNECT_TIMEOUT, asking).await {
                Ok(Ok(messages)) => Pull { messages, held: VecDeque::new(), end: None, asked: self.config.batch_size },
                Ok(Err(error)) => return self.failed(error),
                Err(_) => return self.failed("the server takes no request"),
            };
            self.say(SourceHealth::Up);
            let fault = loop {
                let arrived = tokio::select! {
                    () = stop.cancelled() => {
                        pull.give_back().await;
                        return End::Stopped;
                    }
                    arrived = pull.next_batch() => arrived,
                };
                let batch = match arrived {
                    Ok(batch) if batch.is_empty() => break None,
                    Ok(batch) => batch,
                    Err(reason) => return self.failed(reason),
                };
                backoff.reset();
                match self.store(&batch, &mut pull, intake, stop, progress_every).await {
                    Ok(None) => pauses.reset(),
                    Ok(Some(fault)) => break Some(fault),
                    Err(end) => return end,
                }
            };
            let Some(fault) = fault else { continue };
            pull.give_back().await;
            drop(pull);
            let pause = pauses.pause();
            self.down(&format!("a message could not be stored, next try in {} s: {}", pause.as_secs(), fault.detail));
            tokio::select! {
                () = stop.cancelled() => return End::Stopped,
                () = sleep(pause) => {}
            }
        }
    }

    /// Hands one batch to the intake and answers each of its messages. `Ok` with the fault of a store that failed.
    async fn store(
        &self,
        batch: &[jetstream::Message],
        pull: &mut Pull,
        intake: &Arc<dyn Intake>,
        stop: &CancellationToken,
        progress_every: Duration,
    ) -> Result<Option<Fault>, End> {
        let admitting = intake.admit(batch.iter().map(received).collect());
        tokio::pin!(admitting);
        let mut ticks = interval(progress_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let admissions = loop {
            tokio::select! {
                admissions = &mut admitting => break admissions,
                _ = ticks.tick() => pull.in_progress(batch).await.map_err(|error| self.failed(error))?,
                () = stop.cancelled() => match timeout(STOP_GRACE, &mut admitting).await {
                    Ok(admissions) => break admissions,
                    Err(_) => return Err(End::Stopped),
                },
            }
        };
        settle(batch, admissions).await.map_err(|error| self.failed(error))
    }

    /// The durable, made when it is missing; the stream must exist.
    async fn durable(&self, link: &Link) -> Result<Consumer<pull::Config>, Error> {
        let stream = link.context.get_stream(&self.config.stream).await.map_err(|error| self.no_stream(&error))?;
        match stream.consumer_info(&self.config.durable).await {
            Ok(info) => {
                self.check(&info.config).map_err(|reason| self.error(reason))?;
                stream.get_consumer(&self.config.durable).await.map_err(|error| self.error(error))
            }
            Err(error) if error.kind() == ConsumerInfoErrorKind::NotFound => self.make(&stream).await,
            Err(error) => Err(self.error(error)),
        }
    }

    fn no_stream(&self, error: &GetStreamError) -> Error {
        match error.kind() {
            GetStreamErrorKind::JetStream(refusal) if refusal.code() == 404 => {
                self.error("the stream does not exist; QueueBox does not make streams")
            }
            GetStreamErrorKind::Request => {
                self.error(format!("no answer from JetStream; a source cannot read core NATS ({error})"))
            }
            _ => self.error(error),
        }
    }

    fn check(&self, found: &jetstream::consumer::Config) -> Result<(), String> {
        if found.deliver_subject.is_some() {
            return Err("it is a push consumer; a pull consumer is needed".to_owned());
        }
        if found.ack_policy != AckPolicy::Explicit {
            return Err(
                "its ack policy is not explicit, so a message would count as handled before it is stored".to_owned()
            );
        }
        let Some(wanted) = &self.config.filter_subject else { return Ok(()) };
        let single = found.filter_subject == *wanted || found.filter_subjects == [wanted.clone()];
        if single { Ok(()) } else { Err(format!("it has another filter than \"{wanted}\"")) }
    }

    /// From the beginning of the stream: what was stored before is recognised as a duplicate.
    async fn make(&self, stream: &Stream) -> Result<Consumer<pull::Config>, Error> {
        let config = pull::Config {
            durable_name: Some(self.config.durable.clone()),
            deliver_policy: DeliverPolicy::All,
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.config.ack_wait,
            filter_subject: self.config.filter_subject.clone().unwrap_or_default(),
            max_ack_pending: i64::try_from(self.config.batch_size.max(ACK_PENDING_MIN)).unwrap_or(i64::MAX),
            ..pull::Config::default()
        };
        let made = stream.create_consumer_strict(config).await.map_err(|error| self.error(error))?;
        tracing::info!(stream = %self.config.stream, durable = %self.config.durable, "made the durable consumer");
        Ok(made)
    }
}

/// A third of the time after which the server would deliver again.
fn progress_period(consumer: &Consumer<pull::Config>) -> Duration {
    let config = &consumer.cached_info().config;
    let shortest = config.backoff.iter().copied().chain([config.ack_wait]).filter(|wait| !wait.is_zero()).min();
    (shortest.unwrap_or(Duration::from_secs(30)) / 3).max(Duration::from_millis(10))
}

impl Pull {
    /// Everything that has arrived, and a little longer while more keeps coming, since one insert of several messages costs
    /// less than several inserts. Empty = the pull is used up.
    async fn next_batch(&mut self) -> Result<Vec<jetstream::Message>, String> {
        if self.held.is_empty() {
            match self.end.take() {
                Some(end) => return end.map(|()| Vec::new()),
                None => self.await_one().await,
            }
        }
        let until = Instant::now() + LINGER_MAX;
        while self.end.is_none() && self.held.len() < self.asked {
            if timeout_at(until.min(Instant::now() + LINGER), self.await_one()).await.is_err() {
                break;
            }
        }
        if self.held.is_empty()
            && let Some(end) = self.end.take()
        {
            return end.map(|()| Vec::new());
        }
        let mut bytes = 0;
        let mut batch = Vec::with_capacity(self.held.len());
        while bytes < BATCH_BYTES
            && let Some(message) = self.held.pop_front()
        {
            bytes += message.payload.len();
            batch.push(message);
        }
        Ok(batch)
    }

    async fn await_one(&mut self) {
        match self.messages.next().await {
            None => self.end = Some(Ok(())),
            Some(Ok(message)) => self.held.push_back(message),
            Some(Err(error)) => self.end = Some(Err(error.to_string())),
        }
    }

    fn gather(&mut self) {
        while self.end.is_none() && self.await_one().now_or_never().is_some() {}
    }

    async fn in_progress(&mut self, batch: &[jetstream::Message]) -> Result<(), async_nats::Error> {
        self.gather();
        for message in batch.iter().chain(&self.held) {
            message.ack_with(AckKind::Progress).await?;
        }
        Ok(())
    }

    /// Whatever has arrived and was not handed to the intake goes back at once.
    async fn give_back(&mut self) {
        self.gather();
        for message in self.held.drain(..) {
            if message.ack_with(AckKind::Nak(None)).await.is_err() {
                return;
            }
        }
    }
}

/// Acknowledges what is stored and gives back the rest.
async fn settle(batch: &[jetstream::Message], admissions: Vec<Admission>) -> Result<Option<Fault>, async_nats::Error> {
    let mut fault = None;
    let mut admissions = admissions.into_iter();
    for message in batch {
        let failed = match admissions.next() {
            Some(Admission::Stored(_) | Admission::Duplicate | Admission::Filtered) => {
                message.ack().await?;
                continue;
            }
            Some(Admission::Failed(fault)) => fault,
            Some(Admission::Refused { reason, .. }) => Fault::transient("refused", reason),
            None => Fault::transient("intake", "the intake gave fewer answers than messages"),
        };
        message.ack_with(AckKind::Nak(None)).await?;
        fault.get_or_insert(failed);
    }
    Ok(fault)
}

fn received(message: &jetstream::Message) -> Received {
    let headers = headers(message.headers.as_ref());
    let message_id =
        headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("Nats-Msg-Id")).map(|(_, id)| id.clone());
    let info = message.info().ok();
    Received {
        body: message.payload.clone(),
        headers,
        correlation_id: None,
        message_id,
        record_key: None,
        published_at_us: info
            .as_ref()
            .and_then(|info| i64::try_from(info.published.unix_timestamp_nanos() / 1000).ok()),
        position: info.as_ref().map(|info| format!("{}/{}", info.stream, info.stream_sequence)),
    }
}

/// One value per name, the last; the client library keeps no order of names.
fn headers(map: Option<&async_nats::HeaderMap>) -> Vec<(String, String)> {
    let mut headers: Vec<(String, String)> = map
        .into_iter()
        .flat_map(async_nats::HeaderMap::iter)
        .filter_map(|(name, values)| Some((name.to_string(), values.last()?.to_string())))
        .collect();
    headers.sort();
    headers
}

#[async_trait]
impl Source for NatsSource {
    fn kind(&self) -> &'static str {
        "nats"
    }

    async fn run(&self, intake: Arc<dyn Intake>, stop: BoxFuture<'static, ()>) {
        let stopping = CancellationToken::new();
        let work = async {
            let mut backoff = Backoff::connecting();
            while let End::Failed(error) = self.serve(&intake, &stopping, &mut backoff).await {
                self.down(&error.to_string());
                tracing::warn!(stream = %self.config.stream, error = %redact(&error.to_string()), "not receiving");
                tokio::select! {
                    () = stopping.cancelled() => break,
                    () = sleep(backoff.pause()) => {}
                }
            }
        };
        let watch = async {
            stop.await;
            stopping.cancel();
        };
        futures::join!(work, watch);
        self.down("stopped");
    }

    fn health(&self) -> SourceHealth {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
