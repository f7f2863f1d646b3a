//! A pull consumer survives the server, its durable and its stream.

use std::{sync::Arc, time::Duration};

use queuebox_conformance::{
    destination::until,
    source::{FakeIntake, Running},
};
use queuebox_core::ports::source::SourceHealth;
use queuebox_nats::{NatsSource, SourceConfig};
use queuebox_testkit::{eventually_ok, private_nats};

use crate::support::{self, Direct};

/// Five messages to the stream, as soon as the server takes them.
async fn publish(direct: &Direct, stream: &str, round: usize) {
    for n in 0..5 {
        let subject = format!("{stream}.x");
        let body = format!("{round}-{n}");
        eventually_ok("a publish", Duration::from_secs(30), || async {
            let acknowledgement = direct.context.publish(subject.clone(), body.clone().into()).await;
            acknowledgement.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())
        })
        .await;
    }
}

async fn down_with(running: &Running, words: &[&str]) {
    until(&format!("health says {words:?}"), || async {
        match running.source.health() {
            SourceHealth::Down(why) => words.iter().all(|word| why.contains(word)).then_some(()),
            SourceHealth::Up => None,
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_and_deletions_are_outlived() {
    let server = private_nats().await;
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream("ORDERS").await;
    let config = SourceConfig { ack_wait: Duration::from_secs(5), ..support::source(server.port(), "ORDERS") };
    let running = Running::start(Arc::new(NatsSource::new(config)), FakeIntake::new());
    publish(&direct, "ORDERS", 0).await;
    running.intake.stores(5).await;
    running.is_up().await;

    server.stop().await;
    down_with(&running, &["ORDERS"]).await;
    server.start().await;
    publish(&direct, "ORDERS", 1).await;
    running.intake.stores(10).await;

    server.kill9().await;
    server.start().await;
    publish(&direct, "ORDERS", 2).await;
    running.intake.stores(15).await;

    // The durable is made anew, and begins at the beginning of the stream: everything old is a duplicate.
    let stream = direct.context.get_stream("ORDERS").await.unwrap();
    stream.delete_consumer("d").await.unwrap();
    publish(&direct, "ORDERS", 3).await;
    running.intake.stores(20).await;

    direct.context.delete_stream("ORDERS").await.unwrap();
    down_with(&running, &["ORDERS", "does not exist"]).await;
    direct.make_stream("ORDERS").await;
    publish(&direct, "ORDERS", 4).await;
    running.intake.stores(25).await;
    running.is_up().await;
    let first = running.intake.log().into_iter().rev().find(|(_, message, _)| message.body.as_ref() == b"4-0");
    assert_eq!(first.unwrap().1.position.as_deref(), Some("ORDERS/1"), "the new stream counts from 1");
    until("everything acknowledged", || async { (direct.outstanding("ORDERS", "d").await == 0).then_some(()) }).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_durable_that_cannot_be_used_is_named() {
    use async_nats::jetstream::consumer::{AckPolicy, pull, push};
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream(&name).await;
    let stream = direct.context.get_stream(&name).await.unwrap();
    let pull = |durable: &str| pull::Config { durable_name: Some(durable.to_owned()), ..pull::Config::default() };
    stream.create_consumer(pull::Config { ack_policy: AckPolicy::All, ..pull("all") }).await.unwrap();
    let filtered = pull::Config { filter_subject: format!("{name}.a"), ..pull("filtered") };
    stream.create_consumer(filtered).await.unwrap();
    let deliver_subject = direct.client.new_inbox();
    let pushed = push::Config { durable_name: Some("push".to_owned()), deliver_subject, ..push::Config::default() };
    stream.create_consumer(pushed).await.unwrap();
    for (durable, filter, words) in [
        ("all", None, "not explicit"),
        ("filtered", Some(format!("{name}.b")), "another filter"),
        ("push", None, "push consumer"),
    ] {
        let config = SourceConfig {
            durable: durable.to_owned(),
            filter_subject: filter,
            ..support::source(server.port(), &name)
        };
        let running = Running::start(Arc::new(NatsSource::new(config)), FakeIntake::new());
        down_with(&running, &[&name, durable, words]).await;
        running.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn core_nats_is_no_source() {
    let server = private_nats().await;
    let file = server.folder().join("nats.conf");
    let text = std::fs::read_to_string(&file).unwrap();
    let without: Vec<_> = text.lines().filter(|line| !line.starts_with("jetstream")).collect();
    std::fs::write(&file, without.join("\n") + "\n").unwrap();
    server.stop().await;
    server.start().await;
    let running =
        Running::start(Arc::new(NatsSource::new(support::source(server.port(), "ORDERS"))), FakeIntake::new());
    down_with(&running, &["ORDERS", "core NATS"]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_takes_longer_than_the_ack_wait_brings_no_redelivery() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream(&name).await;
    let config = SourceConfig { ack_wait: Duration::from_secs(1), ..support::source(server.port(), &name) };
    let running = Running::start(Arc::new(NatsSource::new(config)), FakeIntake::new());
    running.intake.hold();
    publish(&direct, &name, 0).await;
    running.intake.holds(1).await;
    // Several times the ack wait, seen by the server's own clock: a message that it would redeliver is counted there.
    let stream = direct.context.get_stream(&name).await.unwrap();
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let info = stream.consumer_info("d").await.unwrap();
        assert_eq!(info.num_redelivered, 0);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    running.intake.release();
    running.intake.stores(5).await;
    assert_eq!(running.intake.log().len(), 5, "each came once");
    running.stop().await;
}
