//! Section R: who may not work stands by, says so, and takes over.

use std::sync::Arc;

use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, text};

/// Waits until a worker says that it stands by: in its log, on `/status` and on `/health/ready`, where it is no fault.
async fn stands_by(worker: &Worker) {
    worker.ready().await;
    worker.process.wait_output("Standing by: ", PATIENCE).await;
    let ready = queuebox_testkit::eventually("/health/ready says that it stands by", PATIENCE, || async {
        let answer = worker.get("/health/ready").await;
        let component = answer.json()["components"]["outbox-poller"].clone();
        component["detail"].as_str().is_some_and(|detail| detail.contains("standing by")).then_some(answer)
    })
    .await;
    assert_eq!(ready.status, 200, "{ready:?}");
    let status = worker.get("/status").await.json();
    assert!(status["standBy"].is_string(), "{status:#}");
}

/// Ends the worker in charge; the other one goes on with what is there and what comes.
async fn takes_over(world: &World, first: &Worker, second: &Worker, kill: bool) {
    let before = world.receiver.count();
    if kill {
        first.process.kill9().await;
    } else {
        assert!(first.process.terminate(PATIENCE).await.success());
    }
    let id = world.db.insert(OutboxRow::new("order", 2)).await;
    world.db.wait_outbox(&id, "sent").await;
    assert_eq!(world.receiver.count(), before + 1);
    second.process.wait_output("Not standing by any more", PATIENCE).await;
    let status = second.get("/status").await.json();
    assert!(status.get("standBy").is_none_or(serde_json::Value::is_null), "{status:#}");
}

/// With one worker in charge and one beside it, which sends nothing.
async fn one_of_two(world: &World, first: &Worker, second: Arc<Worker>, kill: bool) {
    stands_by(&second).await;
    let ids = world.db.insert_all((0..10).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")))).await;
    for id in &ids {
        world.db.wait_outbox(id, "sent").await;
    }
    assert_eq!(world.receiver.count(), 10);
    let sent = "queuebox_outbox_messages_total";
    assert_eq!(second.metric(sent, &[("status", "sent")]).await, 0.0, "who stands by sends nothing");
    assert_eq!(first.metric(sent, &[("status", "sent")]).await, 10.0);
    takes_over(world, first, &second, kill).await;
}

/// A clean stop gives its share back: nobody waits for a lease, which here would outlast the patience of the test.
fn long_lease(world: World) -> World {
    world.relay(json!({ "outbox": { "claimTimeout": "15m" } }))
}

mod stand_by_takes_over {
    use super::*;

    async fn of_another_relay(kind: Kind) {
        for kill in [true, false] {
            let world = World::on(kind).await;
            let world = if kill { world } else { long_lease(world) };
            let first = world.start().await;
            let world = world.named("other");
            let second = world.spawn();
            one_of_two(&world, &first, second, kill).await;
            world.finish().await;
        }
    }

    /// A worker that computes lanes otherwise, as one of another release might: a row of it is all there is to see.
    async fn of_another_lane_hash(kind: Kind) {
        let world = World::on(kind).await;
        world.migrate().await;
        let token = "'33333333-3333-4333-8333-333333333333'";
        let lease = world.db.in_seconds(3600);
        world
            .db
            .execute(&format!(
                "INSERT INTO queuebox_worker (worker, token, relay_uid, config, lane_hash, lease_expires_at) \
                 VALUES ('elder', {token}, 'local/default/shop', '1/x', 'elder/8', {lease})"
            ))
            .await;
        world.db.execute("DELETE FROM queuebox_lane").await;
        world
            .db
            .execute("INSERT INTO queuebox_lane (scope, lane, worker, term) VALUES ('outbox', 0, 'elder', 1)")
            .await;
        let worker = world.spawn();
        stands_by(&worker).await;
        assert!(worker.process.output().contains("elder/8"));
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        // Its lease ends: the row and the lane are those of a dead worker.
        assert_eq!(text(&world.db.outbox(&id).await, "state"), "pending");
        assert_eq!(world.receiver.count(), 0);
        let ended = world.db.in_seconds(-1);
        world
            .db
            .execute(&format!("UPDATE queuebox_worker SET lease_expires_at = {ended} WHERE worker = 'elder'"))
            .await;
        world.db.wait_outbox(&id, "sent").await;
        worker.process.wait_output("Not standing by any more", PATIENCE).await;
        world.finish().await;
    }

    /// SQLite has one lane.
    #[tokio::test]
    async fn second_process_on_sqlite() {
        for kill in [true, false] {
            let world = World::on(Kind::Sqlite).await;
            let world = if kill { world } else { long_lease(world) };
            let first = world.start().await;
            let settled = world.db.insert(OutboxRow::new("order", 0)).await;
            world.db.wait_outbox(&settled, "sent").await;
            world.db.execute("DELETE FROM outbox").await;
            world.receiver.clear();
            let second = world.spawn();
            stands_by(&second).await;
            let ids = world.db.insert_all((0..10).map(|n| OutboxRow::new("order", n))).await;
            for id in &ids {
                world.db.wait_outbox(id, "sent").await;
            }
            assert_eq!(second.metric("queuebox_outbox_messages_total", &[("status", "sent")]).await, 0.0);
            takes_over(&world, &first, &second, kill).await;
            world.finish().await;
        }
    }

    on_every_database!(of_another_relay, of_another_lane_hash);
}
