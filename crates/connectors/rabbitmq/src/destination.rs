//! RabbitMQ as a destination: persistent, mandatory, one confirm per message (contract 7.3 to 7.5).
//!
//! A session is one connection with one channel in confirm mode. It is opened by the first publish or probe that needs it,
//! by one task for all of them, and thrown away when its channel ends; the connection is kept if it is still up.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex as StdMutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use lapin::{
    BasicProperties, ExchangeKind,
    options::{ConfirmSelectOptions, ExchangeDeclareOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use queuebox_core::{
    Class, Fault,
    ports::{Delivery, Destination},
    retry::Backoff,
    template::{Address, TemplateContext},
};
use tokio::{
    sync::{Mutex, oneshot},
    time::{Instant, timeout, timeout_at},
};

use crate::{
    config::{CONNECT_TIMEOUT, DeliveryMode, DestinationConfig, ExchangeType},
    fault::{Error, classify},
    link::Link,
    pipe::{Pipe, Publish, Verdict},
};

/// Longest short string of AMQP: names, routing keys, header names.
const SHORT_STRING_BYTES: usize = 255;

/// Names that were declared in one session, at most; more come from templates, and are forgotten and declared again.
const DECLARED_MAX: usize = 10_000;

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

/// A named exit to an exchange.
pub struct RabbitDestination {
    inner: Arc<Inner>,
}

struct Inner {
    config: DestinationConfig,
    current: RwLock<Option<Arc<Session>>>,
    gate: Mutex<Gate>,
    /// Largest payload as the broker once said, in bytes; `usize::MAX` until it did.
    size_max: Arc<AtomicUsize>,
    closed: AtomicBool,
}

/// Who connects, and when not: publishes do not knock more often than the back-off says.
struct Gate {
    backoff: Backoff,
    last: Option<(Error, Instant)>,
    again_at: Instant,
}

impl RabbitDestination {
    /// A destination that connects when it is first needed.
    pub fn new(config: DestinationConfig) -> Self {
        let gate = Gate { backoff: Backoff::connecting(), last: None, again_at: Instant::now() };
        Self {
            inner: Arc::new(Inner {
                config,
                current: RwLock::new(None),
                gate: Mutex::new(gate),
                size_max: Arc::new(AtomicUsize::new(usize::MAX)),
                closed: AtomicBool::new(false),
            }),
        }
    }

    async fn deliver(&self, delivery: &Delivery) -> Result<(), Error> {
        let given = self.inner.config.timeout.min(delivery.time_left);
        let deadline = Instant::now() + given;
        let message = self.inner.prepare(delivery)?;
        let mut offered = None;
        let error = loop {
            match self.offer(delivery, &message, deadline).await {
                Ok(Some(answer)) => match timeout_at(deadline, answer).await {
                    // Another message was too large, and the broker ended the channel over it. That one is known by now,
                    // and this one has nothing to do with it. It may have arrived, so this may be a duplicate.
                    Ok(Ok(Verdict::Collateral(reason))) => offered = Some(reason),
                    Ok(Ok(Verdict::NotOffered)) => {}
                    answer => return message.outcome(answer.ok(), given),
                },
                Ok(None) => {}
                Err(error) => break error,
            }
            if Instant::now() >= deadline {
                break Error::NotSent("the channel ended".to_owned());
            }
        };
        // Once the message was on a channel, nothing says for certain that it did not arrive.
        match offered {
            Some(reason) if classify(&error).class == Class::NotConnected => {
                Err(Error::Lost { exchange: message.exchange.to_string(), reason: format!("{reason}; then {error}") })
            }
            _ => Err(error),
        }
    }

    /// Hands the message to a channel. `None`: the channel ended before it had the message; there may be another.
    async fn offer(
        &self,
        delivery: &Delivery,
        message: &Message,
        deadline: Instant,
    ) -> Result<Option<oneshot::Receiver<Verdict>>, Error> {
        self.inner.check_size(delivery)?;
        let session = self.session(deadline, false).await?;
        if session.link.is_blocked() {
            return Err(Error::Blocked { peer: session.link.peer.clone() });
        }
        message.check_headers(session.link.frame_max())?;
        session.require(&self.inner.config, &message.exchange, deadline).await?;
        let (verdict, answer) = oneshot::channel();
        match timeout_at(deadline, session.pipe.send(message.publish(delivery, verdict))).await {
            Ok(Ok(())) => Ok(Some(answer)),
            Ok(Err(_)) => Ok(None),
            Err(_) => Err(Error::NotSent("the channel took no message in time".to_owned())),
        }
    }

    /// The open session, or one that a task of its own opens: a caller with little time left gives up waiting, not the
    /// attempt.
    async fn session(&self, deadline: Instant, probing: bool) -> Result<Arc<Session>, Error> {
        if let Some(session) = self.inner.usable() {
            return Ok(session);
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
impl Destination for RabbitDestination {
    fn kind(&self) -> &'static str {
        "rabbitmq"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        self.deliver(&delivery).await.map_err(|error| classify(&error))
    }

    /// One round trip to the broker: declares the exchange, or opens a channel where its name differs from row to row.
    async fn probe(&self) -> Result<(), Fault> {
        let check = async {
            let session = self.session(Instant::now() + CONNECT_TIMEOUT, true).await?;
            if session.link.is_blocked() {
                return Err(Error::Blocked { peer: session.link.peer.clone() });
            }
            let result = match self.inner.fixed_exchange() {
                Some(exchange) => session.declare(&self.inner.config, &exchange?, CONNECT_TIMEOUT).await,
                None => session.greet().await,
            };
            if let Err(Error::Unreachable { .. }) = result {
                session.link.abandon();
            }
            result
        };
        check.await.map_err(|error| classify(&error))
    }

    async fn close(&self) {
        self.inner.closed.store(true, Relaxed);
        let session = self.inner.current.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(session) = session {
            session.drain(self.inner.config.timeout).await;
            session.link.close().await;
        }
    }
}

impl Inner {
    fn usable(&self) -> Option<Arc<Session>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|session| session.is_usable()).cloned()
    }

    async fn open(&self, probing: bool) -> Result<Arc<Session>, Error> {
        let mut gate = self.gate.lock().await;
        if self.closed.load(Relaxed) {
            return Err(Error::NotSent("the destination is closed".to_owned()));
        }
        if let Some(session) = self.usable() {
            return Ok(session);
        }
        let now = Instant::now();
        if let Some((error, failed_at)) = &gate.last {
            let again_at = if probing { gate.again_at.min(*failed_at + PROBE_PAUSE) } else { gate.again_at };
            if now < again_at {
                return Err(error.clone());
            }
        }
        let former = self.current.write().unwrap_or_else(PoisonError::into_inner).take();
        match Session::open(&self.config, former, self.size_max.clone()).await {
            Ok(session) => {
                let session = Arc::new(session);
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(session.clone());
                gate.backoff.reset();
                gate.last = None;
                Ok(session)
            }
            Err(error) => {
                let now = Instant::now();
                gate.again_at = now + gate.backoff.pause();
                gate.last = Some((error.clone(), now));
                Err(error)
            }
        }
    }

    /// The exchange, when it is the same for every row.
    fn fixed_exchange(&self) -> Option<Result<ShortString, Error>> {
        fixed(&self.config.exchange).map(|exchange| short("the exchange", exchange))
    }

    fn check_size(&self, delivery: &Delivery) -> Result<(), Error> {
        let (bytes, limit) = (delivery.payload.len(), self.size_max.load(Relaxed));
        if bytes > limit { Err(Error::TooLarge { bytes, limit }) } else { Ok(()) }
    }

    fn prepare(&self, delivery: &Delivery) -> Result<Message, Error> {
        let context = TemplateContext::from(delivery);
        let exchange = self.config.exchange.render(&context).ok_or(Error::EmptyExchange)?;
        let routing_key = delivery.routing_key.as_deref().unwrap_or(&self.config.routing_key).render(&context);
        let exchange = short("the exchange", &exchange)?;
        let routing_key = short("the routing key", &routing_key)?;
        let (headers, header_bytes) = headers(&self.config.headers, delivery)?;
        let mode = match self.config.delivery_mode {
            DeliveryMode::Persistent => 2,
            DeliveryMode::Transient => 1,
        };
        let properties = BasicProperties::default()
            .with_message_id(short("the message id", &delivery.id.to_string())?)
            .with_content_type("application/json".into())
            .with_delivery_mode(mode)
            .with_headers(headers);
        Ok(Message { exchange, routing_key, properties, header_bytes })
    }
}

/// What a delivery becomes on the wire.
struct Message {
    exchange: ShortString,
    routing_key: ShortString,
    properties: BasicProperties,
    header_bytes: usize,
}

impl Message {
    /// All properties must fit into one frame; the broker ends the connection over more.
    fn check_headers(&self, frame_max: usize) -> Result<(), Error> {
        // Frame, content header and the other properties need less than this.
        let limit = frame_max.saturating_sub(256);
        if frame_max > 0 && self.header_bytes > limit {
            return Err(Error::TooLong { what: "the header table".to_owned(), bytes: self.header_bytes, limit });
        }
        Ok(())
    }

    fn publish(&self, delivery: &Delivery, verdict: oneshot::Sender<Verdict>) -> Publish {
        Publish {
            id: delivery.id,
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            properties: self.properties.clone(),
            body: delivery.payload.clone(),
            verdict,
        }
    }

    /// `None` = no answer in time; an answer that is no verdict = the channel's task is gone.
    fn outcome(self, answer: Option<Result<Verdict, oneshot::error::RecvError>>, given: Duration) -> Result<(), Error> {
        let exchange = self.exchange.to_string();
        match answer {
            Some(Ok(Verdict::Confirmed)) => Ok(()),
            Some(Ok(Verdict::Nacked)) => Err(Error::Nacked { exchange }),
            Some(Ok(Verdict::Returned { code, text })) => {
                Err(Error::Returned { code, text, exchange, routing_key: self.routing_key.to_string() })
            }
            Some(Ok(Verdict::TooLarge { bytes, limit })) => Err(Error::TooLarge { bytes, limit }),
            Some(Ok(Verdict::NotOffered)) => Err(Error::NotSent("the channel ended".to_owned())),
            Some(Ok(Verdict::Lost(reason) | Verdict::Collateral(reason))) => Err(Error::Lost { exchange, reason }),
            Some(Err(_)) => Err(Error::Lost { exchange, reason: "the channel ended".to_owned() }),
            None => Err(Error::NoConfirm { exchange, after: given }),
        }
    }
}

/// The address, when it is the same for every row.
fn fixed(address: &Address) -> Option<&str> {
    match address {
        Address::Template(template) if template.placeholders().next().is_none() => Some(template.as_str()),
        Address::Template(_) | Address::Column(_) => None,
    }
}

fn short(what: &str, text: &str) -> Result<ShortString, Error> {
    ShortString::try_new(text).map_err(|_| Error::TooLong {
        what: what.to_owned(),
        bytes: text.len(),
        limit: SHORT_STRING_BYTES,
    })
}

/// The destination's headers, the row's, the standard ones; a later one replaces an earlier one of the same name in any
/// case. With their size in a frame.
fn headers(own: &[(String, String)], delivery: &Delivery) -> Result<(FieldTable, usize), Error> {
    let mut all: Vec<(&str, AMQPValue)> = Vec::with_capacity(own.len() + delivery.headers.len() + 2);
    let mut set = |name, value| match all.iter_mut().find(|(given, _)| str::eq_ignore_ascii_case(given, name)) {
        Some(earlier) => *earlier = (name, value),
        None => all.push((name, value)),
    };
    for (name, value) in own.iter().chain(delivery.headers.iter().filter(|(name, _)| !is_hop_header(name))) {
        set(name, AMQPValue::LongString(value.as_str().into()));
    }
    set("x-topic", AMQPValue::LongString(delivery.topic.as_str().into()));
    set("x-attempt", AMQPValue::LongInt(delivery.attempt));
    let mut table = FieldTable::default();
    let mut bytes = 0;
    for (name, value) in all {
        bytes += 6 + name.len() + if let AMQPValue::LongString(text) = &value { text.len() } else { 4 };
        table.insert(short("a header name", name)?, value);
    }
    Ok((table, bytes))
}

fn is_hop_header(name: &str) -> bool {
    HOP_HEADERS.iter().any(|hop| name.eq_ignore_ascii_case(hop))
        || name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("proxy-"))
}

/// One connection, one channel in confirm mode, and the exchanges that were seen to exist.
struct Session {
    link: Arc<Link>,
    pipe: Pipe,
    exchanges: StdMutex<HashSet<ShortString>>,
    declaring: Mutex<()>,
}

impl Session {
    /// Keeps the connection of the former session when only its channel ended.
    async fn open(
        config: &DestinationConfig,
        former: Option<Arc<Self>>,
        size_max: Arc<AtomicUsize>,
    ) -> Result<Self, Error> {
        let link = match former.map(|former| former.link.clone()).filter(|link| link.is_up()) {
            Some(link) => link,
            None => {
                // Another broker may have another limit, or this one a new limit.
                size_max.store(usize::MAX, Relaxed);
                Arc::new(Link::open(&config.connection).await?)
            }
        };
        let start = async {
            let channel = link.channel(CONNECT_TIMEOUT).await?;
            link.within(CONNECT_TIMEOUT, channel.confirm_select(ConfirmSelectOptions::default())).await?;
            Ok(channel)
        };
        let channel = start.await.map_err(|reason| {
            link.abandon();
            Error::Unreachable { peer: link.peer.clone(), phase: "opening a channel", reason }
        })?;
        let sizes = Arc::new(move |limit| size_max.store(limit, Relaxed));
        let pipe = Pipe::start(channel, sizes);
        Ok(Self { link, pipe, exchanges: StdMutex::default(), declaring: Mutex::new(()) })
    }

    fn is_usable(&self) -> bool {
        self.link.is_up() && !self.pipe.is_closed()
    }

    /// Sees to it that the exchange exists, once per session.
    async fn require(
        &self,
        config: &DestinationConfig,
        exchange: &ShortString,
        deadline: Instant,
    ) -> Result<(), Error> {
        if self.knows(exchange) {
            return Ok(());
        }
        let Ok(_one_at_a_time) = timeout_at(deadline, self.declaring.lock()).await else {
            return Err(Error::NotSent("the exchange is still being declared".to_owned()));
        };
        if self.knows(exchange) {
            return Ok(());
        }
        let limit = deadline.saturating_duration_since(Instant::now()).min(CONNECT_TIMEOUT);
        self.declare(config, exchange, limit).await
    }

    fn knows(&self, exchange: &ShortString) -> bool {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner).contains(exchange)
    }

    /// Declares on a channel of its own: the broker ends the channel over a refusal, and unconfirmed messages with it.
    async fn declare(&self, config: &DestinationConfig, exchange: &ShortString, limit: Duration) -> Result<(), Error> {
        let unreachable =
            |reason| Error::Unreachable { peer: self.link.peer.clone(), phase: "declaring the exchange", reason };
        let channel = self.link.channel(limit).await.map_err(unreachable)?;
        let kind = match config.exchange_type {
            ExchangeType::Topic => ExchangeKind::Topic,
            ExchangeType::Direct => ExchangeKind::Direct,
            ExchangeType::Fanout => ExchangeKind::Fanout,
        };
        let options = ExchangeDeclareOptions {
            durable: true,
            passive: !config.declare_exchange,
            ..ExchangeDeclareOptions::default()
        };
        let declaring = channel.exchange_declare(exchange.clone(), kind, options, FieldTable::default());
        let declared = timeout(limit, declaring).await;
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        match declared {
            Ok(Ok(())) => {
                if exchanges.len() >= DECLARED_MAX {
                    exchanges.clear();
                }
                exchanges.insert(exchange.clone());
                Ok(())
            }
            Ok(Err(error)) if crate::link::reply_code(&error).is_some() => {
                exchanges.remove(exchange);
                Err(Error::Exchange {
                    exchange: exchange.to_string(),
                    reason: crate::link::words(&error),
                    declared: fixed(&config.exchange).is_some(),
                })
            }
            Ok(Err(error)) => Err(unreachable(crate::link::words(&error))),
            Err(_) => Err(unreachable(format!("no answer within {} ms", limit.as_millis()))),
        }
    }

    /// One round trip.
    async fn greet(&self) -> Result<(), Error> {
        let opened = self.link.channel(CONNECT_TIMEOUT).await;
        opened.map(drop).map_err(|reason| Error::Unreachable {
            peer: self.link.peer.clone(),
            phase: "opening a channel",
            reason,
        })
    }

    /// Waits for the confirms that are still to come.
    async fn drain(&self, limit: Duration) {
        let _ = timeout(limit, self.pipe.finish()).await;
    }
}

#[cfg(test)]
mod tests;
