//! Retention over more rows than one window (contract 11, case D31): short steps, and no write lock while it searches.

use queuebox_conformance::store::{Setup, StoreHarness as _};
use queuebox_core::{
    message::State,
    ports::{Ledger as _, Scope, outbox::PruneRule},
};
use queuebox_sqlite::SqliteStore;
use sqlx::{Connection as _, SqliteConnection};

use crate::harness::SqliteHarness;

/// 30,000 rows, a second apart, some of each twenty pending and dead; the time of row n is n seconds after the first.
const FILL: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000)
    INSERT INTO outbox (topic, payload, state, updated_at)
    SELECT 't', '1', CASE i % 20 WHEN 0 THEN 'pending' WHEN 1 THEN 'dead' ELSE 'sent' END,
           strftime('%Y-%m-%dT%H:%M:%S.000000Z', '2020-01-01', i || ' seconds') FROM n";

const SENT: u64 = 27_000;
const DEAD: u64 = 1_500;

/// Steps until the pass is over: what went, and how many steps only searched.
async fn pass(store: &SqliteStore, state: State, rule: PruneRule) -> (u64, usize) {
    let (mut gone, mut searches) = (0, 0);
    loop {
        let step = store.prune(Scope::Outbox, state, rule, 1_000).await.unwrap();
        assert!(step.rows <= 1_000);
        gone += step.rows;
        searches += usize::from(step.rows == 0);
        if !step.more {
            return (gone, searches);
        }
    }
}

async fn filled() -> (SqliteHarness, SqliteStore) {
    let h = SqliteHarness::start(Setup::default()).await;
    h.execute(FILL).await;
    let store = h.open().await;
    (h, store)
}

async fn left(h: &SqliteHarness) -> Vec<String> {
    let rows = h
        .query("SELECT state || ' ' || count(*) || ' ' || min(updated_at) FROM outbox GROUP BY state ORDER BY state")
        .await;
    rows.into_iter().map(|row| row[0].clone().unwrap()).collect()
}

#[tokio::test]
async fn all_but_the_newest_go_in_short_steps() {
    let (h, store) = filled().await;
    let (gone, searches) = pass(&store, State::Sent, PruneRule::Beyond(100)).await;
    assert_eq!(gone, SENT - 100);
    assert!(searches > 30_000 / 5_000, "a step reads a window, not the table: {searches}");
    assert_eq!(pass(&store, State::Dead, PruneRule::Beyond(20)).await.0, DEAD - 20);
    // Sent rows are 18 of each 20 seconds, dead ones one: the 100 and the 20 newest.
    assert_eq!(
        left(&h).await,
        [
            "dead 20 2020-01-01T08:13:21.000000Z",
            "pending 1500 2020-01-01T00:00:20.000000Z",
            "sent 100 2020-01-01T08:18:10.000000Z"
        ]
    );
    assert_eq!(pass(&store, State::Sent, PruneRule::Beyond(100)).await.0, 0);
}

/// Somebody writes for long: a search goes on beside it, and only a delete waits for its turn.
#[tokio::test]
async fn a_search_needs_no_write_lock() {
    let (h, store) = filled().await;
    let mut writer: SqliteConnection = h.connect().await;
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    for _ in 0..30_000 / 5_000 {
        let step = store.prune(Scope::Outbox, State::Sent, PruneRule::Beyond(100), 1_000).await.unwrap();
        assert!(step.more && step.rows == 0);
    }
    sqlx::query("ROLLBACK").execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();
    assert_eq!(pass(&store, State::Sent, PruneRule::Beyond(100)).await.0, SENT - 100);
}

#[tokio::test]
async fn what_is_old_goes_wherever_it_stands() {
    let (h, store) = filled().await;
    h.execute("UPDATE outbox SET updated_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now') WHERE row_no % 20 > 2 OR row_no % 20 = 0").await;
    let day = PruneRule::OlderThan(24 * 3_600_000);
    assert_eq!(pass(&store, State::Sent, day).await.0, 1_500);
    assert_eq!(pass(&store, State::Dead, day).await.0, DEAD);
    assert_eq!(pass(&store, State::Pending, day).await.0, 0);
    assert_eq!((left_count(&h, "sent").await, left_count(&h, "pending").await), (SENT - 1_500, 1_500));
}

async fn left_count(h: &SqliteHarness, state: &str) -> u64 {
    let rows = h.query(&format!("SELECT CAST(count(*) AS TEXT) FROM outbox WHERE state = '{state}'")).await;
    rows[0][0].clone().unwrap().parse().unwrap()
}
