//! The inbox: from senders and brokers to committed rows. Sources are pulled from, so that nothing is forwarded meanwhile.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use async_trait::async_trait;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use queuebox_core::{
    Uuid,
    ports::{Admission, Delivery, Destination, Intake, Received},
};
use queuebox_http::DataPort;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify};

use super::{PATIENCE, Rung, Spent, Stage, outbox};
use crate::{
    database::Database,
    peers,
    relay::{Plan, Wish},
    report::Measured,
    sink::Seen,
    traffic::{self, Aside},
};

/// Connections of the senders.
const CONNECTIONS: u64 = 64;
/// Messages that wait in a queue at most: with more the broker of the tests (1 GB) blocks its publishers.
const RABBITMQ_WAITING_MAX: u64 = 60_000;
/// Messages that a broker may hand over at a time.
const BATCH: u32 = 500;

fn source(kind: &str, block: Value) -> Value {
    let mut spec = json!({ "relayRef": { "name": "bench" }, "consumption": "pull", "idempotencyKeyPath": "$.id" });
    spec[kind] = block;
    spec
}

pub async fn http(stage: &Stage<'_>, database: &Database) -> anyhow::Result<Measured> {
    let source = source("http", json!({ "path": "/bench" }));
    let plan = Plan::new(&Wish { database: database.url.clone(), source: Some(source), ..Wish::default() })?;
    plan.migrate().await?;
    let sources = plan.catalog().sources()?;
    let running = plan.start(&Seen::new(0, false)).await?;
    let routes = sources.http.into_iter().map(|parts| (parts.route, running.worker.intake(parts.intake))).collect();
    let port = Arc::new(DataPort::new(sources.port, routes)?);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let serving = tokio::spawn(port.serve(listener, std::future::pending(), Duration::ZERO));

    let aside = Aside::start()?;
    let count = stage.options.messages;
    let spent = Spent::begin(database).await?;
    let started = Instant::now();
    let took = aside.run(traffic::send(address, "/inbox/bench", count, CONNECTIONS)).await??;
    let measured = Measured::new(Rung::InboxHttp.name(), count, started.elapsed()).latencies(took);
    let measured = spent.end(measured, database, aside.cpu()).await?;
    serving.abort();
    running.stop().await;
    all_stored(database, count).await?;
    Ok(measured)
}

async fn all_stored(database: &Database, count: u64) -> anyhow::Result<()> {
    let stored = database.count("SELECT count(*) FROM inbox WHERE state = 'pending'").await?;
    ensure!(stored == count, "{stored} of {count} messages are stored");
    Ok(())
}

pub async fn broker(stage: &mut Stage<'_>, rung: Rung, database: &Database) -> anyhow::Result<Measured> {
    let name = peers::fresh_name();
    let mut wish = Wish { database: database.url.clone(), ..Wish::default() };
    let (destination, block) = match rung {
        Rung::InboxNats => {
            let url = stage.peers.nats().await?;
            peers::nats_stream(&url, &name).await?;
            let block = json!({ "servers": url, "stream": name, "durable": "bench", "batchSize": BATCH });
            (outbox::nats(&url, &name), source("nats", block))
        }
        Rung::InboxKafka => {
            let bootstrap = stage.peers.kafka().await?;
            peers::kafka_topic(&bootstrap, &name).await?;
            let block =
                json!({ "bootstrapServers": bootstrap, "groupId": name, "topics": [name], "maxPollRecords": BATCH });
            (outbox::kafka(&bootstrap, &name), source("kafka", block))
        }
        _ => {
            wish.rabbitmq = stage.peers.rabbitmq().await?;
            peers::rabbitmq_queue(&wish.rabbitmq, &name).await?;
            let url = json!({ "secretKeyRef": { "name": "bench", "key": "rabbitmq" } });
            let block = json!({ "urlFrom": url, "queueName": name, "prefetchCount": BATCH });
            (outbox::rabbitmq(&name), source("rabbitmq", block))
        }
    };
    (wish.destination, wish.source) = (Some(destination), Some(block));
    let measured = receive(stage, rung, database, &wish).await;
    match rung {
        Rung::InboxNats => peers::drop_nats_stream(&stage.peers.nats().await?, &name).await,
        Rung::InboxKafka => peers::drop_kafka_topic(&stage.peers.kafka().await?, &name).await,
        _ => peers::drop_rabbitmq_queue(&wish.rabbitmq, &name).await,
    }
    measured
}

/// Fills the broker, then receives everything.
async fn receive(stage: &Stage<'_>, rung: Rung, database: &Database, wish: &Wish) -> anyhow::Result<Measured> {
    let plan = Plan::new(wish)?;
    plan.migrate().await?;
    let most = if rung == Rung::InboxRabbitMq { RABBITMQ_WAITING_MAX } else { u64::MAX };
    let count = stage.options.messages.min(most);
    fill(plan.connector()?, count, stage.options.keys).await?;

    let running = plan.start(&Seen::new(0, false)).await?;
    let broker = plan.catalog().sources()?.brokers.into_iter().next().context("no source")?;
    let counting = Arc::new(Counting {
        inner: running.worker.intake(broker.intake),
        stored: AtomicU64::new(0),
        count,
        first: Notify::new(),
        done: Notify::new(),
    });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let source = broker.source;
    let polling = {
        let intake = counting.clone();
        tokio::spawn(async move { source.run(intake, stopped.map(drop).boxed()).await })
    };
    // Joining a group and the like is no part of the rate.
    let spent = Spent::begin(database).await?;
    tokio::time::timeout(PATIENCE, counting.first.notified()).await.context("nothing came")?;
    let started = Instant::now();
    counting.complete().await?;
    let took = started.elapsed();
    let measured = spent.end(Measured::new(rung.name(), count, took), database, Duration::ZERO).await?;
    let _ = stop.send(());
    polling.await?;
    running.stop().await;
    all_stored(database, count).await?;
    Ok(measured)
}

/// Publishes `count` messages past the outbox.
async fn fill(connector: Arc<dyn Destination>, count: u64, keys: u64) -> anyhow::Result<()> {
    let publish = |number: u64| {
        let connector = connector.clone();
        async move {
            let delivery = Delivery {
                id: Uuid::new_v4(),
                topic: "bench".to_owned(),
                key: Some(format!("k{}", number % keys)),
                aggregate_type: None,
                payload: traffic::body(number).into(),
                headers: Vec::new(),
                attempt: 0,
                routing_key: None,
                time_left: Duration::from_secs(60),
            };
            connector.publish(delivery).await
        }
    };
    let published = stream::iter(1..=count).map(publish).buffer_unordered(512).try_collect::<()>().await;
    connector.close().await;
    if let Err(fault) = published {
        bail!("cannot fill the broker: {}", fault.detail);
    }
    Ok(())
}

/// Counts what the intake behind it has stored.
struct Counting {
    inner: Arc<dyn Intake>,
    stored: AtomicU64,
    count: u64,
    first: Notify,
    done: Notify,
}

impl Counting {
    async fn complete(&self) -> anyhow::Result<()> {
        let mut before = 0;
        while tokio::time::timeout(PATIENCE, self.done.notified()).await.is_err() {
            let stored = self.stored.load(SeqCst);
            if stored == before {
                bail!("{stored} of {} messages are stored, then nothing for {PATIENCE:?}", self.count);
            }
            before = stored;
        }
        Ok(())
    }
}

#[async_trait]
impl Intake for Counting {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        self.first.notify_one();
        let admissions = self.inner.admit(batch).await;
        let stored = admissions.iter().filter(|admission| matches!(admission, Admission::Stored(_))).count() as u64;
        if self.stored.fetch_add(stored, SeqCst) + stored >= self.count {
            self.done.notify_one();
        }
        admissions
    }
}
