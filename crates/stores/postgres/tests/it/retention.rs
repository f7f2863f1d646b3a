//! Retention over more pages than one window, by several workers at once (contract 11, cases D31 and D32).

use queuebox_conformance::store::{Setup, StoreHarness};
use queuebox_core::{
    message::State,
    ports::{Ledger, Scope, outbox::PruneRule, schema::Schema},
};
use queuebox_postgres::PostgresStore;

use crate::harness::PostgresHarness;

const FILL: &str = "INSERT INTO outbox (topic, payload, state, updated_at) SELECT 't', to_jsonb(repeat('x', 200)), \
                    CASE WHEN n % 50 = 0 THEN 'pending' WHEN n % 50 = 1 THEN 'dead' ELSE 'sent' END, \
                    CASE WHEN n % 50 < 3 THEN now() ELSE now() - interval '40 days' END FROM generate_series(1, 40000) n";

/// Steps until the pass over a table is over; returns what went.
async fn pass(store: &PostgresStore, table: Scope, state: State, rule: PruneRule) -> u64 {
    let mut gone = 0;
    loop {
        let step = store.prune(table, state, rule, 3_000).await.unwrap();
        gone += step.rows;
        if !step.more {
            return gone;
        }
    }
}

async fn prune(store: &PostgresStore, rule: PruneRule) -> u64 {
    pass(store, Scope::Outbox, State::Sent, rule).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d31_a_pass_over_the_whole_table_is_shared() {
    let h = PostgresHarness::start(Setup::default()).await;
    h.execute(FILL).await;
    let blocks = "SELECT (pg_relation_size('outbox') / 8192 > 2 * 1024)::text";
    assert_eq!(h.one(blocks).await, "true", "more than two windows");
    let stores = [h.open(), h.open()];
    for store in &stores {
        store.check().await.unwrap();
    }
    let month = PruneRule::OlderThan(30 * 24 * 3_600_000);
    let gone = futures::future::join_all(stores.iter().map(|store| prune(store, month))).await;
    assert_eq!(gone.into_iter().sum::<u64>(), 40_000 / 50 * 47);
    let left = h.column_of("SELECT state || count(*) FROM outbox GROUP BY state ORDER BY state").await;
    assert_eq!(left, ["dead800", "pending800", "sent800"]);
    h.execute("UPDATE outbox SET updated_at = now() - interval '31 days' WHERE state = 'sent'").await;
    assert_eq!(prune(&stores[0], month).await, 800);
    assert_eq!(pass(&stores[1], Scope::Outbox, State::Pending, month).await, 0);
}

#[tokio::test]
async fn all_but_the_newest_go() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    h.execute("INSERT INTO outbox (topic, payload, state, updated_at) SELECT 't', '1', 'sent', now() - n * interval '1 s' FROM generate_series(1, 5000) n")
        .await;
    assert_eq!(prune(&store, PruneRule::Beyond(100)).await, 4_900);
    let oldest = h.one("SELECT (max(now() - updated_at) < interval '200 s')::text FROM outbox").await;
    assert_eq!(oldest, "true");
}

/// Several workers at once, rows that finish meanwhile, and a table that is written anew while it is walked: whatever happens, the
/// newest stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_count_is_kept_beside_everything_else() {
    let h = PostgresHarness::start(Setup::default()).await;
    h.execute(FILL).await;
    let stores = [h.open(), h.open()];
    for store in &stores {
        store.check().await.unwrap();
    }
    let newest = "SELECT min(updated_at)::text FROM (SELECT updated_at FROM outbox WHERE state = 'sent' \
                  ORDER BY updated_at DESC LIMIT 500) s";
    h.execute("UPDATE outbox SET updated_at = updated_at - sequence * interval '1 ms' WHERE state = 'sent'").await;
    let first = stores[0].prune(Scope::Outbox, State::Sent, PruneRule::Beyond(500), 3_000).await.unwrap();
    assert!(first.more && first.rows == 0, "one window of several was counted");
    let boundary = h.one(newest).await;
    h.execute("VACUUM FULL outbox").await;
    let gone = futures::future::join_all(stores.iter().map(|store| prune(store, PruneRule::Beyond(500)))).await;
    let sent = 40_000 / 50 * 48;
    assert_eq!(gone.into_iter().sum::<u64>(), sent - 500);
    assert_eq!(h.one(newest).await, boundary);
    // One more finishes: exactly the oldest goes.
    h.execute("UPDATE outbox SET state = 'sent', updated_at = now() WHERE id = (SELECT id FROM outbox WHERE state = 'pending' LIMIT 1)")
        .await;
    assert_eq!(prune(&stores[0], PruneRule::Beyond(500)).await, 1);
    assert_eq!(prune(&stores[0], PruneRule::Beyond(500)).await, 0);
}

/// A pass over many finished rows reads windows of pages and ranges of an index, never a table as a whole: no statement of it grows with
/// the table, and none holds anything for long.
#[tokio::test]
async fn a_pass_never_scans_a_table_in_one_go() {
    let h = PostgresHarness::start(Setup::default()).await;
    h.execute(FILL).await;
    h.execute(
        "INSERT INTO inbox (source, idempotency_key, payload, state, created_at) SELECT 's', 'k' || n, '1', 'processed', \
         now() - CASE WHEN n % 2 = 0 THEN interval '40 days' ELSE interval '1 day' END FROM generate_series(1, 40000) n",
    )
    .await;
    h.execute("VACUUM ANALYZE outbox").await;
    h.execute("VACUUM ANALYZE inbox").await;
    let scans = "SELECT sum(seq_scan)::text FROM pg_stat_user_tables WHERE relname IN ('outbox', 'inbox')";
    let before = h.one(scans).await;
    let store = h.open();
    store.check().await.unwrap();
    let month = PruneRule::OlderThan(30 * 24 * 3_600_000);
    assert_eq!(prune(&store, month).await, 40_000 / 50 * 47);
    assert_eq!(prune(&store, PruneRule::Beyond(300)).await, 500);
    assert_eq!(pass(&store, Scope::Outbox, State::Dead, month).await, 0);
    assert_eq!(pass(&store, Scope::Outbox, State::Dead, PruneRule::Beyond(100)).await, 700);
    assert_eq!(pass(&store, Scope::Inbox, State::Processed, month).await, 20_000);
    assert_eq!(pass(&store, Scope::Inbox, State::Dead, month).await, 0);
    // The server counts what a connection did when it ends.
    store.close().await;
    let deleted = "SELECT (sum(n_tup_del) = 58800)::text FROM pg_stat_user_tables WHERE relname IN ('outbox', 'inbox')";
    queuebox_testkit::eventually("the counts are there", std::time::Duration::from_secs(60), || async {
        (h.one(deleted).await == "true").then_some(())
    })
    .await;
    assert_eq!(h.one(scans).await, before);
}
