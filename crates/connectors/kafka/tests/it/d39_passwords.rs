//! Cases D39 and D40: a password with every awkward character logs in, a wrong one is never shown, a rotated one counts.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_conformance::{
    destination::{CANARY, bounded, delivery},
    source::{FakeIntake, Running},
};
use queuebox_core::{Class, ports::Destination};
use queuebox_kafka::{KafkaDestination, KafkaSource, Secret};
use queuebox_testkit::unique;

use crate::support::{PASSWORD, destination, numbered, source, world};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_character_is_taken_as_it_is() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let kafka = KafkaDestination::new(destination(world.sasl_cluster(PASSWORD), &topic, Duration::from_secs(20)));
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    let running = Running::start(
        Arc::new(KafkaSource::new(source(world.sasl_cluster(PASSWORD), &group, &[&topic], 10))),
        FakeIntake::new(),
    );
    running.intake.stores(1).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_password_counts_at_the_next_connection() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let current = Arc::new(Mutex::new(Arc::<str>::from(CANARY)));
    let mut cluster = world.sasl_cluster("");
    let read = current.clone();
    cluster.sasl.as_mut().unwrap().password = Secret::from_fn(move || Ok(read.lock().unwrap().clone()));

    let kafka = KafkaDestination::new(destination(cluster.clone(), &topic, Duration::from_secs(5)));
    let fault = bounded("probe", kafka.probe()).await.expect_err("wrong password");
    assert_eq!((fault.class, &*fault.code), (Class::NotConnected, "login_refused"), "{fault}");
    assert!(!fault.detail.contains(CANARY), "{fault}");

    let running = Running::start(Arc::new(KafkaSource::new(source(cluster, &group, &[&topic], 10))), FakeIntake::new());
    let why = running.is_down().await;
    assert!(why.contains(&topic) && why.contains(&group) && !why.contains(CANARY), "{why}");

    *current.lock().unwrap() = PASSWORD.into();
    bounded("the new password", async { while kafka.probe().await.is_err() {} }).await;
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    direct.produce(&topic, numbered(0, 0..3)).await;
    running.intake.stores(4).await;
    running.is_up().await;
    running.stop().await;
}

#[tokio::test]
async fn a_secret_that_cannot_be_read_is_named() {
    let world = world().await;
    let mut cluster = world.sasl_cluster("");
    cluster.sasl.as_mut().unwrap().password = Secret::from_fn(|| Err("file: /run/secrets/kafka: no such file".into()));
    let kafka = KafkaDestination::new(destination(cluster, "orders", Duration::from_secs(5)));
    let fault = bounded("probe", kafka.probe()).await.expect_err("no secret");
    assert_eq!(fault.class, Class::NotConnected);
    assert!(fault.detail.contains("/run/secrets/kafka"), "{fault}");
}
