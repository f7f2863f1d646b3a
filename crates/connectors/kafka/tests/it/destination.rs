//! What is particular to Kafka as a destination: keys, partitions, topics by template.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use queuebox_conformance::destination::{bounded, delivery, until};
use queuebox_core::{
    Class,
    ports::Destination,
    template::{Template, Vocabulary},
};
use queuebox_kafka::KafkaDestination;
use queuebox_testkit::{ProxyMode, unique};

use crate::support::{destination, plain, world};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Row 44, the half of Kafka: body, key, headers of contract 7.4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_and_nats_delivery() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(1, &[]).await;
    let mut config = destination(world.cluster(), &topic, TIMEOUT);
    config.headers = vec![("x-from".into(), "queuebox".into())];
    let kafka = KafkaDestination::new(config);
    let mut message = delivery(7);
    message.headers.push(("traceparent".into(), "00-1-2-01".into()));
    bounded("publish", kafka.publish(message.clone())).await.unwrap();
    let mut without_key = delivery(8);
    without_key.key = None;
    bounded("publish", kafka.publish(without_key)).await.unwrap();
    let stored = direct.read(&topic).await;
    assert_eq!(stored[0].key.as_deref(), Some("key-7"));
    assert_eq!(stored[0].body, message.payload);
    let headers: Vec<(&str, &str)> =
        stored[0].headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let id = message.id.to_string();
    assert_eq!(
        headers,
        [
            ("x-from", "queuebox"),
            ("x-tenant", "a"),
            ("traceparent", "00-1-2-01"),
            ("x-message-id", id.as_str()),
            ("x-topic", "order.created"),
            ("x-attempt", "0"),
        ]
    );
    assert_eq!(stored[1].key, None);
}

/// A key stays in one partition, the one where Java producers put it, and in its order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_keeps_its_partition_and_its_order() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(6, &[]).await;
    let kafka = Arc::new(KafkaDestination::new(destination(world.cluster(), &topic, TIMEOUT)));
    // As the engine does it: many keys at a time, one message of a key after the other.
    let keys = (0..30).map(|key| {
        let kafka = kafka.clone();
        async move {
            for n in 0..20 {
                let mut message = delivery(n);
                message.key = Some(format!("k{key}"));
                kafka.publish(message).await.unwrap();
            }
        }
    });
    bounded("all keys", join_all(keys)).await;
    let mut by_key: HashMap<String, (i32, Vec<Vec<u8>>)> = HashMap::new();
    for record in direct.read(&topic).await {
        let (partition, bodies) = by_key.entry(record.key.unwrap()).or_insert((record.partition, Vec::new()));
        assert_eq!(*partition, record.partition);
        bodies.push(record.body);
    }
    let order: Vec<Vec<u8>> = (0..20).map(|n| delivery(n).payload.to_vec()).collect();
    assert_eq!(by_key.len(), 30);
    assert!(by_key.values().all(|(_, bodies)| *bodies == order));
    // What org.apache.kafka.common.utils.Utils.toPositive(murmur2("k0".getBytes())) % 6 and the like give.
    let places: Vec<i32> = ["k0", "k1", "k2"].iter().map(|key| by_key[*key].0).collect();
    assert_eq!(places, [java_partition(b"k0"), java_partition(b"k1"), java_partition(b"k2")]);
}

/// The default partitioner of Java clients for 6 partitions, from its published definition (MurmurHash2, seed 0x9747b28c).
fn java_partition(key: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c_u32 ^ u32::try_from(key.len()).unwrap();
    let (words, rest) = key.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    if !rest.is_empty() {
        for (n, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * n);
        }
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^= hash >> 15;
    i32::try_from((hash & 0x7fff_ffff) % 6).unwrap()
}

/// A topic by template: the missing one costs an attempt of its row alone, and works as soon as it is made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_topic_of_a_template_fails_its_own_row() {
    let world = world().await;
    let direct = world.direct();
    let (there, missing) = (direct.new_topic(1, &[]).await, unique("missing-"));
    let kafka = KafkaDestination::new(destination(world.cluster(), "{{ topic }}", TIMEOUT));
    bounded("probe", kafka.probe()).await.unwrap();
    let to = |topic: &str| {
        let mut message = delivery(0);
        message.topic = topic.to_owned();
        kafka.publish(message)
    };
    let (good, bad) = bounded("both", async { tokio::join!(to(&there), to(&missing)) }).await;
    good.unwrap();
    let fault = bad.expect_err("it does not exist");
    assert_eq!((fault.class, &*fault.code), (Class::Transient, "topic_missing"), "{fault}");
    assert!(fault.detail.contains(&missing), "{fault}");
    direct.make_topic(&missing, 1, &[]).await;
    until("the new topic takes it", || async { to(&missing).await.ok() }).await;
    bounded("the other one", to(&there)).await.unwrap();
}

/// A declared topic that goes and comes: its rows are held meanwhile, under the same destination.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_topic_that_is_made_again_is_used_again() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(1, &[]).await;
    let kafka = KafkaDestination::new(destination(world.cluster(), &topic, TIMEOUT));
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    direct.remove_topic(&topic).await;
    let fault = bounded("probe", kafka.probe()).await.expect_err("it is gone");
    assert_eq!((fault.class, &*fault.code), (Class::NotConnected, "topic_missing"), "{fault}");
    until("the topic can be made", || async {
        direct.make_topic(&topic, 1, &[]).await;
        Some(())
    })
    .await;
    until("it is used again", || async { kafka.publish(delivery(1)).await.ok() }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_empty_fails_the_attempt() {
    let world = world().await;
    let kafka = KafkaDestination::new(destination(world.cluster(), "{{ payload.none }}", TIMEOUT));
    let fault = bounded("publish", kafka.publish(delivery(0))).await.expect_err("no address");
    assert_eq!((fault.class, &*fault.code), (Class::Transient, "empty_address"));
}

/// Contract 7.3: the route's routing key is the record key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routes_key_wins() {
    let world = world().await;
    let direct = world.direct();
    let topic = direct.new_topic(1, &[]).await;
    let kafka = KafkaDestination::new(destination(world.cluster(), &topic, TIMEOUT));
    let mut message = delivery(3);
    message.routing_key = Some(Arc::new(Template::parse("n{{ payload.n }}", Vocabulary::RoutingKey).unwrap()));
    bounded("publish", kafka.publish(message)).await.unwrap();
    assert_eq!(direct.read(&topic).await[0].key.as_deref(), Some("n3"));
}

/// Contract 5.1.6: when a lease ends while nothing gets through, what the client still holds is taken back. It would arrive
/// later otherwise, perhaps behind what the lane's next owner sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_does_not_outlive_its_lease_in_the_clients_queue() {
    let world = world().await;
    let direct = world.direct();
    let (proxy, topic) = (world.proxy().await, direct.new_topic(1, &[]).await);
    let kafka = KafkaDestination::new(destination(plain(proxy.bootstrap()), &topic, TIMEOUT));
    bounded("publish", kafka.publish(delivery(0))).await.unwrap();
    // The first one is on the wire, with a time that is long; what comes after it waits in the client.
    proxy.set(ProxyMode::Stall);
    let mut short = delivery(1);
    short.time_left = Duration::from_millis(300);
    let fault = bounded("publish", kafka.publish(short)).await.expect_err("nothing gets through");
    assert_eq!(fault.class, Class::Ambiguous);
    // The next question makes new producers, and takes back what the old ones hold, also when nobody answers it.
    let fault = bounded("probe", kafka.probe()).await.expect_err("nothing gets through");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    // The old connections never work again: only what was inside a client could still arrive.
    let before = proxy.connections();
    proxy.cut();
    until("a new connection", || async { (proxy.connections() > before).then_some(()) }).await;
    proxy.set(ProxyMode::Pass);
    until("it is back", || async { kafka.probe().await.ok() }).await;
    bounded("publish", kafka.publish(delivery(2))).await.unwrap();
    let bodies: Vec<Vec<u8>> = direct.read(&topic).await.into_iter().map(|record| record.body).collect();
    assert_eq!(bodies, [0, 2].map(|n| delivery(n).payload.to_vec()));
}
