//! Messages per second, and processor time per message, of the connector alone, against a Kafka of its own on this machine.
//!
//! ```sh
//! cargo run --release -p queuebox-kafka --example kafka_throughput -- 200000 [linger.ms=1 …]
//! ```
//!
//! Further arguments are properties of the client library, to compare values.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use queuebox_core::{
    Uuid,
    ports::{Admission, Delivery, Destination, Intake, Received, Source},
    template::{Address, Template, Vocabulary},
};
use queuebox_kafka::{Cluster, DestinationConfig, KafkaDestination, KafkaSource, OffsetReset, SourceConfig};
use queuebox_testkit::private_kafka;
use tokio::sync::Notify;

/// Rows of the benchmark are of this size.
const BODY: usize = 300;

#[tokio::main]
async fn main() {
    let count: usize = std::env::args().nth(1).map_or(100_000, |count| count.parse().expect("a number of messages"));
    let kafka = private_kafka().await;
    kafka.create_topic("throughput", 4).await;
    let pairs = std::env::args()
        .skip(2)
        .map(|pair| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())));
    let properties = pairs.collect::<Option<Vec<_>>>().expect("name=value");
    let cluster = Cluster { bootstrap_servers: kafka.bootstrap(), properties, ..Cluster::default() };
    for in_flight in [1, 512] {
        destination(&cluster, if in_flight == 1 { count / 100 } else { count }, in_flight).await;
    }
    for batch in [100, 500] {
        source(&cluster, count, batch).await;
    }
}

async fn destination(cluster: &Cluster, count: usize, in_flight: usize) {
    let kafka = KafkaDestination::new(DestinationConfig {
        cluster: cluster.clone(),
        topic: Address::Template(Template::parse("throughput", Vocabulary::Address).unwrap()),
        key: Template::parse("{{ key }}", Vocabulary::RecordKey).unwrap(),
        headers: Vec::new(),
        timeout: Duration::from_secs(30),
    });
    kafka.probe().await.unwrap();
    let body = Bytes::from(format!("{{\"text\":\"{}\"}}", "x".repeat(BODY)));
    let began = begin();
    let mut outcomes = stream::iter(0..count)
        .map(|n| {
            kafka.publish(Delivery {
                id: Uuid::new_v4(),
                topic: "order.created".into(),
                key: Some(format!("key-{}", n % 10_000)),
                aggregate_type: None,
                payload: body.clone(),
                headers: vec![("x-source".into(), "bench".into()), ("x-idempotency-key".into(), n.to_string())],
                attempt: 0,
                routing_key: None,
                time_left: Duration::from_secs(30),
            })
        })
        .buffer_unordered(in_flight);
    while let Some(outcome) = outcomes.next().await {
        outcome.unwrap();
    }
    report(&format!("destination, {in_flight} in flight"), count, began);
}

/// Takes everything after the time that a group commit needs.
struct Sink {
    taken: AtomicUsize,
    count: usize,
    done: Notify,
}

#[async_trait]
impl Intake for Sink {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        if self.taken.fetch_add(batch.len(), Ordering::SeqCst) + batch.len() >= self.count {
            self.done.notify_one();
        }
        batch.iter().map(|_| Admission::Stored(Uuid::nil())).collect()
    }
}

async fn source(cluster: &Cluster, count: usize, max_poll_records: u32) {
    let source = KafkaSource::new(SourceConfig {
        cluster: cluster.clone(),
        group_id: format!("throughput-{max_poll_records}"),
        topics: vec!["throughput".into()],
        auto_offset_reset: OffsetReset::Earliest,
        max_poll_records,
    });
    let sink = Arc::new(Sink { taken: AtomicUsize::new(0), count, done: Notify::new() });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let began = begin();
    let running = {
        let sink = sink.clone();
        tokio::spawn(async move { source.run(sink, stopped.map(|_| ()).boxed()).await })
    };
    sink.done.notified().await;
    report(&format!("source, maxPollRecords {max_poll_records}, joining included"), count, began);
    let _ = stop.send(());
    running.await.unwrap();
}

fn report(what: &str, count: usize, began: (Instant, f64)) {
    let (seconds, cpu) = (began.0.elapsed().as_secs_f64(), cpu_seconds() - began.1);
    let (rate, cost) = (count as f64 / seconds, cpu * 1e6 / count as f64);
    println!("{what}: {count} in {seconds:.2} s = {rate:.0}/s, {cost:.1} µs of processor time each");
}

fn begin() -> (Instant, f64) {
    (Instant::now(), cpu_seconds())
}

/// Time that this process has spent on processors, the library's threads included. Linux only; 100 ticks a second.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
