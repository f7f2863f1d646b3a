//! The plans of the hot path: through the indexes of contract 2.3, in their order, also where the plan was made while the table was
//! empty, and with a great many finished rows.

use queuebox_conformance::store::{Setup, StoreHarness};
use queuebox_core::{
    Uuid,
    message::{Position, Stamp},
    ports::{
        outbox::{DestinationRead, KeyRead, Outcome, Read, Settle},
        schema::Schema,
    },
};
use queuebox_postgres::PostgresStore;
use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};

use crate::{harness::PostgresHarness, worker::read};

/// Types of the parameters of the poll, in order.
const TYPES: &str = "text, uuid, bigint, uuid[], boolean[], integer[], timestamptz[], uuid[], boolean[], integer[], timestamptz[], \
                     text[], integer[], bigint[], text[], uuid[], bigint, text[], text[], bigint, uuid, bigint, bigint, uuid, bigint, \
                     text[], bigint[], bigint, bigint, text[], bigint[], uuid[], bigint[], text[], bigint[], bigint, bigint, bigint, \
                     bigint[], bigint[]";

fn wishes() -> (Vec<Settle>, Read) {
    let position = Position { sequence: 1, id: Uuid::nil() };
    let stamp = Stamp { attempt: 0, scheduled_at: 0, marked: false };
    let settle = |outcome| Settle { position, stamp, outcome };
    let retry = Outcome::Retry { delay_us: 1, error: "e".into() };
    let read = Read {
        walk_after: Some(position),
        lap_limit: 500,
        keys: vec![KeyRead { key: "k".into(), from: 1 }],
        key_limit: 10,
        destinations: vec![DestinationRead {
            destination: "d".into(),
            topics: vec!["t".into()],
            after: None,
            limit: 5,
        }],
        ..read(500)
    };
    (vec![settle(Outcome::Sent), settle(retry)], read)
}

async fn plan(app: &mut PgConnection, store: &PostgresStore, settles: &[Settle], read: &Read) -> String {
    let sql = store.poll_statement(settles, read);
    let nulls = vec!["NULL"; TYPES.split(',').count()].join(", ");
    app.execute("DEALLOCATE ALL").await.unwrap();
    app.execute(AssertSqlSafe(format!("PREPARE poll ({TYPES}) AS {sql}"))).await.unwrap();
    let rows = app
        .fetch_all(sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN (COSTS OFF) EXECUTE poll ({nulls})"))))
        .await
        .unwrap();
    rows.iter().map(|row| row.get::<String, _>(0)).collect::<Vec<_>>().join("\n")
}

fn is_through_indexes(plan: &str) {
    assert!(!plan.contains("Seq Scan on outbox"), "{plan}");
    assert!(!plan.contains("Bitmap"), "{plan}");
    assert!(!plan.contains("->  Sort\n"), "a limit is reached without sorting a range:\n{plan}");
    for index in ["idx_outbox_pending", "idx_outbox_key", "idx_outbox_later", "outbox_pkey"] {
        assert!(plan.contains(&format!("using {index} on outbox")), "{index} is not used:\n{plan}");
    }
}

#[tokio::test]
async fn a_plan_made_for_an_empty_table_stays_good() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    let mut app = h.connect().await;
    for setting in [
        "plan_cache_mode = force_generic_plan",
        "enable_seqscan = off",
        "enable_bitmapscan = off",
        "enable_sort = off",
        "jit = off",
    ] {
        app.execute(AssertSqlSafe(format!("SET {setting}"))).await.unwrap();
    }
    let (settles, mut read) = wishes();
    is_through_indexes(&plan(&mut app, &store, &settles, &read).await);
    read.lap_after = Some(Position { sequence: 0, id: Uuid::nil() });
    is_through_indexes(&plan(&mut app, &store, &settles, &read).await);
}

/// Behind a pooler nothing is set on a connection; there each statement is planned for the table as it is.
#[tokio::test]
async fn finished_rows_are_never_walked() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    let mut app = h.connect().await;
    let fill = "INSERT INTO outbox (topic, key, payload, state) SELECT 't', 'k' || n % 1000, '1', \
                CASE WHEN n % 200 = 0 THEN 'pending' ELSE 'sent' END FROM generate_series(1, 60000) n";
    app.execute(fill).await.unwrap();
    app.execute("VACUUM ANALYZE outbox").await.unwrap();
    app.execute("SET plan_cache_mode = force_generic_plan").await.unwrap();
    let (settles, read) = wishes();
    let plan = plan(&mut app, &store, &settles, &read).await;
    assert!(!plan.contains("Seq Scan on outbox"), "{plan}");
}

/// Ids in time order are neighbours in the primary key, which every settle writes (migrations/0014_create.sql).
#[tokio::test]
async fn an_id_that_is_left_out_has_the_time_in_front() {
    let h = PostgresHarness::start(Setup::default()).await;
    let mut app = h.connect().await;
    for _ in 0..5 {
        app.execute("INSERT INTO outbox (topic, payload) VALUES ('t', '1')").await.unwrap();
        app.execute("SELECT pg_sleep(0.003)").await.unwrap();
    }
    let rows = app
        .fetch_all("SELECT id, (extract(epoch FROM created_at) * 1000)::bigint FROM outbox ORDER BY sequence")
        .await
        .unwrap();
    let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    assert!(ids.is_sorted(), "{ids:?}");
    for row in &rows {
        let (id, created_ms): (Uuid, i64) = (row.get(0), row.get(1));
        assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122), "{id}");
        let (seconds, nanoseconds) = id.get_timestamp().unwrap().to_unix();
        let id_ms = i64::try_from(seconds * 1000 + u64::from(nanoseconds) / 1_000_000).unwrap();
        // One clock, read when the transaction began and when the row was made.
        assert!((created_ms..created_ms + 60_000).contains(&id_ms), "{id}: {id_ms}, created at {created_ms}");
    }
}
