//! TLS with a private authority and a certificate of our own (contract 10.2).

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_conformance::{
    destination::{CANARY, bounded, delivery},
    source::{FakeIntake, Running},
};
use queuebox_core::{Class, ports::Destination};
use queuebox_kafka::{KafkaDestination, KafkaSource, Secret, SecurityProtocol, Tls};
use queuebox_testkit::{Authority, Identity, unique};

use crate::support::{Guarded, PASSWORD, USER, destination, plain, source};

const TIMEOUT: Duration = Duration::from_secs(5);

fn tls(authority: &Authority, identity: Option<&Identity>) -> Tls {
    Tls {
        ca: Some(Secret::fixed(authority.ca_pem())),
        cert: identity.map(|identity| Secret::fixed(identity.cert_pem())),
        key: identity.map(|identity| Secret::fixed(identity.key_pem())),
    }
}

/// One broker for all of it: starting one takes seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_show_a_certificate() {
    let guarded = Guarded::start().await;
    let (topic, group) = (guarded.direct().new_topic(1, &[]).await, unique("qb-"));
    let client = guarded.authority.client("queuebox");
    let cluster = guarded.tls_cluster(tls(&guarded.authority, Some(&client)));
    let kafka = KafkaDestination::new(destination(cluster.clone(), &topic, TIMEOUT));
    bounded("probe", kafka.probe()).await.unwrap();
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    let running = Running::start(Arc::new(KafkaSource::new(source(cluster, &group, &[&topic], 10))), FakeIntake::new());
    running.intake.stores(1).await;
    running.stop().await;
    certificates_of_somebody_else_are_not_taken(&guarded, &client).await;
    a_renewed_certificate_counts(&guarded, client, &topic).await;
}

async fn certificates_of_somebody_else_are_not_taken(guarded: &Guarded, client: &Identity) {
    let other = Authority::new();
    let wrong =
        [("a foreign broker", tls(&other, Some(client))), ("no certificate of ours", tls(&guarded.authority, None))];
    for (what, tls) in wrong {
        let kafka = KafkaDestination::new(destination(guarded.tls_cluster(tls), "orders", TIMEOUT));
        let fault = bounded("publish", kafka.publish(delivery(0))).await.expect_err(what);
        assert_eq!(fault.class, Class::NotConnected, "{what}: {fault}");
        assert!(!fault.detail.contains("BEGIN"), "{what}: {fault}");
    }
}

async fn a_renewed_certificate_counts(guarded: &Guarded, client: Identity, topic: &str) {
    let stranger = Authority::new();
    let current = Arc::new(Mutex::new(stranger.client("queuebox")));
    let part = |read: fn(&Identity) -> String| {
        let current = current.clone();
        Some(Secret::from_fn(move || Ok(read(&current.lock().unwrap()).into())))
    };
    let ca = Some(Secret::fixed(guarded.authority.ca_pem()));
    let tls = Tls { ca, cert: part(Identity::cert_pem), key: part(Identity::key_pem) };
    let kafka = KafkaDestination::new(destination(guarded.tls_cluster(tls), topic, TIMEOUT));
    let fault = bounded("probe", kafka.probe()).await.expect_err("signed by a stranger");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    *current.lock().unwrap() = client;
    bounded("the new certificate", async { while kafka.probe().await.is_err() {} }).await;
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
}

/// Every mechanism of `saslMechanism` that librdkafka has a password for, with `SASL_SSL`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_login_works_over_tls() {
    let guarded = Guarded::start().await;
    guarded.make_scram_user("scram", "scram-password").await;
    let (topic, group) = (guarded.direct().new_topic(1, &[]).await, unique("qb-"));
    let logins = [
        ("PLAIN", USER, PASSWORD),
        ("SCRAM-SHA-256", "scram", "scram-password"),
        ("SCRAM-SHA-512", "scram", "scram-password"),
    ];
    for (n, (mechanism, user, password)) in logins.into_iter().enumerate() {
        let cluster = guarded.sasl_tls_cluster(mechanism, user, password);
        let kafka = KafkaDestination::new(destination(cluster.clone(), &topic, TIMEOUT));
        bounded(mechanism, async { while kafka.probe().await.is_err() {} }).await;
        bounded("publish", kafka.publish(delivery(n))).await.unwrap();
        let source = Arc::new(KafkaSource::new(source(cluster, &format!("{group}{n}"), &[&topic], 10)));
        let running = Running::start(source, FakeIntake::new());
        running.intake.stores(n + 1).await;
        running.stop().await;

        let wrong = guarded.sasl_tls_cluster(mechanism, user, CANARY);
        let fault = bounded("probe", KafkaDestination::new(destination(wrong, &topic, TIMEOUT)).probe()).await;
        let fault = fault.expect_err("a wrong password");
        assert_eq!((fault.class, &*fault.code), (Class::NotConnected, "login_refused"), "{mechanism}: {fault}");
        assert!(!fault.detail.contains(CANARY), "{fault}");
    }
    let mut stranger = guarded.sasl_tls_cluster("PLAIN", USER, PASSWORD);
    stranger.tls.ca = Some(Secret::fixed(Authority::new().ca_pem()));
    let kafka = KafkaDestination::new(destination(stranger, &topic, TIMEOUT));
    let fault = bounded("probe", kafka.probe()).await.expect_err("signed by a stranger");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
}

#[tokio::test]
async fn a_key_that_is_no_key_is_told_without_showing_it() {
    let authority = Authority::new();
    let mut cluster = plain("127.0.0.1:1".into());
    cluster.security_protocol = SecurityProtocol::Ssl;
    cluster.tls =
        Tls { key: Some(Secret::fixed("canary-7731")), ..tls(&authority, Some(&authority.client("queuebox"))) };
    let kafka = KafkaDestination::new(destination(cluster, "orders", TIMEOUT));
    let fault = bounded("probe", kafka.probe()).await.expect_err("no key");
    assert_eq!(fault.class, Class::NotConnected);
    assert!(fault.detail.contains("key") && !fault.detail.contains("canary"), "{fault}");
}
