//! What is particular to Kafka as a source: offsets, partitions, keys, tombstones.

use std::{sync::Arc, time::Duration};

use queuebox_conformance::{
    destination::until,
    source::{Answer, FakeIntake, Running},
};
use queuebox_core::ports::Source;
use queuebox_kafka::{KafkaSource, OffsetReset, SourceConfig};
use queuebox_testkit::unique;

use crate::support::{Direct, Record, body, numbered, source, world};

fn start(config: SourceConfig) -> Running {
    Running::start(Arc::new(KafkaSource::new(config)) as Arc<dyn Source>, FakeIntake::new())
}

async fn lag_is(direct: &Direct, group: &str, topic: &str, lag: u64) {
    until("the lag", || async { (direct.lag(group, topic).await == lag).then_some(()) }).await;
}

/// Case D11: record 4 of partition 0 cannot be stored for a while. Row 19 asks the same of one partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d11_commit_past_a_failed_record() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(2, &[]).await, unique("qb-"));
    let config = source(world.cluster(), &group, &[&topic], 100);
    let fails =
        |message: &queuebox_core::ports::Received| if message.body == body(0, 4) { Answer::Fail } else { Answer::Take };
    direct.produce(&topic, [numbered(0, 0..10), numbered(1, 0..10)].concat()).await;

    let first = FakeIntake::new();
    first.decide(fails);
    let running = Running::start(Arc::new(KafkaSource::new(config.clone())), first);
    running.intake.answers(Answer::Fail, 3).await;
    until("partition 1 goes on", || async { (direct.committed(&group, &topic).await[1] == Some(10)).then_some(()) })
        .await;
    assert_eq!(direct.committed(&group, &topic).await, [Some(4), Some(10)]);
    running.stop().await;
    assert_eq!(direct.committed(&group, &topic).await, [Some(4), Some(10)], "the stop commits no more");

    // The worker starts again, and the fault is still there.
    let second = FakeIntake::new();
    second.decide(fails);
    let running = Running::start(Arc::new(KafkaSource::new(config)), second);
    running.intake.answers(Answer::Fail, 2).await;
    assert_eq!(direct.committed(&group, &topic).await, [Some(4), Some(10)]);
    running.intake.decide(|_| Answer::Take);
    until("the rest is stored", || async { (running.intake.stored().contains(&body(0, 9))).then_some(()) }).await;
    lag_is(&direct, &group, &topic, 0).await;
    // What the first one stored past the failed record came again: the inbox knows it. Record 4 is stored once, here.
    assert!((4..10).all(|n| running.intake.stored().contains(&body(0, n))));
    assert!((0..4).all(|n| !running.intake.stored().contains(&body(0, n))), "committed records came again");
    running.stop().await;
}

/// Row 19: while one record fails its offset stays, and after the fault all ten are stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_commits_the_unbroken_run() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let running = start(source(world.cluster(), &group, &[&topic], 100));
    running.intake.decide(|message| if message.body == body(0, 4) { Answer::Fail } else { Answer::Take });
    direct.produce(&topic, numbered(0, 0..10)).await;
    running.intake.answers(Answer::Fail, 3).await;
    until("the run is committed", || async { (direct.committed(&group, &topic).await == [Some(4)]).then_some(()) })
        .await;
    // In trouble the partition hands over one record at a time, so that nothing is stored past the failed one again.
    let tries = running.intake.log().iter().filter(|(_, got, _)| got.body == body(0, 4)).count();
    let past = running.intake.log().iter().filter(|(_, got, _)| got.body == body(0, 9)).count();
    assert!(tries >= 3 && past <= 1, "{tries} tries, {past} times past it");
    running.intake.decide(|_| Answer::Take);
    running.intake.stores(10).await;
    lag_is(&direct, &group, &topic, 0).await;
    running.stop().await;
}

/// Contract 6.2, 6.3: what the intake gets of a record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_position_and_time_are_told() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let record = |key: Option<&str>, body: Option<&[u8]>| Record {
        key: key.map(str::to_owned),
        body: body.map(<[u8]>::to_vec),
        headers: vec![("A".into(), b"1".to_vec()), ("a".into(), b"2".to_vec()), ("bytes".into(), vec![0xff])],
        ..Record::default()
    };
    direct.produce(&topic, vec![record(Some("order-1"), Some(b"{}")), record(None, None)]).await;
    let running = start(source(world.cluster(), &group, &[&topic], 100));
    running.intake.stores(2).await;
    let log = running.intake.log();
    let (first, tombstone) = (&log[0].1, &log[1].1);
    assert_eq!(first.record_key.as_deref(), Some("order-1"));
    assert_eq!(first.position, Some(format!("{topic}/0/0")));
    assert!(first.published_at_us.is_some_and(|at| at > 1_500_000_000_000_000));
    let headers: Vec<(&str, &str)> =
        first.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(headers, [("A", "1"), ("a", "2"), ("bytes", "base64:/w==")]);
    assert_eq!(tombstone.record_key, None);
    assert!(tombstone.body.is_empty(), "a tombstone is no JSON: the intake makes a dead row of it");
    lag_is(&direct, &group, &topic, 0).await;
    running.stop().await;
}

/// Partitions and topics that come later are read from their beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_partitions_and_topics_are_read_from_the_earliest() {
    let world = world().await;
    let direct = world.direct();
    let (topic, later, group) = (direct.new_topic(1, &[]).await, unique("later-"), unique("qb-"));
    let running = start(source(world.cluster(), &group, &[&topic, &later], 100));
    direct.produce(&topic, numbered(0, 0..5)).await;
    running.intake.stores(5).await;
    let why = running.is_down().await;
    assert!(why.contains(&later), "the missing topic is named: {why}");
    direct.add_partitions(&topic, 3).await;
    direct.produce(&topic, [numbered(1, 0..5), numbered(2, 0..5)].concat()).await;
    running.intake.stores(15).await;
    direct.make_topic(&later, 1, &[]).await;
    direct.produce(&later, numbered(7, 0..0)).await;
    direct.produce(&later, numbered(0, 100..105)).await;
    running.intake.stores(20).await;
    running.is_up().await;
    running.stop().await;
}

/// `latest`: what was there before is left out, and nothing after it, also when the very first store fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latest_loses_nothing_that_came_after_the_start() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    direct.produce(&topic, numbered(0, 0..5)).await;
    let mut config = source(world.cluster(), &group, &[&topic], 100);
    config.auto_offset_reset = OffsetReset::Latest;
    let running = start(config.clone());
    running.is_up().await;
    running.intake.decide(|_| Answer::Fail);
    direct.produce(&topic, numbered(0, 5..8)).await;
    running.intake.answers(Answer::Fail, 1).await;
    running.stop().await;
    let running = start(config);
    running.intake.stores(3).await;
    assert!(!running.intake.stored().contains(&body(0, 4)));
    lag_is(&direct, &group, &topic, 0).await;
    running.stop().await;
}

/// A partition in trouble leaves room for the others, also when they hold far more than `maxPollRecords`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_in_trouble_does_not_hold_the_others() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(4, &[]).await, unique("qb-"));
    let running = start(source(world.cluster(), &group, &[&topic], 10));
    running
        .intake
        .decide(|message| if message.body.starts_with(br#"{"id":"2-"#) { Answer::Fail } else { Answer::Take });
    for partition in 0..4 {
        direct.produce(&topic, numbered(partition, 0..200)).await;
    }
    running.intake.stores(600).await;
    assert_eq!(direct.committed(&group, &topic).await[2].unwrap_or(0), 0);
    running.intake.decide(|_| Answer::Take);
    running.intake.stores(800).await;
    lag_is(&direct, &group, &topic, 0).await;
    assert!(running.intake.inside_max() <= 10);
    running.stop().await;
}

/// A group that cannot start says so, and `run` goes on trying.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_property_that_is_not_usable_is_told() {
    let world = world().await;
    let mut config = source(world.cluster(), &unique("qb-"), &["any"], 10);
    config.cluster.properties.push(("session.timeout.ms".into(), "never".into()));
    let running = start(config);
    until("it is told", || async { running.is_down().await.contains("session.timeout.ms").then_some(()) }).await;
    tokio::time::timeout(Duration::from_secs(20), running.stop()).await.unwrap();
}

/// The consumer is made anew after an error that the library calls fatal: here another client takes its static membership.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fatal_error_is_survived() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let mut config = source(world.cluster(), &group, &[&topic], 10);
    config.cluster.properties.push(("group.instance.id".into(), "one".into()));
    let running = start(config.clone());
    running.is_up().await;
    let thief = start(config);
    thief.is_up().await;
    let why = until("the first one was fenced", || async {
        let why = running.is_down().await;
        why.contains("failed").then_some(why)
    })
    .await;
    assert!(why.contains(&group), "{why}");
    thief.stop().await;
    direct.produce(&topic, numbered(0, 0..5)).await;
    running.intake.stores(5).await;
    running.is_up().await;
    running.stop().await;
}
