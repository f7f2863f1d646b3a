//! Rebalances under load: nothing is lost, nothing is committed that is not stored, and nothing by who no longer owns it.

use std::{collections::HashSet, sync::Arc, time::Duration};

use queuebox_conformance::{
    destination::until,
    source::{Answer, FakeIntake, Running},
};
use queuebox_core::ports::{Source, source::SourceHealth};
use queuebox_kafka::KafkaSource;
use queuebox_testkit::unique;
use tokio::sync::oneshot;

use crate::support::{Direct, body, numbered, source, world};

async fn member(group: &str, topic: &str, intake: Arc<FakeIntake>) -> Running {
    let world = world().await;
    let running = Running::start(
        Arc::new(KafkaSource::new(source(world.cluster(), group, &[topic], 50))) as Arc<dyn Source>,
        intake,
    );
    running.is_up().await;
    running
}

async fn committed_sum(direct: &Direct, group: &str, topic: &str) -> i64 {
    direct.committed(group, topic).await.into_iter().map(Option::unwrap_or_default).sum()
}

/// Members come and go while records flow. Every member stores for itself, as processes with one inbox each would; together
/// they have everything, and what was ever committed was stored before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_under_load() {
    const PARTITIONS: i32 = 6;
    let direct = world().await.direct();
    let (topic, group) = (direct.new_topic(PARTITIONS, &[]).await, unique("qb-"));
    let intakes: Vec<Arc<FakeIntake>> = (0..3).map(|_| FakeIntake::new()).collect();
    let stored = || intakes.iter().flat_map(|intake| intake.stored()).collect::<HashSet<Vec<u8>>>();

    let first = member(&group, &topic, intakes[0].clone()).await;
    // Records flow until the last member has come or gone, however long a rebalance takes: a member that joins a topic which
    // is read to its end gets none.
    let (enough, mut told) = oneshot::channel::<()>();
    let producing = {
        let (direct, topic) = (direct.clone(), topic.clone());
        tokio::spawn(async move {
            let mut each = 0;
            while told.try_recv().is_err() {
                let records = (0..PARTITIONS).flat_map(|partition| numbered(partition, each..each + 10)).collect();
                direct.produce(&topic, records).await;
                each += 10;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            each
        })
    };
    let second = member(&group, &topic, intakes[1].clone()).await;
    until("the second has some", || async { (!intakes[1].stored().is_empty()).then_some(()) }).await;
    let third = member(&group, &topic, intakes[2].clone()).await;
    check_committed(&direct, &group, &topic, &intakes).await;
    first.stop().await;
    check_committed(&direct, &group, &topic, &intakes).await;
    let first = member(&group, &topic, intakes[0].clone()).await;
    second.stop().await;
    check_committed(&direct, &group, &topic, &intakes).await;
    enough.send(()).unwrap();
    let all = producing.await.unwrap() * usize::try_from(PARTITIONS).unwrap();
    until("everything is stored", || async { (stored().len() == all).then_some(()) }).await;
    until("everything is committed", || async {
        (committed_sum(&direct, &group, &topic).await == i64::try_from(all).unwrap()).then_some(())
    })
    .await;
    first.stop().await;
    third.stop().await;
    assert_eq!(committed_sum(&direct, &group, &topic).await, i64::try_from(all).unwrap(), "the stops moved it");
}

/// Every committed offset stands behind records that are stored. Reads the offsets first: what is stored only grows.
async fn check_committed(direct: &Direct, group: &str, topic: &str, intakes: &[Arc<FakeIntake>]) {
    let committed = direct.committed(group, topic).await;
    let stored: HashSet<Vec<u8>> = intakes.iter().flat_map(|intake| intake.stored()).collect();
    for (partition, offset) in (0..).zip(committed) {
        let before = usize::try_from(offset.unwrap_or(0)).unwrap();
        assert!(
            (0..before).all(|n| stored.contains(&body(partition, n))),
            "partition {partition}: {before} committed and not stored"
        );
    }
}

/// A member that loses its partition while the store hangs commits nothing for it afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offsets_of_partitions_that_moved_are_not_committed() {
    let direct = world().await.direct();
    let (topic, group) = (direct.new_topic(2, &[]).await, unique("qb-"));
    let slow = member(&group, &topic, FakeIntake::new()).await;
    slow.intake.hold();
    direct.produce(&topic, [numbered(0, 0..5), numbered(1, 0..5)].concat()).await;
    slow.intake.holds(10).await;

    // The second member gets one of the two partitions, begins at its start, and finds one record that fails.
    let quick = FakeIntake::new();
    quick.decide(|message| if message.body.ends_with(br#"-3"}"#) { Answer::Fail } else { Answer::Take });
    let quick = member(&group, &topic, quick).await;
    quick.intake.answers(Answer::Fail, 1).await;
    let moved = usize::from(!quick.intake.stored().contains(&body(0, 0)));
    until("its run is committed", || async {
        (direct.committed(&group, &topic).await[moved] == Some(3)).then_some(())
    })
    .await;

    // Now the first one's store is done, for all five records of both.
    slow.intake.release();
    until("its own partition is committed", || async {
        (direct.committed(&group, &topic).await[1 - moved] == Some(5)).then_some(())
    })
    .await;
    quick.intake.answers(Answer::Fail, 3).await;
    assert_eq!(direct.committed(&group, &topic).await[moved], Some(3), "committed by who does not own it");
    quick.intake.decide(|_| Answer::Take);
    until("the rest", || async { (direct.lag(&group, &topic).await == 0).then_some(()) }).await;
    slow.stop().await;
    quick.stop().await;
}

/// More members than partitions: the one without a partition is well, and takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_without_partitions_takes_over() {
    let direct = world().await.direct();
    let (topic, group) = (direct.new_topic(1, &[]).await, unique("qb-"));
    let owner = member(&group, &topic, FakeIntake::new()).await;
    let spare = member(&group, &topic, FakeIntake::new()).await;
    direct.produce(&topic, numbered(0, 0..5)).await;
    until("one of them stores", || async {
        (owner.intake.stored().len() + spare.intake.stored().len() == 5).then_some(())
    })
    .await;
    let (owner, spare) = if owner.intake.stored().is_empty() { (spare, owner) } else { (owner, spare) };
    assert_eq!(spare.source.health(), SourceHealth::Up);
    owner.stop().await;
    direct.produce(&topic, numbered(0, 5..10)).await;
    tokio::time::timeout(Duration::from_secs(30), spare.intake.stores(5)).await.unwrap();
    assert!(spare.intake.stored().contains(&body(0, 9)));
    spare.stop().await;
}
