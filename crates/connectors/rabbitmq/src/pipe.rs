//! One channel in confirm mode with many unconfirmed messages on it, and one verdict for each.
//!
//! The broker returns an unroutable message before it confirms it, and may confirm many messages with one frame. The client
//! library hands each return to whichever confirm it settles next, which need not be the returned message's own: under a
//! multiple confirm it settles in no order at all. So a return is matched here by the message id that it carries, and a
//! confirm counts only when no return for it can still be under way:
//!
//! - A confirm that carries no return: at that moment the library's queue of returns was empty, so a return for this message
//!   was already handed to a confirm that was settled *earlier*. One look at everything that is settled finds it.
//! - A confirm that carries a return of another message: its own may still be in the queue. It waits until a later confirm
//!   comes without a return, or until nothing is unconfirmed. One of the two always happens: there are as many confirms as
//!   messages, and fewer returns than confirms as soon as one message was routed.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use bytes::Bytes;
use futures::{StreamExt, future::poll_fn, stream::FuturesUnordered, task::AtomicWaker};
use lapin::{
    BasicProperties, Channel, Confirmation, message::BasicReturnMessage, options::BasicPublishOptions,
    types::ShortString,
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::link::{reply_code, words};

/// Messages on their way to the channel.
const QUEUE: usize = 1024;

/// Unconfirmed messages on one channel, those included that nobody waits for any more. More than any sensible
/// `maxInFlight`; with so many a broker does not confirm any longer, and the channel is given up.
const UNCONFIRMED_MAX: usize = 16_384;

/// A message for the channel.
pub(crate) struct Publish {
    pub(crate) id: Uuid,
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
    pub(crate) verdict: oneshot::Sender<Verdict>,
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Confirmed,
    Nacked,
    Returned {
        code: u16,
        text: String,
    },
    /// The broker closes channels over larger messages.
    TooLarge {
        bytes: usize,
        limit: usize,
    },
    /// The channel ended before it had the message.
    NotOffered,
    /// The channel ended over the size of another message.
    Collateral(String),
    /// The channel ended first.
    Lost(String),
}

/// Hands messages to a running channel.
pub(crate) struct Pipe {
    messages: mpsc::Sender<Publish>,
    finish: CancellationToken,
    finished: CancellationToken,
}

impl Pipe {
    /// Starts on a channel in confirm mode. `sizes` hears the limit that the broker names when it refuses a message.
    pub(crate) fn start(channel: Channel, sizes: Arc<dyn Fn(usize) + Send + Sync>) -> Self {
        let (sender, messages) = mpsc::channel(QUEUE);
        let (finish, finished) = (CancellationToken::new(), CancellationToken::new());
        let flow = Flow { channel, messages, unconfirmed: FuturesUnordered::new(), woken: Arc::default(), sizes };
        let (asked, done) = (finish.clone(), finished.clone().drop_guard());
        tokio::spawn(async move {
            flow.run(asked).await;
            drop(done);
        });
        Self { messages: sender, finish, finished }
    }

    /// True once the channel has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.messages.is_closed()
    }

    /// The message back, when the channel has ended before it was handed over.
    pub(crate) async fn send(&self, message: Publish) -> Result<(), Publish> {
        self.messages.send(message).await.map_err(|returned| returned.0)
    }

    /// Takes no more messages and waits for the confirms that are still to come.
    pub(crate) async fn finish(&self) {
        self.finish.cancel();
        self.finished.cancelled().await;
    }
}

type Sending = Pin<Box<dyn Future<Output = Settled> + Send>>;

struct Settled {
    ticket: Ticket,
    confirmation: lapin::Result<Confirmation>,
}

struct Ticket {
    id: Uuid,
    bytes: usize,
    verdict: oneshot::Sender<Verdict>,
}

struct Flow {
    channel: Channel,
    messages: mpsc::Receiver<Publish>,
    unconfirmed: FuturesUnordered<Sending>,
    woken: Arc<Woken>,
    sizes: Arc<dyn Fn(usize) + Send + Sync>,
}

impl Flow {
    /// Ends with the channel, or when every handle is gone and everything is confirmed.
    async fn run(mut self, finish: CancellationToken) {
        let mut judge = Judge::default();
        let mut open = true;
        let mut finishing = false;
        let mut end = None;
        while end.is_none() && (open || !self.unconfirmed.is_empty()) {
            let (unconfirmed, woken) = (&mut self.unconfirmed, &self.woken);
            tokio::select! {
                biased;
                settled = poll_fn(|cx| look(unconfirmed, woken, cx)), if !unconfirmed.is_empty() => {
                    let (confirmed, mut lost) = split(settled);
                    end = lost.first().map(|(_, error)| error.clone());
                    judge.decide(confirmed, lost.is_empty() && self.unconfirmed.is_empty());
                    judge.lost.extend(lost.drain(..).map(|(ticket, _)| ticket));
                }
                message = self.messages.recv(), if open => match message {
                    Some(message) => {
                        self.send(message);
                        while let Ok(message) = self.messages.try_recv() {
                            self.send(message);
                        }
                        if self.unconfirmed.len() > UNCONFIRMED_MAX {
                            break;
                        }
                    }
                    None => open = false,
                },
                () = finish.cancelled(), if !finishing => {
                    finishing = true;
                    self.messages.close();
                }
            }
        }
        self.messages.close();
        while let Ok(message) = self.messages.try_recv() {
            let _ = message.verdict.send(Verdict::NotOffered);
        }
        match end {
            Some(error) => self.fail(judge, &error).await,
            None => judge.lose(&format!("RabbitMQ leaves more than {UNCONFIRMED_MAX} messages unconfirmed")),
        }
    }

    /// The frames are handed over when the future is first polled, in the order of the calls.
    fn send(&mut self, message: Publish) {
        let Publish { id, exchange, routing_key, properties, body, verdict } = message;
        if verdict.is_closed() {
            return;
        }
        if !self.channel.status().connected() {
            let _ = verdict.send(Verdict::NotOffered);
            return;
        }
        let channel = self.channel.clone();
        let ticket = Ticket { id, bytes: body.len(), verdict };
        self.unconfirmed.push(Box::pin(async move {
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let confirmation = match channel.basic_publish(exchange, routing_key, options, &body, properties).await {
                Ok(confirm) => confirm.await,
                Err(error) => Err(error),
            };
            Settled { ticket, confirmation }
        }));
    }

    /// The channel has failed: everything unconfirmed is lost, but for a message that the broker named by its size.
    async fn fail(mut self, mut judge: Judge, error: &lapin::Error) {
        let mut rest = Vec::new();
        while let Some(settled) = self.unconfirmed.next().await {
            rest.push(settled);
        }
        let (confirmed, lost) = split(rest);
        judge.decide(confirmed, false);
        judge.lost.extend(lost.into_iter().map(|(ticket, _)| ticket));
        let reason = words(error);
        judge.too_large = (reply_code(error) == Some(406)).then(|| size_limit(&reason)).flatten();
        if let Some((_, limit)) = judge.too_large {
            (self.sizes)(limit);
        }
        judge.lose(&reason);
    }
}

type Split = (Vec<(Ticket, Confirmation)>, Vec<(Ticket, lapin::Error)>);

fn split(settled: Vec<Settled>) -> Split {
    let mut split = Split::default();
    for Settled { ticket, confirmation } in settled {
        match confirmation {
            Ok(confirmation) => split.0.push((ticket, confirmation)),
            Err(error) => split.1.push((ticket, error)),
        }
    }
    split
}

/// `message size 200 is larger than configured max size 100`.
fn size_limit(reason: &str) -> Option<(usize, usize)> {
    let rest = reason.split_once("message size ")?.1;
    let (size, rest) = rest.split_once(" is larger than configured max size ")?;
    let limit: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((size.parse().ok()?, limit.parse().ok()?))
}

/// Remembers a wake-up that comes while the set is looked at.
#[derive(Default)]
struct Woken {
    during: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.during.store(true, Ordering::SeqCst);
        self.task.wake();
    }
}

/// Everything that is settled by now. The set gives way after a while although it has more, and says so by waking itself;
/// the rule of this module needs all of it.
fn look(unconfirmed: &mut FuturesUnordered<Sending>, woken: &Arc<Woken>, cx: &Context<'_>) -> Poll<Vec<Settled>> {
    woken.task.register(cx.waker());
    let waker = Waker::from(woken.clone());
    let mut inner = Context::from_waker(&waker);
    let mut settled = Vec::new();
    loop {
        woken.during.store(false, Ordering::SeqCst);
        while let Poll::Ready(Some(one)) = unconfirmed.poll_next_unpin(&mut inner) {
            settled.push(one);
        }
        if !woken.during.load(Ordering::SeqCst) {
            break;
        }
    }
    if settled.is_empty() { Poll::Pending } else { Poll::Ready(settled) }
}

/// Matches returns to messages.
#[derive(Default)]
struct Judge {
    returned: HashMap<Uuid, Verdict>,
    undecided: Vec<(Ticket, Verdict)>,
    lost: Vec<Ticket>,
    too_large: Option<(usize, usize)>,
}

impl Judge {
    /// `confirmed` is all that was confirmed since the last call; `idle` says that nothing is unconfirmed now.
    fn decide(&mut self, confirmed: Vec<(Ticket, Confirmation)>, idle: bool) {
        let mut certain = Vec::new();
        let mut open = Vec::new();
        for (ticket, confirmation) in confirmed {
            let (verdict, returned) = match confirmation {
                Confirmation::Ack(returned) => (Verdict::Confirmed, returned),
                Confirmation::Nack(returned) => (Verdict::Nacked, returned),
                Confirmation::NotRequested => (Verdict::Confirmed, None),
            };
            match returned {
                None => certain.push((ticket, verdict)),
                Some(message) => {
                    self.note(&message);
                    open.push((ticket, verdict));
                }
            }
        }
        // A confirm without a return in this look came after everything of earlier looks.
        if idle || !certain.is_empty() {
            certain.append(&mut self.undecided);
        }
        if idle {
            certain.append(&mut open);
        }
        for (ticket, verdict) in certain {
            let verdict = self.returned.remove(&ticket.id).unwrap_or(verdict);
            answer(ticket, verdict);
        }
        self.undecided.append(&mut open);
        for (ticket, verdict) in std::mem::take(&mut self.undecided) {
            match self.returned.remove(&ticket.id) {
                Some(returned) => answer(ticket, returned),
                None => self.undecided.push((ticket, verdict)),
            }
        }
        if idle {
            self.returned.clear();
        }
    }

    fn note(&mut self, message: &BasicReturnMessage) {
        let id = message.delivery.properties.message_id().as_ref().and_then(|id| Uuid::parse_str(id.as_str()).ok());
        if let Some(id) = id {
            let text = message.reply_text.to_string();
            self.returned.insert(id, Verdict::Returned { code: message.reply_code, text });
        }
    }

    /// The channel has ended. What was confirmed but undecided is lost too: its return may have been under way.
    fn lose(mut self, reason: &str) {
        let undecided = self.undecided.into_iter().map(|(ticket, _)| ticket);
        for ticket in self.lost.into_iter().chain(undecided) {
            let verdict = match self.too_large {
                Some((bytes, limit)) if ticket.bytes == bytes => Verdict::TooLarge { bytes, limit },
                Some(_) => self.returned.remove(&ticket.id).unwrap_or_else(|| Verdict::Collateral(reason.to_owned())),
                None => self.returned.remove(&ticket.id).unwrap_or_else(|| Verdict::Lost(reason.to_owned())),
            };
            answer(ticket, verdict);
        }
    }
}

/// Nobody may be waiting any more.
fn answer(ticket: Ticket, verdict: Verdict) {
    let _ = ticket.verdict.send(verdict);
}

#[cfg(test)]
mod tests;
