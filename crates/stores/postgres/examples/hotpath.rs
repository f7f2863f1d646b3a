//! Messages a second of the outbox's hot path alone (poll and settle, no destination), beside a claim-batch relay on the same server:
//! claim 500 with SKIP LOCKED, mark 500.
//!
//! `cargo run --release -p queuebox-postgres --example hotpath -- [rows] [batch] [keys]`
//! Starts a private server with flushed commits, unless `QUEUEBOX_TEST_POSTGRES_URL` names an empty database.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Instant;

use queuebox_core::{
    LaneSet, Uuid,
    message::{Payload, Position, Stamp},
    ports::{
        Fence, Lanes, Outbox, Scope,
        lanes::{Registration, Take},
        outbox::{Outcome, Read, Settle},
        schema::{MigrateOptions, Schema},
    },
};
use queuebox_postgres::{PostgresConfig, PostgresStore};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};

const CLAIM: &str = "
WITH c AS (SELECT id FROM claim_outbox WHERE state = 'pending' ORDER BY sequence LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE claim_outbox o SET state = 'processing', claimed_at = now() FROM c WHERE o.id = c.id
RETURNING o.id, o.topic, o.key, o.payload::text, o.headers::text";

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u32>().expect("a number"));
    let (rows, batch, keys) =
        (args.next().unwrap_or(200_000), args.next().unwrap_or(500), args.next().unwrap_or(10_000));
    queuebox_testkit::init();
    let (url, _server) = match std::env::var("QUEUEBOX_TEST_POSTGRES_URL") {
        Ok(url) => (url, None),
        Err(_) => {
            let settings = [("fsync", "on"), ("full_page_writes", "on"), ("autovacuum_naptime", "60s")];
            let server = queuebox_testkit::private_postgres_with(&settings).await;
            (server.fresh_database().await, Some(server))
        }
    };
    let mut app = PgConnection::connect(&url).await.unwrap();
    for delete in [false, true] {
        let mut config = PostgresConfig::from_url(&url).unwrap();
        config.on_sent_delete = delete;
        let store = PostgresStore::open(config).unwrap();
        store.migrate(MigrateOptions::default()).await.unwrap();
        store.check().await.unwrap();
        if std::env::var_os("QUEUEBOX_HOTPATH_SQL").is_some() {
            let after = Position { sequence: 0, id: Uuid::nil() };
            let settle = Settle {
                position: after,
                stamp: Stamp { attempt: 0, scheduled_at: 0, marked: false },
                outcome: Outcome::Sent,
            };
            println!(
                "{}",
                store.poll_statement(
                    &[settle],
                    &Read { walk_after: Some(after), lap_limit: 1, walk_limit: 1, ..Read::default() }
                )
            );
        }
        fill(&mut app, "outbox", rows, keys).await;
        let before = wal(&mut app).await;
        let started = Instant::now();
        let moved = drain(&store, batch).await;
        report(if delete { "lanes, onSent Delete" } else { "lanes" }, moved, started, wal(&mut app).await - before);
        store.close().await;
    }
    app.execute("CREATE TABLE claim_outbox (LIKE outbox INCLUDING ALL)").await.unwrap();
    fill(&mut app, "claim_outbox", rows, keys).await;
    let before = wal(&mut app).await;
    let started = Instant::now();
    let moved = claim_batch(&mut app, batch).await;
    report("claim-batch", moved, started, wal(&mut app).await - before);
}

fn report(rung: &str, moved: u64, started: Instant, log_bytes: i64) {
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{rung:24} {:>9.0} messages/s {:>6} log bytes/message",
        moved as f64 / seconds,
        log_bytes / moved.max(1) as i64
    );
}

async fn wal(app: &mut PgConnection) -> i64 {
    let row = app.fetch_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint").await.unwrap();
    row.get(0)
}

async fn fill(app: &mut PgConnection, table: &str, rows: u32, keys: u32) {
    app.execute(AssertSqlSafe(format!("TRUNCATE {table}"))).await.unwrap();
    let sql = format!(
        "INSERT INTO {table} (topic, key, payload) SELECT 'order.created', 'k' || (n % {keys}), \
         jsonb_build_object('n', n, 'fill', repeat(md5(n::text), 14)) FROM generate_series(1, {rows}) n"
    );
    app.execute(AssertSqlSafe(sql)).await.unwrap();
    app.execute(AssertSqlSafe(format!("VACUUM ANALYZE {table}"))).await.unwrap();
    app.execute("CHECKPOINT").await.unwrap();
}

async fn drain(store: &PostgresStore, batch: u32) -> u64 {
    let fence = Fence { worker: Uuid::new_v4().to_string(), token: Uuid::new_v4() };
    let new = Registration { fence: fence.clone(), relay_uid: "bench".into(), config: "1/x".into(), lease_ms: 600_000 };
    store.register(&new).await.unwrap();
    let wanted: Vec<Take> = (0..64).map(|lane| Take { lane, owner: None, term: 0 }).collect();
    let survey = store.survey(Scope::Outbox).await.unwrap();
    let wanted: Vec<Take> = wanted
        .into_iter()
        .map(|take| {
            let row = survey.lanes.iter().find(|row| row.lane == take.lane);
            Take { owner: row.and_then(|row| row.worker.clone()), term: row.map_or(0, |row| row.term), ..take }
        })
        .collect();
    assert_eq!(store.take(&fence, Scope::Outbox, &wanted).await.unwrap().len(), 64);
    let mut read = Read {
        lanes: LaneSet::first(64),
        walk_limit: batch,
        lap_limit: batch * 2,
        bytes_max: 64 << 20,
        payload_max: 16 << 20,
        ..Read::default()
    };
    let mut settles: Vec<Settle> = Vec::new();
    let mut moved = 0;
    loop {
        let polled = store.poll(&fence, &settles, Some(&read)).await.unwrap();
        assert!(polled.lost.is_empty());
        moved += settles.len() as u64;
        settles = polled
            .walk
            .iter()
            .map(|row| {
                assert!(matches!(row.payload, Payload::Loaded(_)));
                Settle { position: row.position(), stamp: row.stamp(), outcome: Outcome::Sent }
            })
            .collect();
        let Some(last) = polled.walk.last() else { break };
        read.walk_after = Some(last.position());
    }
    store.retire(&fence, LaneSet::EMPTY).await.unwrap();
    moved
}

async fn claim_batch(app: &mut PgConnection, batch: u32) -> u64 {
    let mut moved = 0;
    loop {
        let rows = sqlx::query(CLAIM).bind(i64::from(batch)).fetch_all(&mut *app).await.unwrap();
        if rows.is_empty() {
            return moved;
        }
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        for row in &rows {
            assert!(!row.get::<String, _>(3).is_empty());
        }
        let marked = sqlx::query(
            "UPDATE claim_outbox SET state = 'sent', updated_at = now(), claimed_at = NULL WHERE id = ANY ($1)",
        )
        .bind(&ids)
        .execute(&mut *app)
        .await
        .unwrap();
        moved += marked.rows_affected();
    }
}
