//! Transactions that commit in another order than that of their numbers (contract 4.7, case D04), read from the safe floor: the
//! tests here never ask for a lap over everything, so what the floor misses is missed.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
};

use queuebox_conformance::store::{Setup, StoreHarness};
use queuebox_core::{Uuid, ports::schema::Schema};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};

use crate::{
    harness::PostgresHarness,
    worker::{Cursor, owner},
};

async fn insert(app: &mut PgConnection) -> Uuid {
    let row = app.fetch_one("INSERT INTO outbox (topic, payload) VALUES ('t', '1') RETURNING id").await.unwrap();
    row.get(0)
}

#[tokio::test]
async fn a_lower_number_that_commits_later_is_found_at_the_next_poll() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    let mut cursor = Cursor::new(owner(&store).await, 10);
    let (mut late, mut app) = (h.connect().await, h.connect().await);
    late.execute("BEGIN").await.unwrap();
    let lower = insert(&mut late).await;
    for _ in 0..5 {
        let higher = insert(&mut app).await;
        assert_eq!(cursor.step(&store).await, 1);
        assert!(cursor.sent.contains(&higher));
    }
    assert_eq!(cursor.step(&store).await, 0);
    late.execute("COMMIT").await.unwrap();
    assert_eq!(cursor.step(&store).await, 1);
    assert!(cursor.sent.contains(&lower));
    // Savepoints have ids of their own; the row counts with its whole transaction.
    late.execute("BEGIN; SAVEPOINT a").await.unwrap();
    let nested = insert(&mut late).await;
    late.execute("RELEASE a").await.unwrap();
    insert(&mut app).await;
    assert_eq!((cursor.step(&store).await, cursor.step(&store).await), (1, 0));
    late.execute("COMMIT").await.unwrap();
    assert_eq!(cursor.step(&store).await, 1);
    assert!(cursor.sent.contains(&nested));
}

#[tokio::test]
async fn a_prepared_transaction_is_a_running_one() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    let mut cursor = Cursor::new(owner(&store).await, 10);
    let (mut late, mut app) = (h.connect().await, h.connect().await);
    late.execute("BEGIN").await.unwrap();
    let lower = insert(&mut late).await;
    let name = h.database.clone();
    late.execute(AssertSqlSafe(format!("PREPARE TRANSACTION '{name}'"))).await.unwrap();
    insert(&mut app).await;
    assert_eq!((cursor.step(&store).await, cursor.step(&store).await), (1, 0));
    late.execute(AssertSqlSafe(format!("COMMIT PREPARED '{name}'"))).await.unwrap();
    assert_eq!(cursor.step(&store).await, 1);
    assert!(cursor.sent.contains(&lower));
}

/// Many writers, random pauses between insert and commit, a tenth rolled back; small batches, so that the walk lags behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_commit_is_never_skipped() {
    const WRITERS: usize = 12;
    const TRANSACTIONS: usize = 40;
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    let mut cursor = Cursor::new(owner(&store).await, 7);
    let done = AtomicBool::new(false);
    let write = async |writer: usize| {
        let mut rng = StdRng::seed_from_u64(writer as u64);
        let mut app = h.connect().await;
        let mut committed = Vec::new();
        for _ in 0..TRANSACTIONS {
            app.execute("BEGIN").await.unwrap();
            let mut rows = Vec::new();
            for _ in 0..rng.random_range(1..4) {
                rows.push(insert(&mut app).await);
                for _ in 0..rng.random_range(0..4) {
                    // A round trip, so that the others go on; no clock is needed to shuffle the commits.
                    app.execute("SELECT pg_sleep(0.001)").await.unwrap();
                }
            }
            if rng.random_range(0..10) == 0 {
                app.execute("ROLLBACK").await.unwrap();
            } else {
                app.execute("COMMIT").await.unwrap();
                committed.extend(rows);
            }
        }
        committed
    };
    let writers = async {
        let committed = futures::future::join_all((0..WRITERS).map(write)).await;
        done.store(true, Ordering::SeqCst);
        committed.into_iter().flatten().collect::<HashSet<Uuid>>()
    };
    let reader = async {
        let mut empty = 0;
        while empty < 2 {
            let finished = done.load(Ordering::SeqCst);
            let found = cursor.step(&store).await;
            empty = if found == 0 && finished { empty + 1 } else { 0 };
        }
        cursor.sent
    };
    let (committed, sent) = futures::join!(writers, reader);
    assert!(committed.len() > WRITERS * TRANSACTIONS);
    assert_eq!(sent.len(), committed.len());
    assert_eq!(sent, committed);
    assert_eq!(h.one("SELECT count(*)::text FROM outbox WHERE state <> 'sent'").await, "0");
}
