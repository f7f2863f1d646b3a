//! Section P: wake-up.

use queuebox_testkit as testkit;
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World};

async fn capture(worker: &Worker) -> serde_json::Value {
    worker.process.wait_output("Registered", PATIENCE).await;
    let ready = worker.get("/health/ready").await;
    assert_eq!(ready.status, 200, "wake-up never makes a worker unready: {ready:?}");
    ready.json()["components"]["outbox-capture"].clone()
}

async fn is_delivered(world: &World) {
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&id, "sent").await;
}

mod capture_failure_costs_latency_only {
    use super::*;

    #[tokio::test]
    async fn polling() {
        let world = World::on(Kind::Postgres).await.relay(json!({ "capture": { "mode": "Polling" } }));
        let worker = world.start().await;
        assert!(capture(&worker).await.is_null(), "nothing is listened to");
        is_delivered(&world).await;
        let listening =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%'";
        assert_eq!(world.db.count(listening).await, 0);
        world.finish().await;
    }

    #[tokio::test]
    async fn trigger_dropped() {
        let world = World::on(Kind::Postgres).await;
        let worker = world.start().await;
        world.db.execute("DROP TRIGGER queuebox_wake ON outbox").await;
        is_delivered(&world).await;
        // Without the table that the trigger reads, an application's insert succeeds all the same.
        world.db.execute("DROP FUNCTION queuebox_wake() CASCADE").await;
        is_delivered(&world).await;
        capture(&worker).await;
        world.finish().await;
    }

    /// The trigger fails inside: the application's insert does not.
    #[tokio::test]
    async fn broken_trigger() {
        let world = World::on(Kind::Postgres).await;
        world.migrate().await;
        world.db.execute("ALTER TABLE queuebox_worker RENAME TO elsewhere").await;
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        world.db.execute("ALTER TABLE elsewhere RENAME TO queuebox_worker").await;
        world.start().await;
        world.db.wait_outbox(&id, "sent").await;
        world.finish().await;
    }

    /// The connection that listens is cut again and again: everything goes by polling, and the health page says why.
    #[tokio::test]
    async fn listen_cut() {
        let world = World::on(Kind::Postgres).await;
        let worker = world.start().await;
        let up = |component: &serde_json::Value| component["status"] == "up";
        testkit::eventually("it listens", PATIENCE, || async { up(&capture(&worker).await).then_some(()) }).await;
        let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE datname = current_database() AND query ILIKE 'LISTEN%'";
        let down = testkit::eventually("health says that it does not listen", PATIENCE, || async {
            world.db.count(cut).await;
            let component = capture(&worker).await;
            (component["status"] == "down").then_some(component)
        })
        .await;
        assert!(down["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{down}");
        for _ in 0..5 {
            world.db.count(cut).await;
            is_delivered(&world).await;
        }
        testkit::eventually("it listens again", PATIENCE, || async { up(&capture(&worker).await).then_some(()) }).await;
        is_delivered(&world).await;
        assert_eq!(world.receiver.count(), 6);
        world.finish().await;
    }
}
