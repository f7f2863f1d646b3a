//! What every broker source must do against its real broker (laws in `queuebox_core::ports::source`, contract 6.3, 6.7).
//!
//! Invariants of the suite: a test sees the broker only through the source and through [`SourceHarness`]; it owns the
//! queue, topic or stream that it reads; it waits for events, never for a time, and its bounds only guard against hanging.
//!
//! A backend implements [`SourceHarness`] in its `tests/it` and expands [`source_tests!`](crate::source_tests).

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::FutureExt;
use queuebox_core::{
    Fault, Uuid,
    ports::{Admission, Intake, Received, Source, source::SourceHealth},
};
use tokio::{sync::watch, task::JoinHandle};

pub use crate::destination::{HANG, Trouble, bounded, until};

/// The bound on unacknowledged messages that the harness gives its sources.
pub const UNACKNOWLEDGED_MAX: usize = 20;

/// A message for the broker.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    /// The body's bytes.
    pub body: Vec<u8>,
    /// Headers as far as the protocol has them.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Record key, where the protocol has one.
    pub key: Option<String>,
}

/// What a broker can do. Tests that need more return at once.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities {
    /// Header values are bytes.
    pub byte_headers: bool,
    /// After a failed message of a queue or partition no later one of it is acknowledged.
    pub stops_at_a_failure: bool,
    /// The object can be removed and made again while the source runs.
    pub objects: bool,
}

/// One queue, topic or stream of one test, with a way to disturb the connection to it.
#[async_trait]
pub trait SourceHarness: Sized + Send + Sync + 'static {
    /// Makes the object, with one partition where there are such, and a way to it.
    async fn start() -> Self;

    /// A new source on the object: same group or durable every time, [`UNACKNOWLEDGED_MAX`], from the oldest message on.
    async fn source(&self) -> Arc<dyn Source>;

    /// Publishes, past the trouble, in order, and waits until the broker has all of it.
    async fn publish(&self, messages: Vec<Outgoing>);

    /// Messages that are not acknowledged: those that wait and those that are handed out.
    async fn outstanding(&self) -> u64;

    /// Makes trouble, or ends it.
    async fn trouble(&self, trouble: Trouble);

    /// Removes the object.
    async fn remove_object(&self);

    /// Makes it again, empty, with whatever the source does not make by itself.
    async fn make_object(&self);

    /// Part of the object's name that health must tell.
    fn object_name(&self) -> String;

    /// What the broker can do.
    fn capabilities(&self) -> Capabilities;
}

/// Expands the whole suite into tests for one harness type.
///
/// ```ignore
/// mod source_contract { queuebox_conformance::source_tests!(super::KafkaHarness); }
/// ```
#[macro_export]
macro_rules! source_tests {
    ($harness:ty) => {
        $crate::source_tests!(@each $harness;
            messages_are_stored_and_acknowledged
            messages_come_in_order
            nothing_is_acknowledged_before_the_answer
            duplicates_and_filtered_ones_are_acknowledged
            a_failed_store_comes_again
            nothing_is_acknowledged_past_a_failure
            a_failing_store_is_met_with_pauses
            unacknowledged_messages_are_bounded
            headers_and_bodies_are_whole
            what_is_not_acknowledged_comes_after_a_restart
            run_ends_with_a_hanging_intake
            run_ends_while_the_broker_is_away
            run_ends_while_the_broker_is_silent
            a_cut_connection_is_made_again
            a_broker_that_was_away_is_used_again
            a_removed_object_is_named_and_used_again
        );
    };
    (@each $harness:ty; $($name:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $crate::source::$name::<$harness>().await;
            }
        )*
    };
}

/// What the intake of a test does with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Stores it; a body that is stored already is a duplicate.
    Take,
    /// Drops it.
    Filter,
    /// Fails.
    Fail,
}

type Decide = dyn Fn(&Received) -> Answer + Send + Sync;

#[derive(Default)]
struct Seen {
    /// Every message of every batch, in order, with its time.
    log: Vec<(Instant, Received, Answer)>,
    stored: HashMap<Vec<u8>, Uuid>,
}

/// An intake that stores in memory, and fails or hangs when it is told to.
pub struct FakeIntake {
    seen: Mutex<Seen>,
    decide: Mutex<Arc<Decide>>,
    /// Counts handled batches, so that waiting for one needs no polling.
    changes: watch::Sender<u64>,
    held: watch::Sender<bool>,
    /// Messages inside `admit`, and the most there ever were.
    inside: Mutex<(usize, usize)>,
    arrivals: watch::Sender<u64>,
}

impl FakeIntake {
    /// Takes everything.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            seen: Mutex::default(),
            decide: Mutex::new(Arc::new(|_| Answer::Take)),
            changes: watch::channel(0).0,
            held: watch::channel(false).0,
            inside: Mutex::default(),
            arrivals: watch::channel(0).0,
        })
    }

    /// From now on `decide` says what happens.
    pub fn decide(&self, decide: impl Fn(&Received) -> Answer + Send + Sync + 'static) {
        *self.decide.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(decide);
    }

    /// From now on every batch waits inside until [`FakeIntake::release`].
    pub fn hold(&self) {
        self.held.send_replace(true);
    }

    /// Lets everything go on.
    pub fn release(&self) {
        self.held.send_replace(false);
    }

    /// Bodies that are stored.
    pub fn stored(&self) -> HashSet<Vec<u8>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).stored.keys().cloned().collect()
    }

    /// Every message so far, in order, with what became of it.
    pub fn log(&self) -> Vec<(Instant, Received, Answer)> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).log.clone()
    }

    /// The most messages that ever were inside at the same time.
    pub fn inside_max(&self) -> usize {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Waits until `count` bodies are stored.
    pub async fn stores(&self, count: usize) {
        self.wait(&format!("{count} stored"), |seen| seen.stored.len() >= count).await;
    }

    /// Waits until `count` answers of this kind were given.
    pub async fn answers(&self, answer: Answer, count: usize) {
        let what = format!("{count} times {answer:?}");
        self.wait(&what, |seen| seen.log.iter().filter(|(_, _, given)| *given == answer).count() >= count).await;
    }

    /// Waits until so many messages are inside.
    pub async fn holds(&self, count: usize) {
        let mut arrivals = self.arrivals.subscribe();
        bounded(&format!("{count} messages with the intake"), async {
            while self.inside.lock().unwrap_or_else(PoisonError::into_inner).0 < count {
                arrivals.changed().await.expect("the intake lives");
            }
        })
        .await;
    }

    async fn wait(&self, what: &str, mut reached: impl FnMut(&Seen) -> bool) {
        let mut changes = self.changes.subscribe();
        bounded(what, async {
            while !reached(&self.seen.lock().unwrap_or_else(PoisonError::into_inner)) {
                changes.changed().await.expect("the intake lives");
            }
        })
        .await;
    }

    fn enter(&self, count: usize) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.0 += count;
        inside.1 = inside.1.max(inside.0);
        self.arrivals.send_modify(|arrivals| *arrivals += 1);
    }

    fn leave(&self, count: usize) {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).0 -= count;
    }
}

#[async_trait]
impl Intake for FakeIntake {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        self.enter(batch.len());
        let _ = self.held.subscribe().wait_for(|held| !held).await;
        let decide = self.decide.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answers = Vec::with_capacity(batch.len());
        for message in batch {
            let answer = decide(&message);
            answers.push(match answer {
                Answer::Fail => Admission::Failed(Fault::transient("test", "told to fail")),
                Answer::Filter => Admission::Filtered,
                Answer::Take if seen.stored.contains_key(message.body.as_ref()) => Admission::Duplicate,
                Answer::Take => {
                    let id = Uuid::new_v4();
                    seen.stored.insert(message.body.to_vec(), id);
                    Admission::Stored(id)
                }
            });
            seen.log.push((Instant::now(), message, answer));
        }
        drop(seen);
        self.leave(answers.len());
        self.changes.send_modify(|changes| *changes += 1);
        answers
    }
}

/// A source that runs, with its intake.
pub struct Running {
    /// The intake behind it.
    pub intake: Arc<FakeIntake>,
    /// The source itself.
    pub source: Arc<dyn Source>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Running {
    /// Runs `source` before `intake`.
    pub fn start(source: Arc<dyn Source>, intake: Arc<FakeIntake>) -> Self {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let task = {
            let (source, intake) = (source.clone(), intake.clone());
            tokio::spawn(async move { source.run(intake, stopped.map(|_| ()).boxed()).await })
        };
        Self { intake, source, stop: Some(stop), task }
    }

    /// Stops it and waits for its end, which must come by itself.
    pub async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        bounded("the end of run", self.task).await.expect("no panic");
    }

    /// Waits until it receives.
    pub async fn is_up(&self) {
        until("the source is up", || async { (self.source.health() == SourceHealth::Up).then_some(()) }).await;
    }

    /// Waits until it does not receive, and returns why.
    pub async fn is_down(&self) -> String {
        until("the source is down", || async {
            match self.source.health() {
                SourceHealth::Up => None,
                SourceHealth::Down(why) => Some(why),
            }
        })
        .await
    }
}

/// Bodies `{"id":"<n>"}`.
pub fn numbered(range: std::ops::Range<usize>) -> Vec<Outgoing> {
    range.map(|n| Outgoing { body: body(n), ..Outgoing::default() }).collect()
}

fn body(n: usize) -> Vec<u8> {
    format!(r#"{{"id":"{n}"}}"#).into_bytes()
}

async fn run<H: SourceHarness>(harness: &H) -> Running {
    Running::start(harness.source().await, FakeIntake::new())
}

async fn all_acknowledged<H: SourceHarness>(harness: &H) {
    until("everything acknowledged", || async { (harness.outstanding().await == 0).then_some(()) }).await;
}

/// Contract 6.1: stored, then acknowledged.
pub async fn messages_are_stored_and_acknowledged<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    harness.publish(numbered(0..50)).await;
    running.intake.stores(50).await;
    all_acknowledged(&harness).await;
    running.is_up().await;
    running.stop().await;
}

/// A queue or partition is handed on in its order.
pub async fn messages_come_in_order<H: SourceHarness>() {
    let harness = H::start().await;
    harness.publish(numbered(0..500)).await;
    let running = run(&harness).await;
    running.intake.stores(500).await;
    let bodies: Vec<Vec<u8>> = running.intake.log().into_iter().map(|(_, message, _)| message.body.to_vec()).collect();
    assert_eq!(bodies, (0..500).map(body).collect::<Vec<_>>());
    running.stop().await;
}

/// Contract 6.1: acknowledgement only after the commit.
pub async fn nothing_is_acknowledged_before_the_answer<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.hold();
    harness.publish(numbered(0..5)).await;
    running.intake.holds(5).await;
    assert_eq!(harness.outstanding().await, 5);
    running.intake.release();
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// Contract 6.6, 6.7: both are done with.
pub async fn duplicates_and_filtered_ones_are_acknowledged<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.decide(|message| if message.body.as_ref() == body(1) { Answer::Filter } else { Answer::Take });
    harness.publish([numbered(0..3), numbered(0..3)].concat()).await;
    running.intake.answers(Answer::Filter, 2).await;
    running.intake.answers(Answer::Take, 4).await;
    all_acknowledged(&harness).await;
    assert_eq!(running.intake.stored().len(), 2);
    running.stop().await;
}

/// Contract 6.7: given back, received again, and everything is stored in the end.
pub async fn a_failed_store_comes_again<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    let failures = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = failures.clone();
    running.intake.decide(move |message| {
        let fails = message.body.as_ref() == body(4) && counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 2;
        if fails { Answer::Fail } else { Answer::Take }
    });
    harness.publish(numbered(0..10)).await;
    running.intake.stores(10).await;
    all_acknowledged(&harness).await;
    assert!(failures.load(std::sync::atomic::Ordering::SeqCst) >= 3);
    running.stop().await;
}

/// Contract 6.7: nothing is acknowledged past a failure; elsewhere at least the failed message stays.
pub async fn nothing_is_acknowledged_past_a_failure<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.decide(|message| if message.body.as_ref() == body(4) { Answer::Fail } else { Answer::Take });
    harness.publish(numbered(0..10)).await;
    running.intake.answers(Answer::Fail, 2).await;
    let left = harness.outstanding().await;
    let least = if harness.capabilities().stops_at_a_failure { 6 } else { 1 };
    assert!(left >= least, "{left} left");
    running.stop().await;
    assert!(harness.outstanding().await >= least, "the stop acknowledged it");
    // Another process takes over where this one failed.
    let running = run(&harness).await;
    until("the failed one is stored", || async { running.intake.stored().contains(&body(4)).then_some(()) }).await;
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// Contract 6.7: a database that is away makes no storm of redeliveries.
pub async fn a_failing_store_is_met_with_pauses<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.decide(|_| Answer::Fail);
    harness.publish(numbered(0..1)).await;
    running.intake.answers(Answer::Fail, 3).await;
    let times: Vec<Instant> = running.intake.log().into_iter().map(|(at, _, _)| at).collect();
    // Only lower bounds: 1 s, then 2 s.
    assert!(times[1] - times[0] >= Duration::from_millis(700), "{:?}", times[1] - times[0]);
    assert!(times[2] - times[1] >= Duration::from_millis(1400), "{:?}", times[2] - times[1]);
    running.intake.decide(|_| Answer::Take);
    running.intake.stores(1).await;
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// Contract 6.7: `prefetchCount`, `maxPollRecords`, `batchSize` hold.
pub async fn unacknowledged_messages_are_bounded<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.hold();
    harness.publish(numbered(0..UNACKNOWLEDGED_MAX * 5)).await;
    running.intake.holds(1).await;
    running.intake.release();
    running.intake.stores(UNACKNOWLEDGED_MAX * 5).await;
    assert!(running.intake.inside_max() <= UNACKNOWLEDGED_MAX, "{}", running.intake.inside_max());
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// Contract 6.3: bytes as text when they are UTF-8, else `base64:`; bodies byte for byte, whatever they are.
pub async fn headers_and_bodies_are_whole<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    let mut messages = vec![
        Outgoing { body: vec![0xff, 0x00, 0x01], ..Outgoing::default() },
        Outgoing { body: Vec::new(), ..Outgoing::default() },
        Outgoing {
            body: body(1),
            headers: vec![("X-Text".into(), b"v".to_vec()), ("x-long".into(), "ü".repeat(2000).into_bytes())],
            key: Some("k".into()),
        },
    ];
    if harness.capabilities().byte_headers {
        messages[2].headers.push(("x-bytes".into(), vec![0xff, 0x00]));
    }
    harness.publish(messages.clone()).await;
    running.intake.stores(3).await;
    all_acknowledged(&harness).await;
    let log = running.intake.log();
    for (sent, (_, got, _)) in messages.iter().zip(&log) {
        assert_eq!(sent.body, got.body);
    }
    let headers = &log[2].1.headers;
    let value = |name: &str| {
        headers.iter().rev().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    };
    assert_eq!(value("x-text"), Some("v"));
    assert_eq!(value("x-long"), Some("ü".repeat(2000).as_str()));
    if harness.capabilities().byte_headers {
        assert_eq!(value("x-bytes"), Some("base64:/wA="));
    }
    running.stop().await;
}

/// A process that dies between receipt and answer loses nothing.
pub async fn what_is_not_acknowledged_comes_after_a_restart<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.hold();
    harness.publish(numbered(0..10)).await;
    running.intake.holds(1).await;
    running.stop().await;
    assert_eq!(harness.outstanding().await, 10);
    let running = run(&harness).await;
    running.intake.stores(10).await;
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// `run` ends only when it is told, and then soon, also while a store hangs.
pub async fn run_ends_with_a_hanging_intake<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    running.intake.hold();
    harness.publish(numbered(0..3)).await;
    running.intake.holds(1).await;
    stops_soon(running).await;
}

/// See [`run_ends_with_a_hanging_intake`].
pub async fn run_ends_while_the_broker_is_away<H: SourceHarness>() {
    let harness = H::start().await;
    harness.trouble(Trouble::Away).await;
    let running = run(&harness).await;
    assert!(!running.is_down().await.is_empty());
    assert!(!running.task.is_finished(), "run ended by itself");
    stops_soon(running).await;
    harness.trouble(Trouble::None).await;
}

/// See [`run_ends_with_a_hanging_intake`].
pub async fn run_ends_while_the_broker_is_silent<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    harness.publish(numbered(0..3)).await;
    running.intake.stores(3).await;
    harness.trouble(Trouble::Silent).await;
    stops_soon(running).await;
    harness.trouble(Trouble::None).await;
}

async fn stops_soon(running: Running) {
    // "A few seconds" and room for a slow machine.
    tokio::time::timeout(Duration::from_secs(20), running.stop()).await.expect("run does not end");
}

/// Contract 6.7: a closed connection is noticed and made again.
pub async fn a_cut_connection_is_made_again<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    for round in 0..3 {
        harness.publish(numbered(round * 5..round * 5 + 5)).await;
        running.intake.stores(round * 5 + 5).await;
        harness.trouble(Trouble::Cut).await;
    }
    harness.publish(numbered(15..20)).await;
    running.intake.stores(20).await;
    all_acknowledged(&harness).await;
    running.is_up().await;
    running.stop().await;
}

/// Health tells it meanwhile, and nothing is lost.
pub async fn a_broker_that_was_away_is_used_again<H: SourceHarness>() {
    let harness = H::start().await;
    let running = run(&harness).await;
    harness.publish(numbered(0..5)).await;
    running.intake.stores(5).await;
    running.is_up().await;
    harness.trouble(Trouble::Away).await;
    assert!(!running.is_down().await.is_empty());
    harness.publish(numbered(5..10)).await;
    harness.trouble(Trouble::None).await;
    running.intake.stores(10).await;
    running.is_up().await;
    all_acknowledged(&harness).await;
    running.stop().await;
}

/// Health names the object that is missing; made again, it is read from its beginning.
pub async fn a_removed_object_is_named_and_used_again<H: SourceHarness>() {
    let harness = H::start().await;
    if !harness.capabilities().objects {
        return;
    }
    let running = run(&harness).await;
    harness.publish(numbered(0..5)).await;
    running.intake.stores(5).await;
    all_acknowledged(&harness).await;
    running.is_up().await;
    harness.remove_object().await;
    let name = harness.object_name();
    until("health names the object", || async {
        match running.source.health() {
            SourceHealth::Down(why) => why.contains(&name).then_some(()),
            SourceHealth::Up => None,
        }
    })
    .await;
    harness.make_object().await;
    harness.publish(numbered(5..12)).await;
    running.intake.stores(12).await;
    running.is_up().await;
    running.stop().await;
}
