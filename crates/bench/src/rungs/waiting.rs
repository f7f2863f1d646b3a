//! How long a message waits: alone, and at a steady rate while a snapshot is held.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use serde_json::json;
use sqlx::{Connection, Executor, PgConnection};

use super::{PATIENCE, Rung, Spent, Stage};
use crate::{
    database::Database,
    relay::{Plan, TOPIC, Wish},
    report::Measured,
    sink::Seen,
    traffic::{Aside, Receiver},
};

const INSERT: &str = "INSERT INTO outbox (topic, key, payload) SELECT $1, 'k' || ($2 % $3), jsonb_build_object('n', $2, 'fill', repeat('x', 470))";

/// Long enough for a worker to become idle in between.
const PAUSE: Duration = Duration::from_millis(300);
/// Producers of a steady rate.
const PRODUCERS: u64 = 8;
/// Messages of `latency`: the 99th percentile of fewer says nothing, more take minutes.
const LONE_MAX: u64 = 200;

/// When each number was sent to the database.
type Sent = Arc<Mutex<HashMap<u64, Instant>>>;

/// Lone messages to an HTTP receiver, from before the INSERT, its commit included, until the receiver has answered.
pub async fn latency(stage: &Stage<'_>, database: &Database) -> anyhow::Result<Measured> {
    let aside = Aside::start()?;
    let receiver = Receiver::start(&aside).await?;
    let destination = Some(json!({ "http": { "url": format!("http://{}/", receiver.address) } }));
    let plan = Plan::new(&Wish { database: database.url.clone(), destination, ..Wish::default() })?;
    plan.migrate().await?;
    let count = stage.options.messages_few.min(LONE_MAX);
    let seen = Seen::new(count, true);
    let running = plan.start(&seen).await?;
    let mut app = database.connect().await?;
    let spent = Spent::begin(database).await?;
    let mut sent = HashMap::new();
    for number in 1..=count {
        tokio::time::sleep(PAUSE).await;
        sent.insert(number, Instant::now());
        insert(&mut app, number, stage.options.keys).await?;
    }
    seen.complete(PATIENCE).await?;
    running.stop().await;
    let measured = Measured::new(Rung::Latency.name(), count, seen.verdict()?).latencies(between(&sent, &seen));
    spent.end(measured, database, aside.cpu()).await
}

async fn insert(app: &mut PgConnection, number: u64, keys: u64) -> anyhow::Result<()> {
    let (number, keys) = (i64::try_from(number)?, i64::try_from(keys)?);
    sqlx::query(INSERT).bind(TOPIC).bind(number).bind(keys).execute(app).await.context("cannot insert")?;
    Ok(())
}

fn between(sent: &HashMap<u64, Instant>, seen: &Seen) -> Vec<f64> {
    let arrivals = seen.arrivals();
    let waits = arrivals.iter().filter_map(|(number, at)| Some(at.saturating_duration_since(*sent.get(number)?)));
    waits.map(|wait| wait.as_secs_f64()).collect()
}

/// Twice the same steady rate, each in a database of its own: free, then with a transaction that holds its snapshot from the beginning.
/// The whole way of a message, and of that one settle and read alone: the producers' inserts and commits are in the first only.
pub async fn snapshot(stage: &mut Stage<'_>) -> anyhow::Result<Vec<Measured>> {
    let mut both = Vec::new();
    for held in [false, true] {
        let database = stage.database().await?;
        let measured = steady(stage, &database, held).await;
        database.drop().await;
        both.extend(measured?);
    }
    Ok(both)
}

async fn steady(stage: &Stage<'_>, database: &Database, held: bool) -> anyhow::Result<[Measured; 2]> {
    let plan = Plan::new(&Wish { database: database.url.clone(), ..Wish::default() })?;
    plan.migrate().await?;
    let mut holder = database.connect().await?;
    if held {
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
        holder.execute("SELECT count(*) FROM outbox").await?;
    }
    let options = stage.options;
    let per_producer = (options.snapshot_rate * options.snapshot_seconds / PRODUCERS).max(1);
    let count = per_producer * PRODUCERS;
    let seen = Seen::new(count, true);
    let running = plan.start(&seen).await?;
    let aside = Aside::start()?;
    let sent: Sent = Arc::default();
    let spent = Spent::begin(database).await?;
    for producer in 0..PRODUCERS {
        #[allow(clippy::cast_precision_loss)]
        let pause = Duration::from_secs_f64(PRODUCERS as f64 / options.snapshot_rate.max(1) as f64);
        let producing = Producing {
            url: database.url.clone(),
            sent: sent.clone(),
            // Keys of its own: the order in which two producers commit is not that of their numbers.
            keys: PRODUCERS * (options.keys / PRODUCERS).max(1),
            producer,
            count: per_producer,
            pause,
        };
        aside.begin(async move {
            if let Err(error) = producing.run().await {
                eprintln!("a producer failed: {error:#}");
            }
        });
    }
    seen.complete(PATIENCE).await?;
    let (p50_ms, p99_ms) = running.polls();
    running.stop().await;
    let sent = std::mem::take(&mut *sent.lock().unwrap_or_else(PoisonError::into_inner));
    let name = if held { "snapshot-held" } else { "snapshot-free" };
    let measured = Measured::new(name, count, seen.verdict()?).latencies(between(&sent, &seen));
    let measured = spent.end(measured, database, aside.cpu()).await?;
    holder.close().await?;
    let poll = Measured { rung: format!("{name}-poll"), p50_ms, p99_ms, ..measured.clone() };
    Ok([measured, poll])
}

struct Producing {
    url: String,
    sent: Sent,
    keys: u64,
    producer: u64,
    count: u64,
    pause: Duration,
}

impl Producing {
    async fn run(self) -> anyhow::Result<()> {
        let mut app = PgConnection::connect(&self.url).await?;
        let mut beat = tokio::time::interval(self.pause);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
        for turn in 1..=self.count {
            beat.tick().await;
            let number = turn * PRODUCERS + self.producer;
            self.sent.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Instant::now());
            insert(&mut app, number, self.keys).await?;
        }
        Ok(())
    }
}
