//! Kafka as a source: one consumer group per source (contract 6.7).
//!
//! Invariants:
//! - An offset is committed only for the unbroken run of records that the intake took, and only while the partition is ours.
//! - A partition has at most one batch with the intake, so its records are stored in order. All partitions together have
//!   at most `maxPollRecords` records there.
//! - The consumer is polled at least every `consumer::POLL_MAX`, whatever the intake or a partition in trouble does, so it
//!   never leaves its group for being slow.
//! - The client library's blocking calls run on the source's own thread, never on the runtime.

mod consumer;
mod group;
mod health;
mod partition;
mod received;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::future::BoxFuture;
use queuebox_core::ports::{Intake, Source, source::SourceHealth};

use self::{consumer::Worker, health::Health};
use crate::config::SourceConfig;

/// How long `run` waits for its thread after the stop; the thread then ends by itself.
const STOP_MAX: Duration = Duration::from_secs(8);

/// A Kafka source.
pub struct KafkaSource {
    config: SourceConfig,
    health: Arc<Health>,
}

impl KafkaSource {
    /// A source that connects when it runs.
    pub fn new(config: SourceConfig) -> Self {
        let health = Arc::new(Health::new(format!(
            "consumer group {:?} on {} has not joined yet for {}",
            config.group_id,
            config.cluster.bootstrap_servers,
            topics_text(&config.topics)
        )));
        Self { config, health }
    }
}

/// The topics, for people.
fn topics_text(topics: &[String]) -> String {
    match topics {
        [one] => format!("topic {one:?}"),
        many => format!("topics {many:?}"),
    }
}

#[async_trait]
impl Source for KafkaSource {
    fn kind(&self) -> &'static str {
        "kafka"
    }

    async fn run(&self, intake: Arc<dyn Intake>, stop: BoxFuture<'static, ()>) {
        let (wake, wakes) = std::sync::mpsc::channel();
        let (ended, end) = tokio::sync::oneshot::channel::<()>();
        let worker = Worker::new(
            self.config.clone(),
            self.health.clone(),
            intake,
            wake.clone(),
            wakes,
            tokio::runtime::Handle::current(),
        );
        let thread = std::thread::Builder::new().name(format!("kafka-{}", self.config.group_id)).spawn(move || {
            worker.run();
            let _ = ended.send(());
        });
        if let Err(error) = thread {
            self.health.down(format!("no thread for consumer group {:?}: {error}", self.config.group_id));
            stop.await;
            return;
        }
        stop.await;
        let _ = wake.send(consumer::Wake::Stop);
        if tokio::time::timeout(STOP_MAX, end).await.is_err() {
            tracing::warn!(
                group = self.config.group_id,
                "the Kafka consumer is still leaving its group; it ends by itself"
            );
        }
        self.health.stopped(&self.config.group_id);
    }

    fn health(&self) -> SourceHealth {
        self.health.get()
    }
}
