//! TLS with a private authority and a certificate of our own (contract 10.2).

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_conformance::{
    destination::{bounded, delivery},
    source::{FakeIntake, Running},
};
use queuebox_core::{Class, ports::Destination};
use queuebox_kafka::{KafkaDestination, KafkaSource, Secret, Tls};
use queuebox_testkit::{Authority, Identity, unique};

use crate::support::{destination, source, world};

const TIMEOUT: Duration = Duration::from_secs(5);

fn tls(authority: &Authority, identity: Option<&Identity>) -> Tls {
    Tls {
        ca: Some(Secret::fixed(authority.ca_pem())),
        cert: identity.map(|identity| Secret::fixed(identity.cert_pem())),
        key: identity.map(|identity| Secret::fixed(identity.key_pem())),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_show_a_certificate() {
    let world = world().await;
    let (topic, group) = (world.direct().new_topic(1, &[]).await, unique("qb-"));
    let cluster = world.tls_cluster(tls(&world.authority, Some(&world.authority.client("queuebox"))));
    let kafka = KafkaDestination::new(destination(cluster.clone(), &topic, TIMEOUT));
    bounded("probe", kafka.probe()).await.unwrap();
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    let running = Running::start(Arc::new(KafkaSource::new(source(cluster, &group, &[&topic], 10))), FakeIntake::new());
    running.intake.stores(1).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_of_somebody_else_is_not_taken() {
    let world = world().await;
    let (other, client) = (Authority::new(), world.authority.client("queuebox"));
    for (what, tls) in
        [("a foreign broker", tls(&other, Some(&client))), ("no certificate of ours", tls(&world.authority, None))]
    {
        let kafka = KafkaDestination::new(destination(world.tls_cluster(tls), "orders", TIMEOUT));
        let fault = bounded("publish", kafka.publish(delivery(0))).await.expect_err(what);
        assert_eq!(fault.class, Class::NotConnected, "{what}: {fault}");
        assert!(!fault.detail.contains("BEGIN"), "{what}: {fault}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_certificate_counts_at_the_next_connection() {
    let world = world().await;
    let topic = world.direct().new_topic(1, &[]).await;
    let (stranger, client) = (Authority::new(), world.authority.client("queuebox"));
    let current = Arc::new(Mutex::new(stranger.client("queuebox")));
    let part = |read: fn(&Identity) -> String| {
        let current = current.clone();
        Some(Secret::from_fn(move || Ok(read(&current.lock().unwrap()).into())))
    };
    let tls = Tls {
        ca: Some(Secret::fixed(world.authority.ca_pem())),
        cert: part(Identity::cert_pem),
        key: part(Identity::key_pem),
    };
    let kafka = KafkaDestination::new(destination(world.tls_cluster(tls), &topic, TIMEOUT));
    let fault = bounded("probe", kafka.probe()).await.expect_err("signed by a stranger");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    *current.lock().unwrap() = client;
    bounded("the new certificate", async { while kafka.probe().await.is_err() {} }).await;
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
}

#[tokio::test]
async fn a_key_that_is_no_key_is_told_without_showing_it() {
    let world = world().await;
    let broken = Tls {
        key: Some(Secret::fixed("canary-7731")),
        ..tls(&world.authority, Some(&world.authority.client("queuebox")))
    };
    let kafka = KafkaDestination::new(destination(world.tls_cluster(broken), "orders", TIMEOUT));
    let fault = bounded("probe", kafka.probe()).await.expect_err("no key");
    assert_eq!(fault.class, Class::NotConnected);
    assert!(fault.detail.contains("key") && !fault.detail.contains("canary"), "{fault}");
}
