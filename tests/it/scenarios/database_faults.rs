//! Faults of the database under traffic. Each ends in recovery by itself: everything is delivered, no attempt is spent, nothing is dead, order
//! per key holds, and readiness has told the truth meanwhile.

use std::{collections::BTreeMap, time::Duration};

use queuebox_testkit::{self as testkit, Answer, Postgres};
use serde_json::json;

use crate::support::{Db, OutboxRow, PATIENCE, Worker, World, number};

const HALF: i64 = 120;
const KEYS: i64 = 10;

struct Scene {
    server: Postgres,
    world: World,
    worker: std::sync::Arc<Worker>,
    ids: Vec<String>,
}

fn row(n: i64) -> OutboxRow {
    OutboxRow::new("order", n).key(&format!("k{}", n % KEYS))
}

impl Scene {
    /// A server of its own, a worker, and messages that flow while the fault begins.
    async fn begin() -> Scene {
        let server = testkit::private_postgres().await;
        let url = server.fresh_database().await;
        Scene::at(server, url).await
    }

    async fn at(server: Postgres, url: String) -> Scene {
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let world = World::with(Db::postgres(url).await, folder)
            .await
            // A database that is away for longer than the lease costs the lease, and then messages may come twice: not here.
            .relay(json!({ "outbox": { "claimTimeout": "60s" }, "database": { "connectTimeout": "5s" } }))
            .destination("receiver", json!({ "limits": { "maxInFlight": 4 } }));
        world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(40)));
        let worker = world.start().await;
        let ids = world.db.insert_all((0..HALF).map(row)).await;
        world.receiver.wait_for(10, PATIENCE).await;
        Scene { server, world, worker, ids }
    }

    /// Waits until `/health/ready` answers with this status.
    async fn readiness(&self, status: u16) {
        testkit::eventually(&format!("/health/ready says {status}"), PATIENCE, || async {
            (self.worker.get("/health/ready").await.status == status).then_some(())
        })
        .await;
    }

    /// The fault is over: the rest is inserted, and everything arrives.
    async fn end(mut self) {
        self.readiness(200).await;
        testkit::eventually_ok("an application can insert again", PATIENCE, || self.world.db.try_execute("SELECT 1"))
            .await;
        self.ids.extend(self.world.db.insert_all((HALF..HALF * 2).map(row)).await);
        self.world.db.wait_states("outbox", &[("sent", HALF * 2)]).await;
        for id in &self.ids {
            let row = self.world.db.outbox(id).await;
            assert_eq!(number(&row, "attempt"), 0, "a fault of the database cost an attempt: {row:#}");
        }
        let mut seen: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for request in self.world.receiver.requests() {
            let numbers = seen.entry(request.header("x-message-key").to_owned()).or_default();
            let n = request.json()["n"].as_i64().unwrap();
            if !numbers.contains(&n) {
                numbers.push(n);
            }
        }
        assert_eq!(seen.values().map(Vec::len).sum::<usize>(), self.ids.len(), "lost");
        assert!(seen.values().all(|numbers| numbers.is_sorted()), "{seen:?}");
        assert!(self.worker.process.is_running());
        self.world.finish().await;
    }
}

#[tokio::test]
async fn a_restart_is_survived() {
    let scene = Scene::begin().await;
    scene.server.stop().await;
    scene.readiness(503).await;
    scene.server.start().await;
    scene.end().await;
}

#[tokio::test]
async fn a_kill_is_survived() {
    let scene = Scene::begin().await;
    scene.server.kill9().await;
    scene.readiness(503).await;
    scene.server.start().await;
    scene.end().await;
}

#[tokio::test]
async fn a_server_that_hangs_is_survived() {
    let scene = Scene::begin().await;
    scene
        .world
        .db
        .execute("BEGIN; LOCK TABLE queuebox_worker, outbox IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(4); COMMIT")
        .await;
    scene.end().await;
}

#[tokio::test]
async fn connections_that_are_cut_are_opened_again() {
    let scene = Scene::begin().await;
    let cut = "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    for _ in 0..8 {
        scene.world.db.count(cut).await;
        let at = scene.world.receiver.count();
        scene.world.receiver.wait_for((at + 4).min(usize::try_from(HALF).unwrap()), PATIENCE).await;
    }
    scene.end().await;
}

#[tokio::test]
async fn time_outs_of_the_server_are_passing_faults() {
    let scene = Scene::begin().await;
    let name = scene.world.db.address.rsplit('/').next().unwrap().to_owned();
    scene.world.db.execute(&format!("ALTER DATABASE {name} SET lock_timeout = '200ms'")).await;
    // New sessions have the setting.
    let cut = "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    scene.world.db.count(cut).await;
    scene.world.db.execute("BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(3); COMMIT").await;
    let log = std::fs::read_to_string(scene.server.log()).unwrap();
    assert!(log.contains("lock timeout"), "nobody met the time-out");
    scene.end().await;
}
