//! Case D12: a record that is too large fails by itself, whatever is in flight with it.

use std::time::Duration;

use futures::future::join_all;
use queuebox_conformance::destination::{bounded, delivery};
use queuebox_core::{Class, ports::Destination};
use queuebox_kafka::KafkaDestination;

use crate::support::{destination, world};

/// Row 55. The topic's limit counts for a whole batch: without care the 50 others would fail with the large one, and on a topic
/// with a small limit they would fail by themselves as soon as enough of them are in flight.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_large_fails_alone() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(1, &[("max.message.bytes", "20000")]).await;
    let kafka = KafkaDestination::new(destination(world.cluster(), &topic, Duration::from_secs(20)));
    let one_key = async {
        let mut outcomes = Vec::new();
        for (n, size) in [(0, 10), (1, 30_000), (2, 10)] {
            let mut message = delivery(n);
            message.key = Some("one".into());
            message.payload = format!("\"{}\"", "x".repeat(size)).into();
            outcomes.push(kafka.publish(message).await);
        }
        outcomes
    };
    let others = join_all((10..60).map(|n| {
        let mut message = delivery(n);
        message.payload = format!("\"{}\"", "y".repeat(1_000)).into();
        kafka.publish(message)
    }));
    let (one_key, others) = bounded("all of them", async { tokio::join!(one_key, others) }).await;
    for outcome in others {
        outcome.unwrap();
    }
    let fault = one_key[1].as_ref().expect_err("30,000 bytes do not fit");
    assert_eq!(fault.class, Class::Refused, "{fault}");
    assert!(fault.detail.contains("30") && fault.detail.contains("20000"), "size and limit are named: {fault}");
    assert!(!fault.trips_breaker);
    assert!(one_key[0].is_ok() && one_key[2].is_ok(), "{one_key:?}");
    assert_eq!(direct.read(&topic).await.len(), 52);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_brokers_default_limit_is_named() {
    let world = world().await;
    let topic = world.direct().new_topic(1, &[]).await;
    let kafka = KafkaDestination::new(destination(world.cluster(), &topic, Duration::from_secs(20)));
    let mut message = delivery(0);
    message.payload = format!("\"{}\"", "x".repeat(1_500_000)).into();
    let fault = bounded("publish", kafka.publish(message)).await.expect_err("too large");
    assert_eq!(fault.class, Class::Refused, "{fault}");
    assert!(fault.detail.contains("1048588"), "{fault}");
    bounded("the next one", kafka.publish(delivery(1))).await.unwrap();
}

/// A limit that was raised counts at once: none of ours stands in the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_may_take_more_than_a_megabyte() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(1, &[("max.message.bytes", "4000000")]).await;
    let kafka = KafkaDestination::new(destination(world.cluster(), &topic, Duration::from_secs(20)));
    let mut message = delivery(0);
    message.payload = format!("\"{}\"", "x".repeat(3_000_000)).into();
    bounded("publish", kafka.publish(message)).await.unwrap();
    assert_eq!(direct.read(&topic).await[0].body.len(), 3_000_002);
}
