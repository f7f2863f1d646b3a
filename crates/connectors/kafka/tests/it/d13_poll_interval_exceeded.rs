//! Case D13: a store that takes longer than `max.poll.interval.ms` costs the consumer nothing.

use std::{sync::Arc, time::Duration};

use queuebox_conformance::source::{FakeIntake, Running, bounded};
use queuebox_core::ports::source::SourceHealth;
use queuebox_kafka::KafkaSource;
use queuebox_testkit::unique;
use tokio::time::Instant;

use crate::support::{numbered, source, world};

/// The shortest that the library takes, for both.
const INTERVAL: Duration = Duration::from_secs(6);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_consumer_never_leaves_its_group() {
    let world = world().await;
    let direct = world.direct();
    let (topic, group) = (direct.new_topic(2, &[]).await, unique("qb-"));
    let mut cluster = world.cluster();
    for name in ["max.poll.interval.ms", "session.timeout.ms"] {
        cluster.properties.push((name.into(), INTERVAL.as_millis().to_string()));
    }
    let running =
        Running::start(Arc::new(KafkaSource::new(source(cluster, &group, &[&topic], 100))), FakeIntake::new());
    running.is_up().await;
    running.intake.hold();
    direct.produce(&topic, [numbered(0, 0..500), numbered(1, 0..500)].concat()).await;
    running.intake.holds(1).await;
    let before = running.intake.inside_max();
    // The case is about time that passes: twice the interval, looked at throughout.
    let until = Instant::now() + INTERVAL * 2;
    while Instant::now() < until {
        assert_eq!(direct.members(&group).await, 1, "the consumer left its group");
        assert_eq!(running.source.health(), SourceHealth::Up);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(before <= 100 && running.intake.inside_max() <= 100);
    running.intake.release();
    running.intake.stores(1000).await;
    assert_eq!(running.intake.log().len(), 1000, "once each");
    bounded("lag 0", async {
        while direct.lag(&group, &topic).await > 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    running.stop().await;
}
