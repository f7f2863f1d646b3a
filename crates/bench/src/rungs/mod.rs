//! The rungs, and the stage on which they run.

mod baseline;
mod inbox;
mod outbox;
mod waiting;

use std::{str::FromStr, time::Duration};

use crate::{
    Options, Peer,
    database::{Cost, Database},
    peers::Peers,
    report::Measured,
};

/// How long a rung waits for its next message before it is given up.
const PATIENCE: Duration = Duration::from_secs(120);

/// One way of measuring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// Claim a row, publish, mark it.
    Naive,
    /// Claim a batch with SKIP LOCKED, mark a batch.
    ClaimBatch,
    /// One worker and a sink that takes everything at once.
    Null,
    /// The same with `outbox.onSent: Delete`.
    Delete,
    /// The null sink, every message with the same key.
    OneKey,
    /// Two workers, null sink.
    Workers2,
    /// Four workers, null sink.
    Workers4,
    /// One POST per message to a receiver on loopback.
    Http,
    /// JetStream with file storage.
    Nats,
    /// acks=all, four partitions.
    Kafka,
    /// Persistent, confirmed, a durable queue.
    RabbitMq,
    /// 64 connections that POST to a source.
    InboxHttp,
    /// From a stream.
    InboxNats,
    /// From a topic.
    InboxKafka,
    /// From a queue.
    InboxRabbitMq,
    /// A lone message, insert → received, by HTTP.
    Latency,
    /// The null sink with so many rows waiting.
    Depth,
    /// The null sink behind rows of a held destination.
    Held,
    /// A steady rate, without and with a transaction that holds its snapshot.
    Snapshot,
}

impl Rung {
    /// All of them, in the order of the ladder.
    pub const ALL: [Self; 19] = [
        Self::Naive,
        Self::ClaimBatch,
        Self::Null,
        Self::Delete,
        Self::OneKey,
        Self::Workers2,
        Self::Workers4,
        Self::Http,
        Self::Nats,
        Self::Kafka,
        Self::RabbitMq,
        Self::InboxHttp,
        Self::InboxNats,
        Self::InboxKafka,
        Self::InboxRabbitMq,
        Self::Latency,
        Self::Depth,
        Self::Held,
        Self::Snapshot,
    ];

    /// What runs when nothing else is asked for: all but the last three, which take minutes to fill a table or hold a snapshot.
    pub fn usual() -> &'static [Self] {
        Self::ALL.split_at(Self::ALL.len() - 3).0
    }

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::ClaimBatch => "claim-batch",
            Self::Null => "null",
            Self::Delete => "delete",
            Self::OneKey => "one-key",
            Self::Workers2 => "workers-2",
            Self::Workers4 => "workers-4",
            Self::Http => "http",
            Self::Nats => "nats",
            Self::Kafka => "kafka",
            Self::RabbitMq => "rabbitmq",
            Self::InboxHttp => "inbox-http",
            Self::InboxNats => "inbox-nats",
            Self::InboxKafka => "inbox-kafka",
            Self::InboxRabbitMq => "inbox-rabbitmq",
            Self::Latency => "latency",
            Self::Depth => "depth",
            Self::Held => "held",
            Self::Snapshot => "snapshot",
        }
    }
}

impl FromStr for Rung {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|rung| rung.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|rung| rung.name()).collect();
            format!("there is no rung {text:?}; there are {}", names.join(", "))
        })
    }
}

/// What the rungs of a run share.
pub struct Stage<'a> {
    options: &'a Options,
    peers: Peers,
    notes: Vec<String>,
}

impl<'a> Stage<'a> {
    pub fn new(options: &'a Options) -> Self {
        Self { options, peers: Peers::new(options.given.clone()), notes: Vec::new() }
    }

    pub fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    pub async fn run(&mut self, rung: Rung) -> anyhow::Result<Vec<Measured>> {
        let database = self.database().await?;
        let measured = match rung {
            Rung::Naive => baseline::naive(self, &database).await.map(one),
            Rung::ClaimBatch => baseline::claim_batch(self, &database).await.map(one),
            Rung::Null | Rung::Delete | Rung::OneKey | Rung::Workers2 | Rung::Workers4 => {
                outbox::null(self, rung, &database).await.map(one)
            }
            Rung::Http | Rung::Nats | Rung::Kafka | Rung::RabbitMq => {
                outbox::connector(self, rung, &database).await.map(one)
            }
            Rung::InboxHttp => inbox::http(self, &database).await.map(one),
            Rung::InboxNats | Rung::InboxKafka | Rung::InboxRabbitMq => {
                inbox::broker(self, rung, &database).await.map(one)
            }
            Rung::Latency => waiting::latency(self, &database).await.map(one),
            Rung::Depth => outbox::depth(self).await,
            Rung::Held => outbox::held(self, &database).await.map(one),
            Rung::Snapshot => waiting::snapshot(self).await,
        };
        database.drop().await;
        measured
    }

    pub async fn peer(&mut self, peer: &Peer) -> anyhow::Result<Measured> {
        let database = self.database().await?;
        let measured = baseline::peer(self, peer, &database).await;
        database.drop().await;
        measured
    }

    async fn database(&mut self) -> anyhow::Result<Database> {
        let url = self.peers.postgres().await?;
        let database = Database::make(&url).await?;
        for doubt in database.doubts().await? {
            if !self.notes.contains(&doubt) {
                self.notes.push(doubt);
            }
        }
        Ok(database)
    }
}

fn one(measured: Measured) -> Vec<Measured> {
    vec![measured]
}

/// Adds what a run has cost per message. `aside` is the time of helpers that is not the relay's.
fn with_cost(
    mut measured: Measured,
    spent: Spent,
    after: Cost,
    own_after: Option<Duration>,
    aside: Duration,
) -> Measured {
    #[allow(clippy::cast_precision_loss)]
    let messages = measured.messages.max(1) as f64;
    let per_message = |time: Duration| time.as_secs_f64() * 1e6 / messages;
    #[allow(clippy::cast_precision_loss)]
    let log_bytes = (after.log_bytes - spent.before.log_bytes) as f64 / messages;
    measured.log_bytes_per_message = Some(log_bytes);
    let database = after.cpu.zip(spent.before.cpu).map(|(after, before)| per_message(after.saturating_sub(before)));
    let own = own_after.zip(spent.own).map(|(after, before)| after.saturating_sub(before).saturating_sub(aside));
    measured.database_cpu_us = database;
    measured.cpu_us_per_message = database.zip(own).map(|(database, own)| database + per_message(own));
    measured
}

/// The clocks at the beginning of a run.
#[derive(Debug, Clone, Copy)]
struct Spent {
    before: Cost,
    own: Option<Duration>,
}

impl Spent {
    async fn begin(database: &Database) -> anyhow::Result<Self> {
        Ok(Self { before: database.cost().await?, own: crate::cpu::own() })
    }

    async fn end(self, measured: Measured, database: &Database, aside: Duration) -> anyhow::Result<Measured> {
        let own = crate::cpu::own();
        Ok(with_cost(measured, self, database.cost().await?, own, aside))
    }
}
