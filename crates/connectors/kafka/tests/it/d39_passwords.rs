//! Cases D39 and D40: a password with every awkward character logs in, a wrong one is never shown, a rotated one counts.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_conformance::{
    destination::{CANARY, bounded, delivery},
    source::{FakeIntake, Running},
};
use queuebox_core::{Class, SecretError, ports::Destination};
use queuebox_kafka::{KafkaDestination, KafkaSource, Sasl, Secret, SecurityProtocol};
use queuebox_testkit::unique;

use crate::support::{Guarded, PASSWORD, destination, numbered, plain, source};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_taken_as_they_are_and_rotated() {
    let guarded = Guarded::start().await;
    let direct = guarded.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let current = Arc::new(Mutex::new(Arc::<str>::from(CANARY)));
    let mut cluster = guarded.sasl_cluster("");
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
    bounded("the right password", async { while kafka.probe().await.is_err() {} }).await;
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    direct.produce(&topic, numbered(0, 0..3)).await;
    running.intake.stores(4).await;
    running.is_up().await;
    running.stop().await;
}

#[tokio::test]
async fn a_secret_that_cannot_be_read_is_named() {
    let mut cluster = plain("127.0.0.1:1".into());
    let password = Secret::from_fn(|| {
        Err(SecretError { reference: "file /run/secrets/kafka".to_owned(), reason: "no such file".to_owned() })
    });
    cluster.security_protocol = SecurityProtocol::SaslPlaintext;
    cluster.sasl = Some(Sasl { mechanism: "PLAIN".into(), username: "app".into(), password });
    let kafka = KafkaDestination::new(destination(cluster, "orders", Duration::from_secs(5)));
    let fault = bounded("probe", kafka.probe()).await.expect_err("no secret");
    assert_eq!(fault.class, Class::NotConnected);
    assert!(fault.detail.contains("/run/secrets/kafka"), "{fault}");
}
