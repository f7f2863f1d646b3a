//! The three runs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use async_trait::async_trait;
use queuebox_core::{
    Fault,
    pattern::Pattern,
    ports::{Delivery, Destination, Store, schema::MigrateOptions},
    retry::RetrySchedule,
};
use queuebox_engine::{
    config::{DestinationConfig, OutboxConfig, RelayConfig, Route},
    intake::AdmissionLimits,
    metrics::Metrics,
    worker::{Worker, WorkerConfig},
};
use tokio::sync::mpsc;

use crate::{
    database::Database,
    random::Mulberry32,
    shop::{Break, Shop, order_id},
};

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Which writes, in which order.
    pub order_of_writes: &'static str,
    /// What a crash between them leaves.
    pub leaves: &'static str,
    /// Orders on which the two services disagree.
    pub broken: i64,
    /// Messages delivered.
    pub delivered: u32,
}

/// Runs the three ways of writing over `orders` orders and gives the lines of the table. Makes its tables anew, in an empty database or
/// one that it has used before; QueueBox's tables are migrated and must hold no pending rows.
///
/// # Errors
/// The database, tables that are not the lab's, or an outbox that is in use.
pub async fn dual_write(database: &Database, orders: u32, seed: u32) -> anyhow::Result<Vec<Line>> {
    database.claim().await?;
    let store = database.store().await?;
    store.migrate(MigrateOptions::default()).await.context("cannot make QueueBox's tables")?;
    store.check().await?;
    if database.number("SELECT count(*) FROM outbox WHERE state IN ('pending', 'processing')").await? > 0 {
        bail!("the outbox holds unfinished rows; the lab needs a database of its own");
    }
    let lines = vec![
        database_then_publish(database, orders, seed).await?,
        publish_then_database(database, orders, seed).await?,
        outbox_relay_inbox(database, &store, orders, seed).await?,
    ];
    store.close().await;
    Ok(lines)
}

async fn database_then_publish(database: &Database, orders: u32, seed: u32) -> anyhow::Result<Line> {
    let shop = Shop::new(database.clone(), Break::Nothing);
    shop.open(orders).await?;
    let mut random = Mulberry32::new(seed);
    let mut delivered = 0;
    for order in (0..orders).map(order_id) {
        shop.pay(&order).await?;
        if random.crashes() {
            continue;
        }
        shop.ship(&order, &order).await?;
        delivered += 1;
    }
    let broken = shop.broken_orders().await?;
    Ok(Line { order_of_writes: "DB, then publish", leaves: "paid, never shipped (lost message)", broken, delivered })
}

async fn publish_then_database(database: &Database, orders: u32, seed: u32) -> anyhow::Result<Line> {
    let shop = Shop::new(database.clone(), Break::Nothing);
    shop.open(orders).await?;
    let mut random = Mulberry32::new(seed);
    let mut delivered = 0;
    for order in (0..orders).map(order_id) {
        shop.ship(&order, &order).await?;
        delivered += 1;
        if random.crashes() {
            continue;
        }
        shop.pay(&order).await?;
    }
    let broken = shop.broken_orders().await?;
    Ok(Line { order_of_writes: "publish, then DB", leaves: "shipped, not paid (ghost message)", broken, delivered })
}

/// The real engine with one message at a time. A crash drops the worker between publish and settle and ends its lease by SQL.
async fn outbox_relay_inbox(
    database: &Database,
    store: &Arc<dyn Store>,
    orders: u32,
    seed: u32,
) -> anyhow::Result<Line> {
    let shop = Shop::new(database.clone(), Break::Nothing);
    shop.open(orders).await?;
    database.execute("DELETE FROM outbox WHERE topic = 'order.paid'", &[]).await?;
    let (crash, mut crashes) = mpsc::unbounded_channel();
    let shipping = Arc::new(Shipping {
        shop: shop.clone(),
        random: Mutex::new(Mulberry32::new(seed)),
        delivered: AtomicU32::new(0),
        crash,
    });
    let mut worker = start(store, &shipping)?;
    for order in (0..orders).map(order_id) {
        shop.pay_with_outbox(&order).await?;
        // The next order comes when this one's message is settled, so that a crash concerns one message only.
        loop {
            tokio::select! {
                _ = crashes.recv() => {
                    worker.abort();
                    end_leases(database).await?;
                    worker = start(store, &shipping)?;
                }
                settled = settled(database) => break settled?,
            }
        }
    }
    worker.stop(Duration::from_secs(5)).await;
    let delivered = shipping.delivered.load(Ordering::SeqCst);
    let broken = shop.broken_orders().await?;
    Ok(Line {
        order_of_writes: "outbox + relay + inbox",
        leaves: "nothing broken; duplicates absorbed",
        broken,
        delivered,
    })
}

/// Waits until no message is open.
async fn settled(database: &Database) -> anyhow::Result<()> {
    let open = "SELECT count(*) FROM outbox WHERE topic = 'order.paid' AND state IN ('pending', 'processing')";
    while database.number(open).await? > 0 {
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let dead = database.number("SELECT count(*) FROM outbox WHERE topic = 'order.paid' AND state = 'dead'").await?;
    if dead > 0 {
        bail!("a message of the lab is dead; look at last_error in its outbox row");
    }
    Ok(())
}

/// What waiting for the lease of the dead worker would do, at once.
async fn end_leases(database: &Database) -> anyhow::Result<()> {
    let now = database.now();
    database.execute(&format!("UPDATE queuebox_worker SET lease_expires_at = {now}"), &[]).await?;
    let marked = format!("UPDATE outbox SET lease_expires_at = {now} WHERE state = 'processing'");
    database.execute(&marked, &[]).await?;
    Ok(())
}

fn start(store: &Arc<dyn Store>, shipping: &Arc<Shipping>) -> anyhow::Result<Worker> {
    let destination = DestinationConfig {
        port: shipping.clone(),
        paused: false,
        max_in_flight: 1,
        rate: None,
        schedule: RetrySchedule::default(),
        breaker: None,
        transform: None,
    };
    let route = Route {
        topics: vec![Pattern::parse("order.paid")?],
        destinations: vec!["shipping".to_owned()],
        transform: None,
        routing_key: None,
    };
    let relay = RelayConfig {
        relay_uid: "lab".to_owned(),
        config_version: "1/lab".to_owned(),
        worker_name: "lab".to_owned(),
        outbox: OutboxConfig {
            max_in_flight: 1,
            max_crashes: i32::MAX,
            poll_interval: Duration::from_millis(5),
            ..OutboxConfig::default()
        },
        routes: vec![route],
        destinations: BTreeMap::from([("shipping".to_owned(), destination)]),
        drain_timeout: Duration::from_secs(5),
    };
    let config = WorkerConfig {
        relay: Arc::new(relay),
        forward: None,
        admissions: AdmissionLimits::default(),
        retention: Vec::new(),
        inbox_gauge_interval: Duration::from_secs(5),
        tracer: None,
    };
    let metrics = Arc::new(Metrics::new("lab")?);
    Ok(Worker::start(config, store.clone(), metrics, queuebox_engine::worker::keeper::fresh_seed()))
}

/// The shipping service, which is told of a crash after it has taken a message.
struct Shipping {
    shop: Shop,
    random: Mutex<Mulberry32>,
    delivered: AtomicU32,
    crash: mpsc::UnboundedSender<()>,
}

#[async_trait]
impl Destination for Shipping {
    fn kind(&self) -> &'static str {
        "lab"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        let order = delivery.key.clone().unwrap_or_default();
        let shipped = self.shop.ship(&delivery.id.to_string(), &order).await;
        shipped.map_err(|error| Fault::transient("shipping", error.to_string()))?;
        self.delivered.fetch_add(1, Ordering::SeqCst);
        if self.random.lock().unwrap_or_else(PoisonError::into_inner).crashes() {
            let _ = self.crash.send(());
            // The process is dead from here on: nothing comes back.
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn probe(&self) -> Result<(), Fault> {
        Ok(())
    }
}
