//! A queue that is deleted, or held by somebody else, is noticed, named and tried again.

use std::sync::Arc;

use lapin::{options::BasicConsumeOptions, types::FieldTable};
use queuebox_conformance::{
    destination::until,
    source::{FakeIntake, Running},
};
use queuebox_rabbitmq::{RabbitSource, SourceConfig};

use crate::support::{self, Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_queue_and_an_exclusive_consumer_are_named_and_outlived() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_queue("the-q").await;
    let running = Running::start(Arc::new(RabbitSource::new(support::source(&url, "the-q"))), FakeIntake::new());
    running.is_up().await;

    client.delete_queue("the-q").await;
    let why = running.is_down().await;
    assert!(why.contains("the-q"), "{why}");
    // Held by somebody else when the source comes back.
    client.declare_queue("the-q").await;
    let other = Client::connect(&url).await;
    let exclusive = BasicConsumeOptions { exclusive: true, ..BasicConsumeOptions::default() };
    let held = other.channel.basic_consume("the-q".into(), "held".into(), exclusive, FieldTable::default()).await;
    let Ok(held) = held else {
        // The source was first; then the exclusive consumer is the one that is refused.
        running.is_up().await;
        running.stop().await;
        return;
    };
    let why = until("the holder is named", || async {
        match running.source.health() {
            queuebox_core::ports::source::SourceHealth::Down(why) if why.contains("exclusive") => Some(why),
            _ => None,
        }
    })
    .await;
    assert!(why.contains("the-q"), "{why}");
    other.channel.basic_cancel(held.tag(), Default::default()).await.unwrap();
    drop((held, other));
    for n in 0..5 {
        client.publish("the-q", format!("{n}").as_bytes(), Default::default()).await;
    }
    running.intake.stores(5).await;
    running.is_up().await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declare_queue_makes_a_durable_queue_and_without_it_none_is_made() {
    let broker = support::broker().await;
    let vhost = support::fresh_vhost(&broker).await;
    let url = broker.url_of(&vhost);
    let running = Running::start(Arc::new(RabbitSource::new(support::source(&url, "absent"))), FakeIntake::new());
    let why = until("the queue is missed", || async {
        Some(running.is_down().await).filter(|why| why.contains("NOT_FOUND") && why.contains("absent"))
    });
    why.await;
    running.stop().await;

    let config = SourceConfig { declare_queue: true, ..support::source(&url, "made") };
    let running = Running::start(Arc::new(RabbitSource::new(config)), FakeIntake::new());
    running.is_up().await;
    assert_eq!(support::queue_figures(&broker, &vhost, "made").await["durable"], true);
    running.stop().await;
}
