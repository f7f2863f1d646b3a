//! Kafka as a destination: `acks=all`, idempotent, many records in flight, each with its own outcome (contract 7.3 to 7.5).
//!
//! Invariants:
//! - A record is handed to the client library only while the cluster is believed to be reachable; in doubt it is asked
//!   first. So [`queuebox_core::Class::NotConnected`] always means that nothing was offered.
//! - One failed record never costs another its attempt: records that fail only because of their batch are sent alone.
//! - Order of a key: the engine has one record of a key in flight; below that the idempotent producer keeps the order in
//!   which records were handed over, also over its own retries.
//! - Nothing here blocks the runtime: every blocking call of the library runs on a thread of its own.
//!
//! ```text
//!            first contact, or doubt                 broker answers
//!   Unknown ─────────────────────────► asking ──────────────────────► Up ──┐
//!      ▲                                  │ no answer                      │ record acknowledged
//!      │   record or request timed out    ▼                                │
//!      ├────────────────────────────── Unknown, NotConnected           ◄───┘
//!      └────────────────────────────── Up: all brokers down, login refused
//! ```
//!
//! Producers are made anew only when a secret was rotated (noticed when the cluster is asked), when the library calls an error
//! fatal, and when a lease ends while nothing gets through.

mod producer;
mod record;

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use async_trait::async_trait;
use queuebox_core::{
    Fault,
    ports::{Delivery, Destination},
    template::Address,
};
use rdkafka::types::RDKafkaErrorCode;
use tokio::time::Instant;

use self::{producer::Producers, record::Record};
use crate::{
    client::fingerprint,
    config::DestinationConfig,
    fault::{About, KafkaFault, Undelivered, classify, from_delivery},
};

/// Longest wait for the cluster to say what it has.
const ASK_MAX: Duration = Duration::from_secs(5);

/// After a failed question the next ones get the same answer for so long: hundreds of records ask at the same time.
const ANSWER_HOLDS: Duration = Duration::from_millis(500);

/// A Kafka destination.
pub struct KafkaDestination {
    config: DestinationConfig,
    /// The topic, where the manifest names it without a placeholder.
    declared: Option<String>,
    producers: RwLock<Option<Arc<Producers>>>,
    /// One question at a time; the last failed answer.
    asking: tokio::sync::Mutex<Option<(Instant, KafkaFault)>>,
    closed: std::sync::atomic::AtomicBool,
}

impl KafkaDestination {
    /// A destination that connects at its first use.
    pub fn new(config: DestinationConfig) -> Self {
        let declared = match &config.topic {
            Address::Template(template) if template.placeholders().next().is_none() => {
                Some(template.as_str().to_owned())
            }
            _ => None,
        };
        Self {
            config,
            declared,
            producers: RwLock::new(None),
            asking: tokio::sync::Mutex::new(None),
            closed: std::sync::atomic::AtomicBool::new(false),
        }
    }

    async fn deliver(&self, delivery: &Delivery) -> Result<(), KafkaFault> {
        let budget = self.config.timeout.min(delivery.time_left);
        let deadline = Instant::now() + budget;
        let record = Record::of(&self.config, self.declared.as_deref(), delivery)?;
        let producers = self.connected(deadline).await?;
        let about = About {
            topic: &record.topic,
            servers: &self.config.cluster.bootstrap_servers,
            declared: self.declared.is_some(),
            size: record.size(),
            budget_ms: u64::try_from(budget.as_millis()).unwrap_or(u64::MAX),
        };
        let acks = producers.link().acks();
        let Err(failed) = producers.send(&record, deadline).await else { return Ok(()) };
        if failed.given_up && budget < self.config.timeout && producers.link().acks() == acks {
            // The lease ends and nothing gets through. What the library still holds would arrive later, perhaps behind what
            // the lane's next owner sends; so these producers are given up, and their successor takes everything back.
            producers.link().give_up();
        } else if failed.doubts_the_connection() {
            producers.link().doubt("a record was not acknowledged in time");
        }
        let mut fault = from_delivery(failed, &about);
        match &mut fault {
            KafkaFault::TooLarge { topic, limit, .. } => *limit = producers.limit_of(topic, deadline).await,
            // The library remembers that a topic is missing; asking makes it look again, for the next attempt.
            KafkaFault::TopicMissing { topic, .. } => producers.refresh(topic),
            _ => {}
        }
        Err(fault)
    }

    /// Producers whose cluster is believed to be reachable.
    async fn connected(&self, deadline: Instant) -> Result<Arc<Producers>, KafkaFault> {
        if let Some(producers) = self.current()
            && producers.link().is_up()
        {
            return Ok(producers);
        }
        // Waiting for the question of another record counts as well.
        let Ok(mut last) = tokio::time::timeout_at(deadline, self.asking.lock()).await else {
            let servers = self.config.cluster.bootstrap_servers.clone();
            return Err(KafkaFault::Unreachable { servers, reason: "no answer in time".into() });
        };
        if let Some(producers) = self.current()
            && producers.link().is_up()
        {
            return Ok(producers);
        }
        if let Some((asked, fault)) = &*last
            && asked.elapsed() < ANSWER_HOLDS
        {
            return Err(fault.clone());
        }
        let answer = self.ask(deadline).await;
        *last = answer.as_ref().err().map(|fault| (Instant::now(), fault.clone()));
        answer
    }

    /// Asks the cluster for the declared topic, or whether it is there at all. Makes new producers first where there are
    /// none, where a secret has changed, and where the old ones failed for good.
    async fn ask(&self, deadline: Instant) -> Result<Arc<Producers>, KafkaFault> {
        let producers = self.usable().await?;
        let deadline = deadline.min(Instant::now() + ASK_MAX);
        producers.ask(self.declared.as_deref(), deadline).await?;
        producers.link().up();
        Ok(producers)
    }

    async fn usable(&self) -> Result<Arc<Producers>, KafkaFault> {
        if self.closed.load(std::sync::atomic::Ordering::Acquire) {
            return Err(KafkaFault::Closed);
        }
        if let Some(producers) = self.current() {
            let rotated = fingerprint(&self.config.cluster).is_some_and(|now| now != producers.fingerprint());
            if !rotated && !producers.link().failed_for_good() {
                return Ok(producers);
            }
            tracing::info!(
                servers = self.config.cluster.bootstrap_servers,
                rotated,
                "Kafka producer is made anew; what the old one holds is taken back"
            );
        }
        let config = self.config.clone();
        let servers = config.cluster.bootstrap_servers.clone();
        let made = tokio::task::spawn_blocking(move || Producers::new(&config))
            .await
            .unwrap_or_else(|_| Err(KafkaFault::Client { servers, reason: "the runtime is stopping".into() }))?;
        let made = Arc::new(made);
        let old = self.producers.write().unwrap_or_else(PoisonError::into_inner).replace(made.clone());
        if let Some(old) = old {
            old.take_back();
        }
        Ok(made)
    }

    fn current(&self) -> Option<Arc<Producers>> {
        self.producers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl Destination for KafkaDestination {
    fn kind(&self) -> &'static str {
        "kafka"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        self.deliver(&delivery).await.map_err(|fault| classify(&fault))
    }

    async fn probe(&self) -> Result<(), Fault> {
        let deadline = Instant::now() + self.config.timeout;
        let mut last = self.asking.lock().await;
        let answer = self.ask(deadline).await;
        *last = answer.as_ref().err().map(|fault| (Instant::now(), fault.clone()));
        answer.map(|_| ()).map_err(|fault| classify(&fault))
    }

    async fn close(&self) {
        self.closed.store(true, std::sync::atomic::Ordering::Release);
        let producers = self.producers.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(producers) = producers {
            producers.flush(self.config.timeout).await;
        }
    }
}

/// A record that the library did not even queue.
fn not_queued(code: RDKafkaErrorCode) -> Undelivered {
    Undelivered { code, assigned: false, given_up: false }
}
