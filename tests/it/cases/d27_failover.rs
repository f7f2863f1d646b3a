//! D27, its second run: the primary takes no writes any more, its standby is promoted, the address leads there, and connections of before
//! stay open to the old one. The first run is `a_server_that_became_read_only_is_survived`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Answer, Proxy};
use serde_json::json;

use crate::support::{Db, OutboxRow, PATIENCE, Worker, World, text};

const ROWS: i64 = 120;
const KEYS: i64 = 10;

fn rows(from: i64) -> impl Iterator<Item = OutboxRow> {
    (from..from + ROWS).map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % KEYS)))
}

async fn readiness(worker: &Worker, status: u16) {
    testkit::eventually(&format!("/health/ready answers {status}"), PATIENCE, || async {
        (worker.get("/health/ready").await.status == status).then_some(())
    })
    .await;
}

/// One webhook after the other; those that were accepted are remembered.
struct Sender<'a> {
    worker: &'a Worker,
    accepted: BTreeMap<String, String>,
    count: u32,
}

impl Sender<'_> {
    /// Sends the next one and returns the status.
    async fn send(&mut self) -> u16 {
        self.count += 1;
        let key = format!("w{}", self.count);
        let answer = self.worker.post("hooks", json!({ "id": key, "n": -i64::from(self.count) }).to_string()).await;
        if answer.status < 300 {
            self.accepted.insert(key, answer.accepted());
        }
        answer.status
    }

    /// Sends until one is answered in this way.
    async fn until(&mut self, status: u16) {
        let until = tokio::time::Instant::now() + PATIENCE;
        while self.send().await != status {
            assert!(tokio::time::Instant::now() < until, "no webhook was answered with {status}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_standby_takes_over_and_old_connections_stay_open() {
    let primary = testkit::private_postgres().await;
    let standby = testkit::private_standby_of(&primary).await;
    let name = primary.fresh_database_name().await;
    let proxy = Proxy::to(primary.port()).await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let mut world = World::with(Db::postgres(primary.url_of(&name)).await, folder)
        .await
        .env("DATABASE_URL", &primary.url_through(proxy.port(), &name))
        .source("hooks", json!({ "topic": "hook" }))
        // A database that is away for longer than the lease costs the lease, and then messages may come twice: not here.
        .relay(json!({
            "outbox": { "claimTimeout": "60s" },
            "inbox": { "storeTimeout": "2s", "relay": { "claimTimeout": "60s" } },
            "database": { "connectTimeout": "5s" },
        }))
        .destination("receiver", json!({ "limits": { "maxInFlight": 4 } }));
    // Slow enough that most of them are on their way when the fault comes.
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(150)));
    let worker = world.start().await;
    let mut sender = Sender { worker: &worker, accepted: BTreeMap::new(), count: 0 };
    let mut ids = world.db.insert_all(rows(0)).await;
    sender.until(202).await;
    world.receiver.wait_for(10, PATIENCE).await;

    // The old primary takes no writes any more; the address still leads to it.
    primary.psql("postgres", "ALTER SYSTEM SET default_transaction_read_only = on").await;
    primary.psql("postgres", "SELECT pg_reload_conf()").await;
    readiness(&worker, 503).await;
    sender.until(500).await;
    let unwritten = sender.send().await;
    assert_eq!(unwritten, 500, "nothing can be stored anywhere");
    let pending = "SELECT count(*) FROM outbox WHERE state = 'pending'";
    assert!(world.db.count(pending).await > 0, "everything was sent before the fault came");

    standby.catch_up_with(&primary).await;
    world.db.close().await;
    standby.promote().await;
    proxy.lead_to(standby.port());
    readiness(&worker, 200).await;
    sender.until(202).await;
    world.receiver.answer_always(Answer::ok());
    world.db = Db::postgres(standby.url_of(&name)).await;
    ids.extend(world.db.insert_all(rows(ROWS)).await);
    for _ in 0..10 {
        assert_eq!(sender.send().await, 202);
    }

    let accepted = sender.accepted;
    let all = 2 * ROWS + i64::try_from(accepted.len()).unwrap();
    world.db.wait_states("inbox", &[("processed", i64::try_from(accepted.len()).unwrap())]).await;
    world.db.wait_states("outbox", &[("sent", all)]).await;
    for (key, id) in &accepted {
        let row = world.db.row(&format!("SELECT * FROM inbox WHERE idempotency_key = '{key}'")).await;
        assert_eq!(text(&row, "id"), id, "a 2xx without its row");
    }
    assert_eq!(
        world.db.count("SELECT count(*) FROM outbox WHERE attempt <> 0").await,
        0,
        "the failover cost an attempt"
    );
    judge(&world, &ids);
    assert!(worker.process.is_running());
    world.finish().await;
}

/// Nothing is lost, each key is in order.
fn judge(world: &World, ids: &[String]) {
    let requests = world.receiver.requests();
    let arrived: BTreeSet<&str> = requests.iter().map(|request| request.header("x-message-id")).collect();
    assert!(ids.iter().all(|id| arrived.contains(id.as_str())), "lost");
    let mut keys: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for request in requests.iter().filter(|request| request.header("x-topic") == "order") {
        let n = request.json()["n"].as_i64().unwrap();
        let seen = keys.entry(request.header("x-message-key")).or_default();
        if !seen.contains(&n) {
            seen.push(n);
        }
    }
    assert!(keys.values().all(|numbers| numbers.is_sorted()), "{keys:?}");
}
