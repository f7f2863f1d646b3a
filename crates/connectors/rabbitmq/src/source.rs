//! RabbitMQ as a source: one queue, acknowledged after the store, given back after a failed one (contract 6.7).
//!
//! ```text
//!   connect ──► consume ──► batch ──► intake ──► ack ─┐
//!      ▲           ▲          ▲────────────────────────┘ stored
//!      │           └── pause ◄── nack, requeue ◄───────── not stored
//!      └── back-off ◄── connection, channel or queue gone
//! ```
//!
//! Batches are handled one after the other, so rows are stored in the order of the queue; meanwhile the broker fills the
//! window of `prefetch` messages, which also bounds the memory.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use lapin::{
    Channel, Consumer,
    message::Delivery,
    options::{
        BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
        QueueDeclareOptions,
    },
    types::{FieldTable, ShortString},
};
use queuebox_core::{
    Fault,
    ports::{Admission, Intake, Received, Source, source::SourceHealth},
    redact::redact,
    retry::Backoff,
};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{CONNECT_TIMEOUT, SourceConfig},
    fault::Error,
    link::{Link, words},
    values,
};

/// Messages per call of the intake, at most.
const BATCH_MAX: usize = 1000;

/// Bytes per call of the intake: no further message is added above this.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// A batch that is not full waits this long for another message, and no longer than [`LINGER_MAX`] in all.
const LINGER: Duration = Duration::from_millis(1);

/// See [`LINGER`].
const LINGER_MAX: Duration = Duration::from_millis(5);

/// How long a stop waits for the batch that is being stored. What is stored later and not acknowledged comes again, and is
/// a duplicate.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// A named entrance from a queue.
pub struct RabbitSource {
    config: SourceConfig,
    health: Mutex<SourceHealth>,
}

/// Why receiving ended.
enum End {
    Stopped,
    Failed(Error),
}

impl RabbitSource {
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
        let queue = &self.config.queue;
        let text =
            if reason.contains(queue.as_str()) { reason.to_owned() } else { format!("queue \"{queue}\": {reason}") };
        self.say(SourceHealth::Down(redact(&text)));
    }

    /// One connection, until it fails or the source is stopped.
    async fn serve(&self, intake: &Arc<dyn Intake>, stop: &CancellationToken, backoff: &mut Backoff) -> End {
        let link = tokio::select! {
            () = stop.cancelled() => return End::Stopped,
            opened = Link::open(&self.config.connection) => match opened {
                Ok(link) => link,
                Err(error) => return End::Failed(error),
            },
        };
        let end = self.receive(&link, intake, stop, backoff).await;
        // Closing the connection gives back whatever is not acknowledged.
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
        let mut pauses = Backoff::storing();
        let channel = match self.open_channel(link).await {
            Ok(channel) => channel,
            Err(error) => return End::Failed(error),
        };
        loop {
            let mut subscription = match self.consume(link, &channel).await {
                Ok(consumer) => Subscription { consumer, end: None },
                Err(error) => return End::Failed(error),
            };
            self.say(SourceHealth::Up);
            backoff.reset();
            let fault = match self.drain(&mut subscription, intake, stop, &mut pauses).await {
                Ok(fault) => fault,
                Err(end) => return end,
            };
            let pause = pauses.pause();
            self.down(&format!("a message could not be stored, next try in {} s: {}", pause.as_secs(), fault.detail));
            if let Err(error) = self.give_back(link, &channel, subscription.consumer).await {
                return End::Failed(error);
            }
            tokio::select! {
                () = stop.cancelled() => return End::Stopped,
                () = sleep(pause) => {}
            }
        }
    }

    async fn open_channel(&self, link: &Link) -> Result<Channel, Error> {
        let queue = self.queue()?;
        let channel = link.channel(CONNECT_TIMEOUT).await.map_err(|reason| self.lost(reason))?;
        if self.config.declare_queue {
            let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            let declaring = channel.queue_declare(queue, options, FieldTable::default());
            link.within(CONNECT_TIMEOUT, declaring).await.map_err(|reason| self.lost(reason))?;
        }
        let qos = channel.basic_qos(self.config.prefetch, BasicQosOptions::default());
        link.within(CONNECT_TIMEOUT, qos).await.map_err(|reason| self.lost(reason))?;
        Ok(channel)
    }

    async fn consume(&self, link: &Link, channel: &Channel) -> Result<Consumer, Error> {
        let consuming =
            channel.basic_consume(self.queue()?, "".into(), BasicConsumeOptions::default(), FieldTable::default());
        link.within(CONNECT_TIMEOUT, consuming).await.map_err(|reason| self.lost(reason))
    }

    /// Stores what comes. `Ok` with the fault of a store that failed: everything of that batch is answered by then.
    async fn drain(
        &self,
        subscription: &mut Subscription,
        intake: &Arc<dyn Intake>,
        stop: &CancellationToken,
        pauses: &mut Backoff,
    ) -> Result<Fault, End> {
        loop {
            let mut batch = tokio::select! {
                () = stop.cancelled() => return Err(End::Stopped),
                batch = subscription.next_batch() => batch.map_err(|reason| End::Failed(self.lost(reason)))?,
            };
            let received = batch.iter_mut().map(received).collect();
            let admitting = intake.admit(received);
            tokio::pin!(admitting);
            let admissions = tokio::select! {
                admissions = &mut admitting => admissions,
                () = stop.cancelled() => match timeout(STOP_GRACE, admitting).await {
                    Ok(admissions) => admissions,
                    Err(_) => return Err(End::Stopped),
                },
            };
            match settle(&batch, admissions).await {
                Ok(None) => pauses.reset(),
                Ok(Some(fault)) => return Ok(fault),
                Err(error) => return Err(End::Failed(self.lost(words(&error)))),
            }
        }
    }

    /// Ends the subscription first, or the broker would send the same messages again at once; then requeues everything
    /// that this channel holds.
    async fn give_back(&self, link: &Link, channel: &Channel, mut consumer: Consumer) -> Result<(), Error> {
        let cancelling = channel.basic_cancel(consumer.tag(), BasicCancelOptions::default());
        link.within(CONNECT_TIMEOUT, cancelling).await.map_err(|reason| self.lost(reason))?;
        while let Some(Some(Ok(_))) = consumer.next().now_or_never() {}
        // Tag 0 with multiple: all that is unacknowledged.
        let nacking = channel.basic_nack(0, BasicNackOptions { multiple: true, requeue: true });
        link.within(CONNECT_TIMEOUT, nacking).await.map_err(|reason| self.lost(reason))
    }

    fn queue(&self) -> Result<ShortString, Error> {
        ShortString::try_new(self.config.queue.as_str())
            .map_err(|_| self.lost("its name has more than 255 bytes".to_owned()))
    }

    fn lost(&self, reason: String) -> Error {
        Error::Queue { queue: self.config.queue.clone(), reason }
    }
}

/// A subscription whose end is not forgotten while a batch is filled.
struct Subscription {
    consumer: Consumer,
    end: Option<String>,
}

impl Subscription {
    /// Everything that has arrived, at least one message; then a little longer while more keeps coming, since one insert of
    /// several messages costs less than several inserts.
    async fn next_batch(&mut self) -> Result<Vec<Delivery>, String> {
        let first = match self.end.take() {
            Some(reason) => return Err(reason),
            None => self.next().await?,
        };
        let mut bytes = first.data.len();
        let mut batch = vec![first];
        let until = Instant::now() + LINGER_MAX;
        while batch.len() < BATCH_MAX && bytes < BATCH_BYTES {
            match timeout_at(until.min(Instant::now() + LINGER), self.next()).await {
                Ok(Ok(delivery)) => {
                    bytes += delivery.data.len();
                    batch.push(delivery);
                }
                Ok(Err(reason)) => {
                    self.end = Some(reason);
                    break;
                }
                Err(_) => break,
            }
        }
        Ok(batch)
    }

    async fn next(&mut self) -> Result<Delivery, String> {
        match self.consumer.next().await {
            Some(Ok(delivery)) => Ok(delivery),
            Some(Err(error)) => Err(words(&error)),
            None => Err("the broker ended the subscription (queue deleted, or its node gone)".to_owned()),
        }
    }
}

/// Acknowledges what is stored. After a failed store the rest stays unacknowledged, with the fault as the answer.
async fn settle(batch: &[Delivery], admissions: Vec<Admission>) -> lapin::Result<Option<Fault>> {
    let failed = admissions.iter().find_map(|admission| match admission {
        Admission::Failed(fault) => Some(fault.clone()),
        Admission::Refused { reason, .. } => Some(Fault::transient("refused", reason.clone())),
        Admission::Stored(_) | Admission::Duplicate | Admission::Filtered => None,
    });
    let accepted =
        |admission: &Admission| matches!(admission, Admission::Stored(_) | Admission::Duplicate | Admission::Filtered);
    if failed.is_none() && admissions.len() == batch.len() {
        if let Some(last) = batch.last() {
            last.ack(BasicAckOptions { multiple: true }).await?;
        }
        return Ok(None);
    }
    for (delivery, _) in batch.iter().zip(&admissions).filter(|(_, admission)| accepted(admission)) {
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(Some(failed.unwrap_or_else(|| Fault::transient("intake", "the intake gave fewer answers than messages"))))
}

/// Takes the body out of the delivery, which is only acknowledged after that.
fn received(delivery: &mut Delivery) -> Received {
    let body = Bytes::from(std::mem::take(&mut delivery.data));
    let properties = &delivery.properties;
    let text = |property: &Option<ShortString>| property.as_ref().map(ToString::to_string);
    Received {
        body,
        headers: properties.headers().as_ref().map(values::headers).unwrap_or_default(),
        correlation_id: text(properties.correlation_id()),
        message_id: text(properties.message_id()),
        record_key: None,
        published_at_us: properties.timestamp().and_then(|seconds| i64::try_from(seconds).ok()?.checked_mul(1_000_000)),
        position: None,
    }
}

#[async_trait]
impl Source for RabbitSource {
    fn kind(&self) -> &'static str {
        "rabbitmq"
    }

    async fn run(&self, intake: Arc<dyn Intake>, stop: BoxFuture<'static, ()>) {
        let stopping = CancellationToken::new();
        let work = async {
            let mut backoff = Backoff::connecting();
            while let End::Failed(error) = self.serve(&intake, &stopping, &mut backoff).await {
                self.down(&error.to_string());
                tracing::warn!(queue = %self.config.queue, error = %redact(&error.to_string()), "not receiving");
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
