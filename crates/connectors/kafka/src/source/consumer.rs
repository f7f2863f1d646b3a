//! The source's thread: polls the consumer, hands batches to the intake, stores offsets, seeks back.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

use queuebox_core::ports::{Admission, Intake, Received};
use rand::RngExt;
use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer, base_consumer::PartitionQueue},
    error::{KafkaError, RDKafkaErrorCode},
    message::BorrowedMessage,
};
use tokio::runtime::Handle;

use super::{
    group::{Event, Group, Place},
    health::Health,
    partition::Progress,
    received::received,
    topics_text,
};
use crate::{
    client::{Fingerprint, fingerprint, overrides, properties},
    config::SourceConfig,
    fault::reason_of,
};

/// Longest time between two polls of the consumer.
pub(super) const POLL_MAX: Duration = Duration::from_millis(200);

/// A batch is full at this size, whatever its number of records.
const BATCH_BYTES: usize = 4 << 20;

/// After a stop, how long answers of the intake are waited for.
const ANSWERS_MAX: Duration = Duration::from_secs(3);

/// Bound of a seek; it waits for the library's own threads, not for the broker.
const SEEK_MAX: Duration = Duration::from_secs(2);

/// Bound of a question whether the topics are there.
const CHECK_MAX: Duration = Duration::from_secs(5);

/// While everything is well the topics are asked for this often: a removed topic, or a broker that hangs, does not show
/// itself by an error.
const CHECK_PAUSE: Duration = Duration::from_secs(10);

/// How often every queue is looked at even when its callback was silent.
const SWEEP_PAUSE: Duration = Duration::from_secs(1);

const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Why the thread wakes up.
#[derive(Debug)]
pub(super) enum Wake {
    /// End.
    Stop,
    /// The client library has something.
    Kafka,
    /// The intake answered.
    Answers { assignment: u64, taken: Vec<bool>, reason: String },
    /// All topics are there, or what is wrong.
    Checked(Result<(), Wrong>),
}

/// What a check found.
#[derive(Debug)]
pub(super) enum Wrong {
    /// The topic does not exist.
    Missing(String),
    /// Anything else, for people.
    Other(String),
}

/// Everything that outlives one consumer.
pub(super) struct Worker {
    config: SourceConfig,
    health: Arc<Health>,
    intake: Arc<dyn Intake>,
    wake: Sender<Wake>,
    wakes: Receiver<Wake>,
    runtime: Handle,
    assignments: u64,
    /// [`Wake::Stop`] came while nobody could act on it.
    stopped: bool,
}

/// Why a consumer ended.
enum End {
    Stopped,
    /// The next consumer begins at once: a secret was rotated, or a topic is gone.
    Again(String),
    Failed(String),
}

impl Worker {
    pub(super) fn new(
        config: SourceConfig,
        health: Arc<Health>,
        intake: Arc<dyn Intake>,
        wake: Sender<Wake>,
        wakes: Receiver<Wake>,
        runtime: Handle,
    ) -> Self {
        Self { config, health, intake, wake, wakes, runtime, assignments: 0, stopped: false }
    }

    /// Runs until [`Wake::Stop`]; makes the consumer anew after a fatal error, with back-off.
    pub(super) fn run(mut self) {
        let mut backoff = BACKOFF_MIN;
        loop {
            let began = Instant::now();
            let why = match self.consume() {
                End::Stopped => return,
                _ if self.stopped => return,
                // Told when the old consumer is gone, with what it might still have committed.
                End::Again(why) => {
                    self.health.down(why);
                    continue;
                }
                End::Failed(why) => why,
            };
            self.health.down(why);
            if began.elapsed() > BACKOFF_MAX {
                backoff = BACKOFF_MIN;
            }
            if self.stopped_within(backoff.mul_f64(rand::rng().random_range(0.75..1.0))) {
                return;
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    fn consume(&mut self) -> End {
        match Session::open(self) {
            Ok(mut session) => session.run(),
            Err(why) => End::Failed(format!(
                "consumer group {:?} cannot start on {}: {why}",
                self.config.group_id, self.config.cluster.bootstrap_servers
            )),
        }
    }

    /// Waits out a back-off. Answers that come meanwhile belong to the consumer that is gone.
    fn stopped_within(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        loop {
            match self.wakes.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => return true,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }
}

/// A partition that is ours.
struct Assigned {
    place: Place,
    /// Tells this assignment from earlier ones of the same partition, whose answers may still come.
    assignment: u64,
    queue: PartitionQueue<Group>,
    /// The queue may have something.
    filled: Arc<AtomicBool>,
    /// Records that came before the partition had a queue of its own.
    early: VecDeque<(i64, Received)>,
    progress: Progress,
}

impl Assigned {
    fn is_ready(&self) -> bool {
        self.progress.is_idle() && (self.filled.load(Ordering::Acquire) || !self.early.is_empty())
    }

    /// The next records, with their offsets.
    fn take(&mut self, cap: usize) -> (Vec<i64>, Vec<Received>) {
        let limit = self.progress.share(cap);
        let (mut offsets, mut batch, mut bytes) = (Vec::new(), Vec::new(), 0);
        while batch.len() < limit && bytes < BATCH_BYTES {
            let (offset, record) = match self.early.pop_front() {
                Some(early) => early,
                None => {
                    // Before the look: what comes after it says so again.
                    self.filled.store(false, Ordering::Release);
                    match self.queue.poll(Duration::ZERO) {
                        Some(Ok(record)) => (record.offset(), received(&record)),
                        Some(Err(_complained_already)) => continue,
                        None => return (offsets, batch),
                    }
                }
            };
            bytes += record.body.len();
            offsets.push(offset);
            batch.push(record);
        }
        self.filled.store(true, Ordering::Release);
        (offsets, batch)
    }
}

/// One consumer from its start to its end.
struct Session<'w> {
    worker: &'w mut Worker,
    // Before `consumer`: the queues go first.
    partitions: Vec<Assigned>,
    consumer: Arc<BaseConsumer<Group>>,
    fingerprint: Fingerprint,
    kicked: Arc<AtomicBool>,
    /// Partition that is served first, so that none is always last.
    turn: usize,
    joined: bool,
    problem: Option<String>,
    /// `None` = a check is under way.
    next_check: Option<Instant>,
    check_pause: Duration,
    /// When every queue was last looked at, whatever its callback said.
    swept: Instant,
}

impl<'w> Session<'w> {
    fn open(worker: &'w mut Worker) -> Result<Self, String> {
        // The library would take it for a pattern over all topics.
        if let Some(pattern) = worker.config.topics.iter().find(|topic| topic.starts_with('^')) {
            return Err(format!("topic {pattern:?} is not a name for a Kafka topic"));
        }
        let (mut native, fingerprint) = properties(&worker.config.cluster).map_err(|fault| fault.to_string())?;
        consumer_properties(&mut native, &worker.config);
        let group = Group::new(worker.config.auto_offset_reset);
        let mut consumer: BaseConsumer<Group> = native.create_with_context(group).map_err(|error| reason_of(&error))?;
        let kicked = Arc::new(AtomicBool::new(false));
        consumer.set_nonempty_callback(kick(&kicked, &worker.wake));
        let topics: Vec<&str> = worker.config.topics.iter().map(String::as_str).collect();
        consumer.subscribe(&topics).map_err(|error| reason_of(&error))?;
        Ok(Self {
            worker,
            partitions: Vec::new(),
            consumer: Arc::new(consumer),
            fingerprint,
            kicked,
            turn: 0,
            joined: false,
            problem: None,
            next_check: Some(Instant::now() + BACKOFF_MIN),
            check_pause: BACKOFF_MIN,
            swept: Instant::now(),
        })
    }

    fn run(&mut self) -> End {
        let end = self.serve_until_the_end();
        self.await_check();
        end
    }

    fn serve_until_the_end(&mut self) -> End {
        let mut stopping: Option<Instant> = None;
        loop {
            if let Some(end) = self.serve() {
                return end;
            }
            match stopping {
                None => {
                    self.resume_due();
                    self.hand_out();
                    self.check_if_due();
                }
                Some(until) if self.in_flight() == 0 || Instant::now() >= until => return End::Stopped,
                Some(_) => {}
            }
            let mut wake = self.worker.wakes.recv_timeout(self.nap());
            loop {
                match wake {
                    Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => {
                        stopping = stopping.or(Some(Instant::now() + ANSWERS_MAX));
                    }
                    Ok(Wake::Kafka) => {}
                    Ok(Wake::Answers { assignment, taken, reason }) => self.answered(assignment, &taken, &reason),
                    Ok(Wake::Checked(found)) => {
                        if let Some(why) = self.checked(found) {
                            return End::Again(why);
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                match self.worker.wakes.try_recv() {
                    Ok(next) => wake = Ok(next),
                    Err(_) => break,
                }
            }
        }
    }

    /// Polls the consumer: events, and records that came before their partition had its own queue.
    fn serve(&mut self) -> Option<End> {
        self.kicked.store(false, Ordering::Release);
        let consumer = self.consumer.clone();
        loop {
            let calls = consumer.context().calls();
            let polled = consumer.poll(Duration::ZERO);
            if let Some(gone) = self.apply_events() {
                self.problem = Some(gone);
                return Some(End::Again(self.down_text()));
            }
            match polled {
                None if consumer.context().calls() == calls => return None,
                None => {}
                Some(Ok(record)) => self.keep_early(&record),
                Some(Err(KafkaError::MessageConsumptionFatal(code))) => {
                    return Some(End::Failed(format!(
                        "consumer group {:?} failed: {code}",
                        self.worker.config.group_id
                    )));
                }
                Some(Err(_complained_already)) => {}
            }
        }
    }

    /// Answers with what is gone, when the consumer must be made anew for it.
    fn apply_events(&mut self) -> Option<String> {
        for event in self.consumer.context().take() {
            match event {
                Event::Assigned(places) => {
                    self.joined = true;
                    for place in places {
                        self.assign(place);
                    }
                    self.tell_health();
                }
                // Answers that are still to come for these find another assignment, or none, and are not committed.
                Event::Revoked(places) => self.partitions.retain(|assigned| !places.contains(&assigned.place)),
                Event::Gone(topic) if self.forget(&topic) => return Some(format!("topic {topic:?} does not exist")),
                Event::Gone(_) => {}
                Event::Complaint(code, text) => match self.topic_of(code, &text) {
                    Some(topic) if self.forget(&topic) => return Some(text),
                    _ => self.complain(code, text),
                },
            }
        }
        None
    }

    /// The topic of a partition of ours that the library misses; it names the place in front of its text.
    fn topic_of(&self, code: RDKafkaErrorCode, text: &str) -> Option<String> {
        use RDKafkaErrorCode as C;
        let missing =
            matches!(code, C::UnknownTopic | C::UnknownTopicOrPartition | C::UnknownPartition | C::UnknownTopicId);
        let mut held = self.partitions.iter().map(|assigned| &assigned.place).filter(|_| missing);
        held.find(|(topic, partition)| text.starts_with(&format!("{topic} [{partition}]")))
            .map(|(topic, _)| topic.clone())
    }

    fn assign(&mut self, place: Place) {
        let Some(mut queue) = self.consumer.split_partition_queue(&place.0, place.1) else {
            tracing::error!(topic = place.0, partition = place.1, "the partition has no queue");
            return;
        };
        let filled = Arc::new(AtomicBool::new(true));
        let (fill, wake) = (filled.clone(), kick(&self.kicked, &self.worker.wake));
        queue.set_nonempty_callback(move || {
            fill.store(true, Ordering::Release);
            wake();
        });
        self.worker.assignments += 1;
        self.partitions.retain(|assigned| assigned.place != place);
        self.partitions.push(Assigned {
            place,
            assignment: self.worker.assignments,
            queue,
            filled,
            early: VecDeque::new(),
            progress: Progress::default(),
        });
    }

    fn keep_early(&mut self, record: &BorrowedMessage<'_>) {
        let (topic, partition) = (record.topic(), record.partition());
        if let Some(assigned) =
            self.partitions.iter_mut().find(|found| found.place.0 == topic && found.place.1 == partition)
        {
            assigned.early.push_back((record.offset(), received(record)));
        }
    }

    /// Gives every idle partition's records to the intake, within `maxPollRecords` for all together.
    fn hand_out(&mut self) {
        if self.swept.elapsed() > SWEEP_PAUSE {
            self.swept = Instant::now();
            self.partitions.iter().for_each(|assigned| assigned.filled.store(true, Ordering::Release));
        }
        let mut ready: Vec<usize> = (0..self.partitions.len()).filter(|at| self.partitions[*at].is_ready()).collect();
        if ready.is_empty() {
            return;
        }
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % ready.len();
        ready.rotate_left(first);
        let mut free = (self.worker.config.max_poll_records.max(1) as usize).saturating_sub(self.in_flight());
        let alone = self.partitions.len() == 1;
        for (place, at) in ready.iter().enumerate() {
            if free == 0 {
                return;
            }
            // Even shares, and a quarter stays free, so that one slow partition cannot take all there is.
            let even = free / (ready.len() - place);
            let cap = if alone { free } else { even.min(free * 3 / 4).max(1) };
            free -= self.hand_out_one(*at, cap);
        }
    }

    fn hand_out_one(&mut self, at: usize, cap: usize) -> usize {
        let Some(assigned) = self.partitions.get_mut(at) else { return 0 };
        let (offsets, batch) = assigned.take(cap);
        let count = batch.len();
        if count > 0 {
            assigned.progress.start(offsets);
            let reply = Reply {
                wake: self.worker.wake.clone(),
                assignment: assigned.assignment,
                taken: Vec::with_capacity(count),
                reason: String::new(),
            };
            self.worker.runtime.spawn(reply.fill(self.worker.intake.clone(), batch));
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.partitions.iter().map(|assigned| assigned.progress.in_flight()).sum()
    }

    fn answered(&mut self, assignment: u64, taken: &[bool], reason: &str) {
        let Some(assigned) = self.partitions.iter_mut().find(|found| found.assignment == assignment) else { return };
        let verdict = assigned.progress.finish(taken, Instant::now());
        let place = assigned.place.clone();
        if verdict.back_to.is_some() {
            assigned.early.clear();
        }
        if let Some(offset) = verdict.done_before {
            self.store_offset(&place, offset);
        }
        if let Some((offset, pause)) = verdict.back_to {
            tracing::warn!(
                topic = place.0,
                partition = place.1,
                offset,
                ?pause,
                reason,
                "record not stored; its partition pauses and goes back to it"
            );
            // Nothing is polled from it meanwhile, whether the library pauses or not.
            if let Err(error) = self.consumer.pause(&one(&place)) {
                tracing::debug!(topic = place.0, partition = place.1, %error, "partition not paused");
            }
        }
    }

    /// Marks everything before `offset` as done; the library commits it soon, and before it gives the partition away.
    fn store_offset(&self, place: &Place, offset: i64) {
        let mut done = TopicPartitionList::new();
        let stored = done
            .add_partition_offset(&place.0, place.1, Offset::Offset(offset))
            .and_then(|()| self.consumer.store_offsets(&done));
        if let Err(error) = stored {
            // The partition is being taken from us: its next owner repeats the records, and the inbox knows them.
            tracing::debug!(topic = place.0, partition = place.1, offset, %error, "offset not stored");
        }
    }

    /// Goes back to the failed record of each partition whose pause is over. Without the way back it stays paused: what comes
    /// next would be past that record.
    fn resume_due(&mut self) {
        let now = Instant::now();
        for assigned in &mut self.partitions {
            let Some(offset) = assigned.progress.resume(now) else { continue };
            let (topic, partition) = (&assigned.place.0, assigned.place.1);
            let back = self
                .consumer
                .seek(topic, partition, Offset::Offset(offset), SEEK_MAX)
                .and_then(|()| self.consumer.resume(&one(&assigned.place)));
            if let Err(error) = back {
                tracing::warn!(topic, partition, offset, %error, "partition stays paused: it cannot go back yet");
                assigned.progress.pause_again(now);
            }
            assigned.filled.store(true, Ordering::Release);
        }
    }

    /// How long nothing is to be done unless something happens.
    fn nap(&self) -> Duration {
        let now = Instant::now();
        let pauses = self.partitions.iter().filter_map(|assigned| assigned.progress.paused_until());
        let next = pauses.chain(self.next_check).min().unwrap_or(now + POLL_MAX);
        next.saturating_duration_since(now).clamp(Duration::from_millis(1), POLL_MAX)
    }

    fn complain(&mut self, code: RDKafkaErrorCode, text: String) {
        tracing::debug!(group = self.worker.config.group_id, ?code, text, "Kafka consumer complains");
        if code == RDKafkaErrorCode::PollExceeded || code == RDKafkaErrorCode::AssignmentLost {
            self.joined = false;
        }
        self.problem = Some(text);
        self.check_pause = BACKOFF_MIN;
        self.next_check = self.next_check.map(|due| due.min(Instant::now() + BACKOFF_MIN));
        self.tell_health();
    }

    /// Asks whether the topics are there, on another thread.
    fn check_if_due(&mut self) {
        if self.next_check.is_none_or(|due| Instant::now() < due) {
            return;
        }
        // The answer sets the next time.
        self.next_check = None;
        let consumer = self.consumer.clone();
        let topics = self.worker.config.topics.clone();
        let wake = self.worker.wake.clone();
        self.worker.runtime.spawn_blocking(move || {
            let found = topics.iter().try_for_each(|topic| check_topic(&consumer, topic));
            drop(consumer);
            let _ = wake.send(Wake::Checked(found));
        });
    }

    /// Waits for the answer of a check that is under way: it holds the consumer, which must be closed before anything else.
    fn await_check(&mut self) {
        let until = Instant::now() + CHECK_MAX + BACKOFF_MIN;
        while self.next_check.is_none() {
            match self.worker.wakes.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Wake::Checked(_)) | Err(_) => return,
                Ok(Wake::Stop) => self.worker.stopped = true,
                Ok(_) => {}
            }
        }
    }

    /// Takes the answer of a check. An answer when the consumer must be made anew: with other secrets, or because a topic is
    /// gone whose partitions it still holds. Made again, such a topic begins at 0, and this consumer would go on where it was.
    fn checked(&mut self, found: Result<(), Wrong>) -> Option<String> {
        let (problem, gone) = match found {
            Ok(()) => (None, false),
            Err(Wrong::Missing(topic)) => {
                let held = self.forget(&topic);
                (Some(format!("topic {topic:?} does not exist")), held)
            }
            Err(Wrong::Other(reason)) => (Some(reason), false),
        };
        self.problem = problem;
        let well = self.joined && self.problem.is_none();
        let rotated = || fingerprint(&self.worker.config.cluster).is_some_and(|now| now != self.fingerprint);
        if gone || (!well && rotated()) {
            return Some(self.down_text());
        }
        let pause = if well { CHECK_PAUSE } else { self.check_pause };
        self.check_pause = if well { BACKOFF_MIN } else { (self.check_pause * 2).min(CHECK_PAUSE) };
        self.next_check = Some(Instant::now() + pause);
        self.tell_health();
        None
    }

    /// Takes back what is stored and not committed of a topic that is gone: the library would commit it to the next topic of
    /// that name. True when there are partitions of it.
    fn forget(&self, topic: &str) -> bool {
        let mut nothing = TopicPartitionList::new();
        for assigned in self.partitions.iter().filter(|assigned| assigned.place.0 == topic) {
            let _ = nothing.add_partition_offset(topic, assigned.place.1, Offset::Invalid);
        }
        let held = nothing.count() > 0;
        if held && let Err(error) = self.consumer.store_offsets(&nothing) {
            tracing::debug!(topic, %error, "offsets of the topic that is gone not taken back");
        }
        held
    }

    fn tell_health(&self) {
        if self.joined && self.problem.is_none() {
            self.worker.health.up(&self.worker.config.group_id);
        } else {
            self.worker.health.down(self.down_text());
        }
    }

    fn down_text(&self) -> String {
        let config = &self.worker.config;
        format!(
            "consumer group {:?} on {} does not receive from {}: {}",
            config.group_id,
            config.cluster.bootstrap_servers,
            topics_text(&config.topics),
            self.problem.as_deref().unwrap_or("it has not joined the group yet")
        )
    }
}

fn one(place: &Place) -> TopicPartitionList {
    let mut one = TopicPartitionList::new();
    one.add_partition(&place.0, place.1);
    one
}

fn check_topic(consumer: &BaseConsumer<Group>, topic: &str) -> Result<(), Wrong> {
    let metadata = consumer.fetch_metadata(Some(topic), CHECK_MAX).map_err(|error| Wrong::Other(reason_of(&error)))?;
    match metadata.topics().first().and_then(|found| found.error()).map(RDKafkaErrorCode::from) {
        None => Ok(()),
        Some(RDKafkaErrorCode::UnknownTopic | RDKafkaErrorCode::UnknownTopicOrPartition) => {
            Err(Wrong::Missing(topic.to_owned()))
        }
        Some(code) => Err(Wrong::Other(format!("topic {topic:?}: {code}"))),
    }
}

/// Wakes the thread, once until it has looked.
fn kick(kicked: &Arc<AtomicBool>, wake: &Sender<Wake>) -> impl Fn() + Send + Sync + 'static {
    let (kicked, wake) = (kicked.clone(), wake.clone());
    move || {
        if !kicked.swap(true, Ordering::AcqRel) {
            let _ = wake.send(Wake::Kafka);
        }
    }
}

/// Sends the intake's answers when it is dropped: also when the intake panics or the runtime stops, and then without
/// answers, which counts as failed.
struct Reply {
    wake: Sender<Wake>,
    assignment: u64,
    taken: Vec<bool>,
    /// Why the first one that failed did.
    reason: String,
}

impl Reply {
    async fn fill(mut self, intake: Arc<dyn Intake>, batch: Vec<Received>) {
        for answer in intake.admit(batch).await {
            let failed = match answer {
                Admission::Stored(_) | Admission::Duplicate | Admission::Filtered => None,
                Admission::Failed(fault) => Some(format!("{}: {fault}", fault.code)),
                Admission::Refused { reason, .. } => Some(reason),
            };
            self.taken.push(failed.is_none());
            if let Some(reason) = failed.filter(|_| self.reason.is_empty()) {
                self.reason = reason;
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let _ = self.wake.send(Wake::Answers {
            assignment: self.assignment,
            taken: std::mem::take(&mut self.taken),
            reason: std::mem::take(&mut self.reason),
        });
    }
}

fn consumer_properties(native: &mut rdkafka::ClientConfig, config: &SourceConfig) {
    for (property, value) in [
        ("group.id", config.group_id.as_str()),
        ("auto.offset.reset", config.auto_offset_reset.as_str()),
        // We say what is done; the library commits it every half second, before it gives a partition away, and at its end.
        ("enable.auto.offset.store", "false"),
        ("enable.auto.commit", "true"),
        ("auto.commit.interval.ms", "500"),
        // A rebalance takes only the partitions that move; the others go on.
        ("partition.assignment.strategy", "cooperative-sticky"),
        // Heartbeats come from the library's own thread, so that a slow intake does not count as death.
        ("session.timeout.ms", "15000"),
        // New topics and partitions are noticed within so long.
        ("topic.metadata.refresh.interval.ms", "10000"),
        // How long a topic may be unknown before it counts as gone.
        ("topic.metadata.propagation.max.ms", "5000"),
        ("allow.auto.create.topics", "false"),
        // Prefetch per partition: two fetches; the default of 64 MiB each would be all the memory there is.
        ("queued.min.messages", "5000"),
        ("queued.max.messages.kbytes", "2048"),
        // A full prefetch is looked at again soon; the default of 1 s halves the throughput.
        ("fetch.queue.backoff.ms", "20"),
        ("fetch.max.bytes", "8388608"),
    ] {
        native.set(property, value);
    }
    overrides(native, &config.cluster);
}
