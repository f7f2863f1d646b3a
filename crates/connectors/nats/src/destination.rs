//! NATS as a destination: one JetStream acknowledgement per message (contract 7.3 to 7.5).
//!
//! # `Nats-Msg-Id`
//!
//! A stream drops a message whose `Nats-Msg-Id` it has seen within its duplicate window. An outbox id alone would make it
//! drop a replay, which carries the same id and must be delivered once more. So each publish has an id of its own,
//! `<outbox id>.<random>`, with one exception: after an attempt of this process whose outcome is unknown (time-out, lost
//! connection) the next attempts repeat its id until the message is done. Then the stream recognises the second copy if the
//! first has arrived, and says "duplicate", which is done. A replay starts with attempt 0 and so never repeats an id.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex as StdMutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_nats::{
    HeaderMap,
    jetstream::{
        self, ErrorCode,
        context::{PublishError, PublishErrorKind},
        message::PublishMessage,
    },
};
use async_trait::async_trait;
use queuebox_core::{
    Class, Fault, Uuid,
    ports::{Delivery, Destination},
    retry::Backoff,
    template::TemplateContext,
};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout_at},
};

use crate::{
    config::{CONNECT_TIMEOUT, DestinationConfig},
    fault::{Error, classify},
    link::Link,
};

/// Unknown outcomes that are remembered, at most.
const UNKNOWN_MAX: usize = 8192;

/// Pause between two attempts to connect that a probe may ask for.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// Row headers that speak about one hop of HTTP (contract 7.4).
const HOP_HEADERS: [&str; 11] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "content-encoding",
    "accept-encoding",
];

/// A named exit to subjects.
pub struct NatsDestination {
    inner: Arc<Inner>,
}

struct Inner {
    config: DestinationConfig,
    current: RwLock<Option<Arc<Link>>>,
    gate: Mutex<Gate>,
    unknown: StdMutex<Unknown>,
    closed: AtomicBool,
}

/// Who connects, and when not: publishes do not knock more often than the back-off says.
struct Gate {
    backoff: Backoff,
    last: Option<(Error, Instant)>,
    again_at: Instant,
}

impl NatsDestination {
    /// A destination that connects when it is first needed.
    pub fn new(config: DestinationConfig) -> Self {
        let gate = Gate { backoff: Backoff::connecting(), last: None, again_at: Instant::now() };
        Self {
            inner: Arc::new(Inner {
                config,
                current: RwLock::new(None),
                gate: Mutex::new(gate),
                unknown: StdMutex::default(),
                closed: AtomicBool::new(false),
            }),
        }
    }

    async fn deliver(&self, delivery: &Delivery) -> Result<(), Error> {
        let config = &self.inner.config;
        let given = config.timeout.min(delivery.time_left);
        let deadline = Instant::now() + given;
        let message_id = config.jetstream.then(|| self.inner.message_id(delivery));
        let message = prepare(config, delivery, message_id.as_ref().map(|id| id.text.as_str()))?;
        let link = self.link(deadline, false).await?;
        message.check_size(link.client.max_payload())?;
        let result = match &message_id {
            Some(_) => message.publish(&link, deadline, given).await,
            None => message.write(&link, deadline, given).await,
        };
        if let Some(message_id) = message_id {
            self.inner.learn(delivery, message_id, &result);
        }
        result
    }

    /// The open connection, or one that a task of its own opens: a caller with little time left gives up waiting, not the
    /// attempt.
    async fn link(&self, deadline: Instant, probing: bool) -> Result<Arc<Link>, Error> {
        if let Some(link) = self.inner.usable() {
            return Ok(link);
        }
        let inner = self.inner.clone();
        let opening = tokio::spawn(async move { inner.open(probing).await });
        match timeout_at(deadline, opening).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::NotSent("connecting was cancelled".to_owned())),
            Err(_) => Err(Error::NotSent("still connecting".to_owned())),
        }
    }
}

#[async_trait]
impl Destination for NatsDestination {
    fn kind(&self) -> &'static str {
        "nats"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        self.deliver(&delivery).await.map_err(|error| classify(&error))
    }

    /// Connected and logged in. A silent server is found out by pings within 15 seconds. Streams are not looked at: a subject
    /// without a stream fails its own row (contract 7.5).
    async fn probe(&self) -> Result<(), Fault> {
        let link = self.link(Instant::now() + CONNECT_TIMEOUT, true).await;
        link.map(drop).map_err(|error| classify(&error))
    }

    async fn close(&self) {
        self.inner.closed.store(true, Relaxed);
        let link = self.inner.current.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(link) = link {
            let _ = timeout_at(Instant::now() + self.inner.config.timeout, link.context.wait_for_acks()).await;
            link.close().await;
        }
    }
}

impl Inner {
    fn usable(&self) -> Option<Arc<Link>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|link| link.is_up()).cloned()
    }

    async fn open(&self, probing: bool) -> Result<Arc<Link>, Error> {
        let mut gate = self.gate.lock().await;
        if self.closed.load(Relaxed) {
            return Err(Error::NotSent("the destination is closed".to_owned()));
        }
        if let Some(link) = self.usable() {
            return Ok(link);
        }
        let now = Instant::now();
        if let Some((error, failed_at)) = &gate.last {
            let again_at = if probing { gate.again_at.min(*failed_at + PROBE_PAUSE) } else { gate.again_at };
            if now < again_at {
                return Err(error.clone());
            }
        }
        match Link::open(&self.config.connection, self.config.timeout).await {
            Ok(link) => {
                let link = Arc::new(link);
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(link.clone());
                gate.backoff.reset();
                gate.last = None;
                Ok(link)
            }
            Err(error) => {
                let now = Instant::now();
                gate.again_at = now + gate.backoff.pause();
                gate.last = Some((error.clone(), now));
                Err(error)
            }
        }
    }

    /// See the module head.
    fn message_id(&self, delivery: &Delivery) -> MessageId {
        let repeated = (delivery.attempt > 0)
            .then(|| self.unknown.lock().unwrap_or_else(PoisonError::into_inner).before(delivery.id, delivery.attempt))
            .flatten();
        let repeats = repeated.is_some();
        let text = repeated.unwrap_or_else(|| format!("{}.{:016x}", delivery.id, rand::random::<u64>()));
        MessageId { text, repeats }
    }

    /// The id stays in use from the first unknown outcome until the message is done.
    fn learn(&self, delivery: &Delivery, message_id: MessageId, result: &Result<(), Error>) {
        let class = result.as_ref().err().map(|error| classify(error).class);
        let unknown = || self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        match class {
            // No attempt was spent, so the next one has the same number.
            Some(Class::NotConnected) => {}
            Some(Class::Ambiguous) => unknown().remember(delivery.id, delivery.attempt, message_id.text),
            Some(_) if message_id.repeats => unknown().remember(delivery.id, delivery.attempt, message_id.text),
            None if message_id.repeats => unknown().forget(delivery.id),
            Some(_) | None => {}
        }
    }
}

/// A `Nats-Msg-Id`.
struct MessageId {
    text: String,
    /// It was used for the attempt before.
    repeats: bool,
}

/// Publishes of this process whose outcome nobody knows: id to attempt and `Nats-Msg-Id`.
#[derive(Default)]
struct Unknown {
    ids: HashMap<Uuid, (i32, String)>,
    order: VecDeque<Uuid>,
}

impl Unknown {
    fn remember(&mut self, id: Uuid, attempt: i32, message_id: String) {
        if self.ids.insert(id, (attempt, message_id)).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > UNKNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }

    /// The id of the attempt just before this one.
    fn before(&self, id: Uuid, attempt: i32) -> Option<String> {
        let (before, message_id) = self.ids.get(&id)?;
        (before.checked_add(1) == Some(attempt)).then(|| message_id.clone())
    }

    fn forget(&mut self, id: Uuid) {
        if self.ids.remove(&id).is_some() {
            self.order.retain(|known| *known != id);
        }
    }
}

/// What a delivery becomes on the wire.
struct Message {
    subject: String,
    headers: HeaderMap,
    header_bytes: usize,
    payload: bytes::Bytes,
}

fn prepare(config: &DestinationConfig, delivery: &Delivery, message_id: Option<&str>) -> Result<Message, Error> {
    let subject = config.subject.render(&TemplateContext::from(delivery)).ok_or(Error::EmptySubject)?;
    check_subject(&subject)?;
    let (headers, header_bytes) = headers(&config.headers, delivery, message_id)?;
    Ok(Message { subject, headers, header_bytes, payload: delivery.payload.clone() })
}

/// The rules for a subject that is published to: no blanks, no control characters, no empty part, no wildcard.
fn check_subject(subject: &str) -> Result<(), Error> {
    let reason = if subject.contains(|c: char| c.is_whitespace() || c.is_control()) {
        "it holds a blank or a control character"
    } else if subject.split('.').any(str::is_empty) {
        "it has an empty part between dots"
    } else if subject.split('.').any(|part| part == "*" || part == ">") {
        "it holds a wildcard"
    } else {
        return Ok(());
    };
    Err(Error::Uncarriable { what: format!("the subject \"{}\"", subject.escape_debug()), reason: reason.to_owned() })
}

/// The destination's headers, the row's, the standard ones; a later one replaces an earlier one of the same name in any
/// case. With their size on the wire.
fn headers(
    own: &[(String, String)],
    delivery: &Delivery,
    message_id: Option<&str>,
) -> Result<(HeaderMap, usize), Error> {
    let id = delivery.id.to_string();
    let attempt = delivery.attempt.to_string();
    let mut all: Vec<(&str, &str)> = Vec::with_capacity(own.len() + delivery.headers.len() + 5);
    let mut set = |name, value| match all.iter_mut().find(|(given, _)| str::eq_ignore_ascii_case(given, name)) {
        Some(earlier) => *earlier = (name, value),
        None => all.push((name, value)),
    };
    for (name, value) in own.iter().chain(&delivery.headers).filter(|(name, _)| !is_kept_back(name)) {
        set(name, value.as_str());
    }
    set("x-message-id", &id);
    set("x-topic", &delivery.topic);
    set("x-attempt", &attempt);
    if let Some(key) = &delivery.key {
        set("x-message-key", key);
    }
    if let Some(message_id) = message_id {
        set("Nats-Msg-Id", message_id);
    }
    let mut map = HeaderMap::new();
    // "NATS/1.0", the line ends and the separators.
    let mut bytes = 12;
    for (name, value) in all {
        let what = || format!("header \"{}\"", name.escape_debug());
        let parsed: async_nats::HeaderName = name.parse().map_err(|_| Error::Uncarriable {
            what: what(),
            reason: "its name has other than visible ASCII".to_owned(),
        })?;
        let text: async_nats::HeaderValue = value
            .parse()
            .map_err(|_| Error::Uncarriable { what: what(), reason: "its value has a line end".to_owned() })?;
        bytes += name.len() + value.len() + 4;
        map.insert(parsed, text);
    }
    Ok((map, bytes))
}

/// Headers about one hop of HTTP, and the server's own.
fn is_kept_back(name: &str) -> bool {
    let starts = |start: &str| name.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start));
    HOP_HEADERS.iter().any(|hop| name.eq_ignore_ascii_case(hop)) || starts("proxy-") || starts("nats-")
}

impl Message {
    fn bytes(&self) -> usize {
        self.payload.len() + self.header_bytes
    }

    /// The server ends the connection over a larger message, so it is never sent.
    fn check_size(&self, max_payload: usize) -> Result<(), Error> {
        if self.bytes() > max_payload {
            return Err(self.too_large(format!("the server takes at most {max_payload} (max_payload)")));
        }
        Ok(())
    }

    fn too_large(&self, limit: String) -> Error {
        Error::TooLarge { bytes: self.bytes(), header_bytes: self.header_bytes, limit }
    }

    /// Until the stream's acknowledgement.
    async fn publish(mut self, link: &Link, deadline: Instant, given: Duration) -> Result<(), Error> {
        let headers = std::mem::take(&mut self.headers);
        let outbound = PublishMessage::build().payload(self.payload.clone()).headers(headers);
        let handing_over = link.context.send_publish(self.subject.clone(), outbound);
        let acknowledgement = match timeout_at(deadline, handing_over).await {
            Ok(Ok(acknowledgement)) => acknowledgement,
            Ok(Err(error)) => return Err(self.not_sent(&error)),
            Err(_) => return Err(Error::NotSent("the connection took no message in time".to_owned())),
        };
        tokio::select! {
            biased;
            answer = timeout_at(deadline, acknowledgement.into_future()) => match answer {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(self.not_acknowledged(link, &error, given)),
                Err(_) => Err(self.too_late(link, given)),
            },
            () = link.lost() => Err(self.lost("the connection ended")),
        }
    }

    /// Without JetStream: until it is written.
    async fn write(mut self, link: &Link, deadline: Instant, given: Duration) -> Result<(), Error> {
        let headers = std::mem::take(&mut self.headers);
        let handing_over = link.client.publish_with_headers(self.subject.clone(), headers, self.payload.clone());
        match timeout_at(deadline, handing_over).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(Error::NotSent(error.to_string())),
            Err(_) => return Err(Error::NotSent("the connection took no message in time".to_owned())),
        }
        tokio::select! {
            biased;
            flushed = timeout_at(deadline, link.client.flush()) => match flushed {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(self.lost(&error.to_string())),
                Err(_) => Err(Error::NoAck { subject: self.subject, after: given }),
            },
            () = link.lost() => Err(self.lost("the connection ended")),
        }
    }

    fn not_sent(self, error: &PublishError) -> Error {
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => self.too_large(error.to_string()),
            _ => Error::NotSent(error.to_string()),
        }
    }

    fn not_acknowledged(self, link: &Link, error: &PublishError, given: Duration) -> Error {
        match error.kind() {
            PublishErrorKind::StreamNotFound => Error::NoStream { subject: self.subject },
            PublishErrorKind::TimedOut => self.too_late(link, given),
            PublishErrorKind::BrokenPipe => self.lost("the connection ended"),
            _ => match jetstream_error(error) {
                Some(refusal) => self.refused(refusal),
                None => self.lost(&format!("the acknowledgement cannot be read: {error}")),
            },
        }
    }

    fn refused(self, refusal: &jetstream::Error) -> Error {
        match refusal.error_code() {
            ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM => {
                self.too_large(format!("more than the max_msg_size of the stream of subject \"{}\"", self.subject))
            }
            ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => {
                self.too_large("a stream takes at most 64 KiB of headers".to_owned())
            }
            _ => Error::Nacked { subject: self.subject, reason: refusal.to_string() },
        }
    }

    /// The server answers a forbidden publish on another way, if at all.
    fn too_late(self, link: &Link, given: Duration) -> Error {
        match link.forbidden(&self.subject) {
            Some(reason) => Error::Forbidden { subject: self.subject, reason },
            None => Error::NoAck { subject: self.subject, after: given },
        }
    }

    fn lost(self, reason: &str) -> Error {
        Error::Lost { subject: self.subject, reason: reason.to_owned() }
    }
}

fn jetstream_error(error: &PublishError) -> Option<&jetstream::Error> {
    std::error::Error::source(error)?.downcast_ref()
}

#[cfg(test)]
mod tests;
