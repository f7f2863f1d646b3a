//! Faults of brokers and workers while messages flow through the whole program: nothing is lost, and what comes twice is recognised.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use queuebox_testkit::{ProxyMode, Signal};
use serde_json::json;

use crate::{
    brokers::{Broker, BrokerKind, Line, Message, ids, on_every_broker},
    support::{Kind, Worker, World, number},
};

/// Numbered messages that flow until somebody ends it.
struct Load {
    end: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<usize>,
}

impl Load {
    /// Publishes small batches until the broker has each message. A batch of unknown outcome is sent again, so the broker may
    /// hold repeats.
    fn on(line: &Line) -> Load {
        let (end, line) = (Arc::new(AtomicBool::new(false)), line.clone());
        let ended = end.clone();
        let task = tokio::spawn(async move {
            let mut count = 0;
            while !ended.load(Ordering::SeqCst) {
                let batch = Message::numbered(count..count + 5);
                while line.try_publish(&batch).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                count += 5;
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
            count
        });
        Load { end, task }
    }

    /// Ends it; returns how many messages there are.
    async fn finish(self) -> usize {
        self.end.store(true, Ordering::SeqCst);
        self.task.await.unwrap()
    }
}

/// Waits until so many more messages than before are stored.
async fn stored_more(world: &World, seen: &mut i64, more: i64) {
    let wanted = *seen + more;
    world.db.wait_row("SELECT count(*) AS n FROM inbox", |row| number(row, "n") >= wanted).await;
    *seen = world.db.count("SELECT count(*) AS n FROM inbox").await;
}

/// A bridge from one line to another over one database; rows have attempts enough for every trouble.
async fn bridge(from: &Line, to: &Line) -> World {
    World::on(Kind::Postgres)
        .await
        .relay(json!({ "inbox": { "relay": { "maxAttempts": 1000 } } }))
        .source("events", from.as_source())
        .destination("out", to.as_destination())
        .routes(&[("**", &["out"])])
}

/// Everything was stored once, forwarded once, and has arrived.
async fn nothing_is_lost(world: &World, from: &Line, to: &Line, count: usize) {
    let rows = i64::try_from(count).unwrap();
    world.db.wait_states("inbox", &[("processed", rows)]).await;
    world.db.wait_states("outbox", &[("sent", rows)]).await;
    from.all_acknowledged().await;
    let arrived = to.wait_arrived("all of them", |arrived| ids(arrived).len() == count).await;
    let wanted: std::collections::BTreeSet<String> = (0..count).map(|n| n.to_string()).collect();
    assert_eq!(ids(&arrived), wanted);
    // A repeat of a delivery bears the id of the row, by which a receiver knows it.
    let distinct: std::collections::BTreeSet<&str> = arrived.iter().map(|message| message.id()).collect();
    assert_eq!(distinct.len(), count, "a message was sent under two ids");
}

mod broker_reconnects {
    use super::*;

    /// The ways are cut, refused and silent, the broker stands still and is killed, all while messages flow in and out.
    async fn under_load(kind: BrokerKind) {
        let broker = Broker::private(kind).await;
        let (inlet, outlet) = (broker.line_of(3).await, broker.line().await);
        let (near, way_in) = broker.behind_a_proxy().await;
        let (far, way_out) = broker.behind_a_proxy().await;
        let world = bridge(&inlet.through(&near), &outlet.through(&far)).await;
        world.start().await;
        let load = Load::on(&inlet);
        let mut seen = 0;
        for _ in 0..3 {
            stored_more(&world, &mut seen, 30).await;
            way_in.cut();
            stored_more(&world, &mut seen, 30).await;
            way_out.cut();
        }
        for way in [&way_in, &way_out] {
            stored_more(&world, &mut seen, 30).await;
            way.set(ProxyMode::Refuse);
            way.cut();
            // How long the trouble lasts is a part of it.
            tokio::time::sleep(Duration::from_secs(2)).await;
            way.set(ProxyMode::Pass);
            stored_more(&world, &mut seen, 30).await;
            way.set(ProxyMode::HoldReplies);
            tokio::time::sleep(Duration::from_secs(1)).await;
            way.cut();
            way.set(ProxyMode::Pass);
        }
        stored_more(&world, &mut seen, 30).await;
        broker.pause().await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        broker.cont().await;
        stored_more(&world, &mut seen, 30).await;
        broker.kill9().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        broker.start().await;
        let count = load.finish().await;
        nothing_is_lost(&world, &inlet, &outlet, count).await;
        world.finish().await;
    }

    on_every_broker!(under_load);
}

mod killed_worker_loses_nothing {
    use super::*;

    /// Workers join, leave and are killed under load; for Kafka each of it is a rebalance.
    async fn workers_come_and_go(kind: BrokerKind) {
        let broker = Broker::shared(kind).await;
        let (inlet, outlet) = (broker.line_of(6).await, broker.line().await);
        let world = bridge(&inlet, &outlet).await;
        let first = world.start().await;
        let load = Load::on(&inlet);
        let mut seen = 0;
        stored_more(&world, &mut seen, 60).await;
        let second = world.start().await;
        stored_more(&world, &mut seen, 60).await;
        let third = world.start().await;
        stored_more(&world, &mut seen, 60).await;
        first.process.kill9().await;
        stored_more(&world, &mut seen, 60).await;
        leaves(&second).await;
        stored_more(&world, &mut seen, 60).await;
        let fourth = world.start().await;
        // One that stands still longer than its lease comes back and finds its rows with others.
        third.process.signal(Signal::Stop);
        stored_more(&world, &mut seen, 60).await;
        third.process.signal(Signal::Cont);
        let count = load.finish().await;
        nothing_is_lost(&world, &inlet, &outlet, count).await;
        leaves(&third).await;
        leaves(&fourth).await;
        world.finish().await;
    }

    async fn leaves(worker: &Arc<Worker>) {
        assert!(worker.process.terminate(crate::support::PATIENCE).await.success());
    }

    on_every_broker!(workers_come_and_go);
}
