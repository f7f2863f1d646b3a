//! The broker is killed, stopped and frozen under load. Lost: 0.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use queuebox_conformance::{
    destination::{bounded, delivery, until},
    source::{FakeIntake, Running},
};
use queuebox_core::{Class, Uuid, ports::Destination};
use queuebox_kafka::{KafkaDestination, KafkaSource};
use queuebox_testkit::{Kafka, private_kafka, unique};

use crate::support::{Direct, destination, numbered, plain, source};

const TIMEOUT: Duration = Duration::from_secs(5);

/// A destination under load, as the engine drives it: what fails is tried again, what is not connected waits for a probe.
struct Load {
    done: Arc<Mutex<HashSet<Uuid>>>,
    attempts: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(kafka: &Arc<KafkaDestination>, parallel: usize) -> Self {
        let done: Arc<Mutex<HashSet<Uuid>>> = Arc::default();
        let (attempts, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let tasks = (0..parallel)
            .map(|key| {
                let (kafka, done, attempts, stop) = (kafka.clone(), Arc::clone(&done), attempts.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut n = 0;
                    while !stop.load(Ordering::SeqCst) {
                        let mut message = delivery(n);
                        message.key = Some(format!("key-{key}"));
                        deliver(&kafka, message.clone(), &attempts).await;
                        done.lock().unwrap().insert(message.id);
                        n += 1;
                    }
                })
            })
            .collect();
        Self { done, attempts, stop, tasks }
    }

    fn count(&self) -> usize {
        self.done.lock().unwrap().len()
    }

    async fn more(&self, by: usize) {
        let least = self.count() + by;
        until("publishing goes on", || async { (self.count() >= least).then_some(()) }).await;
    }

    async fn end(self) -> HashSet<Uuid> {
        self.stop.store(true, Ordering::SeqCst);
        for task in self.tasks {
            bounded("the last publishes", task).await.unwrap();
        }
        self.done.lock().unwrap().clone()
    }
}

async fn deliver(kafka: &KafkaDestination, message: queuebox_core::ports::Delivery, attempts: &AtomicUsize) {
    loop {
        match kafka.publish(message.clone()).await {
            Ok(()) => return,
            Err(fault) if fault.class == Class::NotConnected => while kafka.probe().await.is_err() {},
            Err(fault) => {
                assert_eq!(fault.class, Class::Ambiguous, "{fault}");
                attempts.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

async fn broker() -> (Kafka, Direct, String) {
    let kafka = private_kafka().await;
    let direct = Direct::to(kafka.bootstrap());
    direct.warm().await;
    let topic = direct.new_topic(3, &[]).await;
    (kafka, direct, topic)
}

/// One broker for both directions: starting one takes seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_stopped_and_frozen_under_load() {
    let (kafka, direct, topic) = broker().await;
    let config = destination(plain(kafka.bootstrap()), &topic, TIMEOUT);
    let group = unique("qb-");
    let inbound = direct.new_topic(2, &[]).await;
    let running = Running::start(
        Arc::new(KafkaSource::new(source(config.cluster.clone(), &group, &[&inbound], 50))),
        FakeIntake::new(),
    );
    let out = Arc::new(KafkaDestination::new(config));
    let load = Load::start(&out, 32);
    direct.produce(&inbound, [numbered(0, 0..100), numbered(1, 0..100)].concat()).await;
    load.more(200).await;
    running.intake.stores(200).await;
    running.is_up().await;

    kafka.kill9().await;
    let why = running.is_down().await;
    assert!(why.contains(&inbound) && why.contains(&group), "{why}");
    until("the destination says so", || async { out.probe().await.err() }).await;
    kafka.start().await;
    load.more(200).await;
    direct.produce(&inbound, [numbered(0, 100..200), numbered(1, 100..200)].concat()).await;
    running.intake.stores(400).await;
    running.is_up().await;

    kafka.stop().await;
    kafka.start().await;
    load.more(200).await;

    kafka.pause().await;
    let fault = until("the destination says so", || async { out.probe().await.err() }).await;
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    kafka.cont().await;
    load.more(200).await;
    direct.produce(&inbound, [numbered(0, 200..300), numbered(1, 200..300)].concat()).await;
    running.intake.stores(600).await;
    running.stop().await;

    let attempts = load.attempts.clone();
    let done = load.end().await;
    let there: HashSet<Uuid> = direct.read(&topic).await.iter().filter_map(crate::support::Stored::id).collect();
    assert!(done.is_subset(&there), "acknowledged and lost: {}", done.difference(&there).count());
    // 32 in flight: each of the three outages costs a row at most one attempt, and so does each time that a broker on a busy machine
    // keeps them waiting. Were an attempt spent on each try while it is away, there would be thousands.
    assert!(attempts.load(Ordering::SeqCst) <= 32 * 3 * 3, "{attempts:?} attempts");
    out.close().await;
}

/// Row 54: a broker that is away spends no attempt, and what waited is sent when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_down_spends_no_attempt() {
    let (kafka, direct, topic) = broker().await;
    let config = destination(plain(kafka.bootstrap()), &topic, TIMEOUT);
    let out = Arc::new(KafkaDestination::new(config));
    bounded("publish", out.publish(delivery(0))).await.unwrap();
    kafka.kill9().await;
    until("it is noticed", || async { out.probe().await.err() }).await;
    for n in 0..2 {
        let fault = bounded("publish", out.publish(delivery(n))).await.expect_err("nobody is there");
        assert_eq!(fault.class, Class::NotConnected, "{fault}");
    }
    kafka.start().await;
    let waiting: Vec<_> = (0..20).map(delivery).collect();
    let attempts = AtomicUsize::new(0);
    for message in &waiting {
        bounded("it is back", deliver(&out, message.clone(), &attempts)).await;
    }
    assert_eq!(attempts.into_inner(), 0);
    let there: HashSet<Uuid> = direct.read(&topic).await.iter().filter_map(crate::support::Stored::id).collect();
    assert_eq!(there.len(), 21);
}
