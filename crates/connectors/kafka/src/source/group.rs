//! What the client library calls back: changes of the assignment, complaints, results of commits. The calls come on the
//! source's own thread, from inside a poll; this only writes them down for [`super::consumer`].

use std::{
    mem,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rdkafka::{
    ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode},
};

use crate::{client::log, config::OffsetReset};

/// Bound of each blocking question during a rebalance.
const ASK_MAX: Duration = Duration::from_secs(5);

/// A partition of a topic.
pub(super) type Place = (String, i32);

/// What happened during a poll.
#[derive(Debug)]
pub(super) enum Event {
    /// These partitions are ours now, besides those that we had.
    Assigned(Vec<Place>),
    /// These are no longer ours.
    Revoked(Vec<Place>),
    /// The group's place in this topic cannot be kept: the topic is gone.
    Gone(String),
    /// Something is wrong; the library goes on trying.
    Complaint(RDKafkaErrorCode, String),
}

/// The context of the consumer.
pub(super) struct Group {
    reset: OffsetReset,
    events: Mutex<Vec<Event>>,
    /// Counts everything that was called back.
    calls: AtomicU64,
}

impl Group {
    pub(super) fn new(reset: OffsetReset) -> Self {
        Self { reset, events: Mutex::default(), calls: AtomicU64::new(0) }
    }

    /// What happened since the last call, in order.
    pub(super) fn take(&self) -> Vec<Event> {
        mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Grows whenever a poll consumed something that is no record, which its answer does not tell from "nothing there".
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn called(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    fn push(&self, event: Event) {
        self.called();
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        self.called();
        log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.push(Event::Complaint(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown), reason.to_owned()));
    }
}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Revoke(partitions) => self.push(Event::Revoked(places(partitions))),
            Rebalance::Assign(partitions) if self.reset == OffsetReset::Latest => pin_latest(consumer, partitions),
            Rebalance::Assign(_) | Rebalance::Error(_) => {}
        }
    }

    fn post_rebalance(&self, _consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(partitions) => self.push(Event::Assigned(places(partitions))),
            Rebalance::Error(error) => self.push(Event::Complaint(RDKafkaErrorCode::Fail, error.to_string())),
            Rebalance::Revoke(_) => {}
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        self.called();
        let Err(error) = result else { return };
        let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown);
        match code {
            RDKafkaErrorCode::NoOffset => {}
            RDKafkaErrorCode::UnknownTopicOrPartition => {
                for element in offsets.elements().iter().filter(|element| element.error().is_err()) {
                    self.push(Event::Gone(element.topic().to_owned()));
                }
            }
            RDKafkaErrorCode::GroupAuthorizationFailed => {
                self.push(Event::Complaint(code, format!("offsets cannot be committed: {code}")));
            }
            // The library commits what is stored again after its interval, and the next owner repeats at most that much.
            _ => tracing::debug!(?code, "Kafka offsets are not committed yet"),
        }
    }
}

fn places(partitions: &TopicPartitionList) -> Vec<Place> {
    partitions.elements().iter().map(|element| (element.topic().to_owned(), element.partition())).collect()
}

/// With `latest`, a group without a committed offset begins at the end of the partition, again at every start. So a record
/// that arrived and could not be stored before the first commit would be skipped by the next start. Committing the end
/// before the first fetch closes that gap.
fn pin_latest(consumer: &BaseConsumer<Group>, assigned: &TopicPartitionList) {
    let asked = assigned.clone();
    let Ok(committed) = consumer.committed_offsets(asked, ASK_MAX) else { return };
    let mut ends = TopicPartitionList::new();
    for element in committed.elements() {
        if element.offset() != Offset::Invalid || element.error().is_err() {
            continue;
        }
        match consumer.fetch_watermarks(element.topic(), element.partition(), ASK_MAX) {
            Ok((_, end)) => {
                let _ = ends.add_partition_offset(element.topic(), element.partition(), Offset::Offset(end));
            }
            Err(_) => return,
        }
    }
    if ends.count() > 0
        && let Err(error) = consumer.commit(&ends, CommitMode::Sync)
    {
        tracing::debug!(%error, "the first offsets of the group are not committed yet");
    }
}
