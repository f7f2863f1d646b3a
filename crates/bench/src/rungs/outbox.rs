//! The outbox: from waiting rows to a sink.

use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use super::{PATIENCE, Rung, Spent, Stage};
use crate::{
    database::{Database, Rows},
    peers,
    relay::{HELD_TOPIC, Plan, TOPIC, Wish},
    report::Measured,
    sink::Seen,
    traffic::{Aside, Receiver},
};

/// A run of a filled table through `workers` workers; counts up to `expected` messages.
struct Drain<'a> {
    name: String,
    database: &'a Database,
    plan: &'a Plan,
    workers: usize,
    expected: u64,
    aside: Option<&'a Aside>,
}

impl Drain<'_> {
    async fn run(&self) -> anyhow::Result<Measured> {
        let seen = Seen::new(self.expected, false);
        let spent = Spent::begin(self.database).await?;
        let aside = self.aside.map(Aside::cpu).unwrap_or_default();
        let mut running = Vec::new();
        for _ in 0..self.workers {
            running.push(self.plan.start(&seen).await?);
        }
        seen.complete(PATIENCE).await?;
        let (p50, p99) = running[0].processing();
        for worker in running {
            worker.stop().await;
        }
        let mut measured = Measured::new(self.name.clone(), self.expected, seen.verdict()?);
        (measured.p50_ms, measured.p99_ms) = (p50, p99);
        let aside = self.aside.map(Aside::cpu).unwrap_or_default().saturating_sub(aside);
        spent.end(measured, self.database, aside).await
    }
}

pub async fn null(stage: &Stage<'_>, rung: Rung, database: &Database) -> anyhow::Result<Measured> {
    let wish = Wish { database: database.url.clone(), deletes: rung == Rung::Delete, ..Wish::default() };
    let plan = Plan::new(&wish)?;
    plan.migrate().await?;
    let count = stage.options.messages;
    let keys = if rung == Rung::OneKey { 1 } else { stage.options.keys };
    database.fill(Rows { table: "outbox", count, keys, topic: TOPIC }).await?;
    let workers = match rung {
        Rung::Workers2 => 2,
        Rung::Workers4 => 4,
        _ => 1,
    };
    let drain = Drain { name: rung.name().to_owned(), database, plan: &plan, workers, expected: count, aside: None };
    let measured = drain.run().await?;
    all_settled(database).await?;
    Ok(measured)
}

async fn all_settled(database: &Database) -> anyhow::Result<()> {
    let left = database.count("SELECT count(*) FROM outbox WHERE state <> 'sent'").await?;
    ensure!(left == 0, "{left} rows were delivered and are not marked as sent");
    Ok(())
}

pub async fn connector(stage: &mut Stage<'_>, rung: Rung, database: &Database) -> anyhow::Result<Measured> {
    let aside = Aside::start()?;
    let name = peers::fresh_name();
    let mut wish = Wish { database: database.url.clone(), ..Wish::default() };
    wish.destination = Some(match rung {
        Rung::Nats => {
            let url = stage.peers.nats().await?;
            peers::nats_stream(&url, &name).await?;
            nats(&url, &name)
        }
        Rung::Kafka => {
            let bootstrap = stage.peers.kafka().await?;
            peers::kafka_topic(&bootstrap, &name).await?;
            kafka(&bootstrap, &name)
        }
        Rung::RabbitMq => {
            wish.rabbitmq = stage.peers.rabbitmq().await?;
            peers::rabbitmq_queue(&wish.rabbitmq, &name).await?;
            rabbitmq(&name)
        }
        _ => json!({ "http": { "url": format!("http://{}/", Receiver::start(&aside).await?.address) } }),
    });
    let plan = Plan::new(&wish)?;
    plan.migrate().await?;
    // The first publish would pay for the connection.
    plan.connector()?.probe().await.map_err(|fault| anyhow::anyhow!("{}", fault.detail))?;
    let count = stage.options.messages;
    database.fill(Rows { table: "outbox", count, keys: stage.options.keys, topic: TOPIC }).await?;
    let name_of_rung = rung.name().to_owned();
    let drain = Drain { name: name_of_rung, database, plan: &plan, workers: 1, expected: count, aside: Some(&aside) };
    let measured = drain.run().await;
    match rung {
        Rung::Nats => peers::drop_nats_stream(&stage.peers.nats().await?, &name).await,
        Rung::Kafka => peers::drop_kafka_topic(&stage.peers.kafka().await?, &name).await,
        Rung::RabbitMq => peers::drop_rabbitmq_queue(&wish.rabbitmq, &name).await,
        _ => {}
    }
    let measured = measured?;
    all_settled(database).await?;
    Ok(measured)
}

/// `spec` of a JetStream destination.
pub fn nats(url: &str, subject: &str) -> Value {
    json!({ "nats": { "servers": url, "subject": subject } })
}

/// `spec` of a Kafka destination.
pub fn kafka(bootstrap: &str, topic: &str) -> Value {
    json!({ "kafka": { "bootstrapServers": bootstrap, "topic": topic } })
}

/// `spec` of a RabbitMQ destination.
pub fn rabbitmq(exchange: &str) -> Value {
    json!({ "rabbitmq": { "urlFrom": { "secretKeyRef": { "name": "bench", "key": "rabbitmq" } }, "exchange": exchange } })
}

/// The first rows of tables of several depths. A table that is emptied in a moment is filled and emptied several times.
pub async fn depth(stage: &mut Stage<'_>) -> anyhow::Result<Vec<Measured>> {
    let mut all = Vec::new();
    for waiting in stage.options.depths.clone() {
        let database = stage.database().await?;
        let measured = depth_of(stage, &database, waiting).await;
        database.drop().await;
        all.push(measured?);
    }
    Ok(all)
}

async fn depth_of(stage: &Stage<'_>, database: &Database, waiting: u64) -> anyhow::Result<Measured> {
    let plan = Plan::new(&Wish { database: database.url.clone(), ..Wish::default() })?;
    plan.migrate().await?;
    let expected = waiting.min(stage.options.messages);
    let rounds = (stage.options.messages / waiting.max(1)).clamp(1, 5);
    let name = format!("depth-{waiting}");
    let (mut took, mut last) = (Duration::ZERO, Measured::default());
    for _ in 0..rounds {
        database.fill(Rows { table: "outbox", count: waiting, keys: stage.options.keys, topic: TOPIC }).await?;
        let drain = Drain { name: name.clone(), database, plan: &plan, workers: 1, expected, aside: None };
        last = drain.run().await?;
        #[allow(clippy::cast_precision_loss)]
        let seconds = expected as f64 / last.messages_per_second;
        took += Duration::from_secs_f64(seconds);
    }
    let rate = Measured::new(name, expected * rounds, took);
    Ok(Measured { messages: expected, messages_per_second: rate.messages_per_second, ..last })
}

/// Rows of a paused destination stand in front of those that are measured.
pub async fn held(stage: &Stage<'_>, database: &Database) -> anyhow::Result<Measured> {
    let plan = Plan::new(&Wish { database: database.url.clone(), ..Wish::default() })?;
    plan.migrate().await?;
    // Keys of their own: a held row holds the later ones of its key, whatever their destination.
    let keys = stage.options.keys;
    database.fill(Rows { table: "outbox", count: stage.options.held, keys, topic: HELD_TOPIC }).await?;
    let mut connection = database.connect().await?;
    sqlx::Executor::execute(&mut connection, "UPDATE outbox SET key = 'held-' || key").await?;
    sqlx::Executor::execute(&mut connection, "VACUUM FULL outbox").await?;
    let count = stage.options.messages;
    database.fill(Rows { table: "outbox", count, keys, topic: TOPIC }).await?;
    let drain =
        Drain { name: Rung::Held.name().to_owned(), database, plan: &plan, workers: 1, expected: count, aside: None };
    drain.run().await
}
