//! D28: PgBouncer in transaction mode, with fewer connections to the server than there are workers' statements.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
};

use queuebox_testkit::{self as testkit, PoolMode};
use serde_json::json;

use crate::support::{Db, OutboxRow, PATIENCE, World, quoted};

/// Settings that workers make on connections of their own; a pooler hands them to others.
const OWN_SETTINGS: [&str; 9] = [
    "plan_cache_mode",
    "enable_seqscan",
    "enable_bitmapscan",
    "enable_sort",
    "jit",
    "statement_timeout",
    "lock_timeout",
    "max_parallel_workers_per_gather",
    "idle_in_transaction_session_timeout",
];

const OLD: i64 = 2_000;
const KEYS: i64 = 50;

/// A world on a database of the shared server, whose workers see it through a pooler with so many connections, and that pooler.
async fn behind(connections: u32) -> (World, testkit::PgBouncer) {
    let server = testkit::postgres().await;
    let name = server.fresh_database_name().await;
    let pooler = testkit::pgbouncer_with(&server, PoolMode::Transaction, connections).await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let rule = json!({ "maxAge": "1h", "cleanupInterval": "1s" });
    let world = World::with(Db::postgres(server.url_of(&name)).await, folder)
        .await
        .source("hooks", json!({ "topic": "hook" }))
        .relay(json!({ "retention": { "outbox": rule, "inbox": rule }, "outbox": { "claimTimeout": "30s" } }));
    (world, pooler)
}

/// The most connections of workers that were seen at the server, until told to stop.
async fn watch(db: Db, most: Arc<AtomicI64>, stop: Arc<AtomicBool>) {
    let open =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'queuebox'";
    while !stop.load(SeqCst) {
        most.fetch_max(db.count(open).await, SeqCst);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Rows of an application, webhooks and retention through two workers.
async fn carries(world: World, pooler: &testkit::PgBouncer, connections: i64, rows: i64, webhooks: i64) {
    let name = world.db.address.rsplit('/').next().unwrap().to_owned();
    let world = world.env("DATABASE_URL", &pooler.url_of(&name));
    // Both at once, also where the tables are not there yet.
    let workers = [world.spawn(), world.spawn()];
    for worker in &workers {
        worker.ready().await;
    }
    let (most, stop) = (Arc::<AtomicI64>::default(), Arc::<AtomicBool>::default());
    let watching = tokio::spawn(watch(world.db.clone(), most.clone(), stop.clone()));
    let old = world.db.in_seconds(-7200);
    let numbers = format!("FROM generate_series(1, {OLD}) n");
    let outbox = "INSERT INTO outbox (topic, payload, state, created_at, updated_at)";
    world.db.execute(&format!("{outbox} SELECT 'old', '{{}}', 'sent', {old}, {old} {numbers}")).await;
    let inbox = "INSERT INTO inbox (source, idempotency_key, payload, state, created_at)";
    world.db.execute(&format!("{inbox} SELECT 'old', 'k' || n, '{{}}', 'processed', {old} {numbers}")).await;
    let insert = async {
        for batch in 0..rows / 100 {
            let of = (0..100).map(|n| batch * 100 + n);
            world.db.insert_all(of.map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % KEYS)))).await;
        }
    };
    let post = async {
        for n in 0..webhooks {
            workers[usize::try_from(n).unwrap() % 2].post("hooks", json!({ "id": n }).to_string()).await.accepted();
        }
    };
    tokio::join!(insert, post);
    world.db.wait_states("outbox", &[("sent", rows + webhooks)]).await;
    world.db.wait_states("inbox", &[("processed", webhooks)]).await;
    stop.store(true, SeqCst);
    watching.await.unwrap();
    let most = most.load(SeqCst);
    assert!((1..=connections).contains(&most), "{most} connections at the server: the pooler was not in between");
    nothing_is_left(&world, pooler, &name).await;
    for worker in &workers {
        let log = worker.process.output();
        assert_eq!(log.matches("a pooler stands in front of the database").count(), 1, "{log}");
        assert!(log.contains("without capture.connection it polls"), "{log}");
        for trouble in ["prepared statement", "did not answer within", "ERROR"] {
            assert!(!log.contains(trouble), "{trouble}: {log}");
        }
        assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0);
    }
    in_order(&world, rows + webhooks);
    world.finish().await;
}

/// No lock, no setting and no LISTEN stays on a connection that goes to somebody else.
async fn nothing_is_left(world: &World, pooler: &testkit::PgBouncer, name: &str) {
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid() \
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    testkit::eventually("no advisory lock is held", PATIENCE, || async {
        (world.db.count(locks).await == 0).then_some(())
    })
    .await;
    let listening =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%'";
    assert_eq!(world.db.count(listening).await, 0);
    let through = Db::postgres(pooler.url_of(name)).await;
    let names: Vec<String> = OWN_SETTINGS.iter().map(|name| quoted(name)).collect();
    let settings = format!("SELECT name FROM pg_settings WHERE source = 'session' AND name IN ({})", names.join(", "));
    for _ in 0..20 {
        assert_eq!(through.execute(&settings).await, 0, "a setting stayed on a connection of the pooler");
    }
    through.close().await;
}

fn in_order(world: &World, all: i64) {
    let requests = world.receiver.requests();
    assert_eq!(i64::try_from(requests.len()).unwrap(), all, "each once");
    let mut last = std::collections::BTreeMap::new();
    for request in requests.iter().filter(|request| request.header("x-topic") == "order") {
        let n = request.json()["n"].as_i64().unwrap();
        let before = last.insert(request.header("x-message-key").to_owned(), n);
        assert!(before.is_none_or(|before| before < n), "{n} after {before:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_on_two_connections() {
    let (world, pooler) = behind(2).await;
    carries(world, &pooler, 2, 3_000, 100).await;
}

/// On one connection, whoever holds it and waits for a second one waits for ever. Migrating is the exception: it holds its lock beside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_waits_for_a_second_connection_while_it_holds_one() {
    let (world, pooler) = behind(1).await;
    world.migrate().await;
    let world = world.relay(json!({ "database": { "migrate": "Off" } }));
    carries(world, &pooler, 1, 500, 50).await;
}
