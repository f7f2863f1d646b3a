//! D04: rows are skipped because transactions commit out of number order.

use std::{collections::BTreeSet, time::Duration};

use rand::RngExt;
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database};

/// A number that was drawn first and commits last. On SQLite a number is drawn by the one writer, so there it cannot be.
#[tokio::test]
async fn lower_number_commits_last() {
    let world = World::on(Kind::Postgres).await;
    world.start().await;
    for round in 0..5 {
        let mut slow = world.db.begin().await;
        let first = slow.insert(OutboxRow::new("order", 1)).await;
        let second = world.db.insert(OutboxRow::new("order", 2)).await;
        world.db.wait_outbox(&second, "sent").await;
        slow.commit().await;
        world.db.wait_outbox(&first, "sent").await;
        let sequences: Vec<i64> = [world.db.outbox(&first).await, world.db.outbox(&second).await]
            .iter()
            .map(|row| number(row, "sequence"))
            .collect();
        assert!(sequences.is_sorted());
        assert_eq!(world.receiver.count(), 2 * (round + 1));
    }
    world.finish().await;
}

/// Parallel writers with pauses, one in ten rolled back: all that was committed, once, and also in the gauges and in a replay.
async fn parallel_writers(kind: Kind) {
    let (writers, transactions) = if kind == Kind::Postgres { (50, 30) } else { (8, 40) };
    let world =
        World::on(kind).await.relay(json!({ "outbox": { "claimTimeout": "60s", "pendingGaugeInterval": "1s" } }));
    let worker = world.start().await;
    let write = async || {
        let mut committed = Vec::new();
        for n in 0..transactions {
            let (pause, rolled_back) = {
                let mut rng = rand::rng();
                (rng.random_range(0..200), rng.random_bool(0.1))
            };
            let mut tx = world.db.begin().await;
            let id = tx.insert(OutboxRow::new("order", n)).await;
            if kind == Kind::Postgres {
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            if rolled_back {
                tx.rollback().await;
            } else {
                tx.commit().await;
                committed.push(id);
            }
        }
        committed
    };
    let committed: BTreeSet<String> =
        futures::future::join_all((0..writers).map(|_| write())).await.into_iter().flatten().collect();
    world.db.wait_states("outbox", &[("sent", committed.len() as i64)]).await;
    let requests = world.receiver.requests();
    let arrived: BTreeSet<String> = requests.iter().map(|r| r.header("x-message-id").to_owned()).collect();
    assert_eq!(requests.len(), committed.len(), "each once");
    assert!(arrived == committed);
    worker.wait_metric("queuebox_outbox_oldest_pending_age_seconds", &[], |age| age == 0.0).await;
    let replay = json!({ "topic": "order", "state": ["sent"] });
    let moved = worker.admin("/admin/replay", replay).await.json()["moved"].as_u64();
    assert_eq!(moved, Some(committed.len() as u64));
    world.receiver.wait_for(2 * committed.len(), PATIENCE).await;
    world.db.wait_states("outbox", &[("sent", committed.len() as i64)]).await;
    assert_eq!(world.receiver.count(), 2 * committed.len());
    world.finish().await;
}

on_every_database!(parallel_writers);
