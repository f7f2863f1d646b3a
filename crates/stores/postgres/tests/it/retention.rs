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

/// Batches until a pass finds nothing; returns what went.
async fn prune(store: &PostgresStore, rule: PruneRule) -> u64 {
    let mut gone = 0;
    loop {
        match store.prune(Scope::Outbox, State::Sent, rule, 3_000).await.unwrap() {
            0 => return gone,
            some => gone += some,
        }
    }
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
    // The next rows are found wherever the pass stopped.
    h.execute("UPDATE outbox SET updated_at = now() - interval '31 days' WHERE state = 'sent'").await;
    assert_eq!(prune(&stores[0], month).await, 800);
    assert_eq!(stores[1].prune(Scope::Outbox, State::Pending, month, 10).await.unwrap(), 0);
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
    let old = 40_000 / 50 * 47;
    assert_eq!(prune(&store, month).await, old);
    let mut processed = 0;
    loop {
        match store.prune(Scope::Inbox, State::Processed, month, 3_000).await.unwrap() {
            0 => break,
            some => processed += some,
        }
    }
    assert_eq!(processed, 20_000);
    store.prune(Scope::Outbox, State::Dead, month, 3_000).await.unwrap();
    store.prune(Scope::Inbox, State::Dead, month, 3_000).await.unwrap();
    // The server counts what a connection did when it ends.
    store.close().await;
    let deleted = format!(
        "SELECT (sum(n_tup_del) = {})::text FROM pg_stat_user_tables WHERE relname IN ('outbox', 'inbox')",
        old + 20_000
    );
    queuebox_testkit::eventually("the counts are there", std::time::Duration::from_secs(60), || async {
        (h.one(&deleted).await == "true").then_some(())
    })
    .await;
    assert_eq!(h.one(scans).await, before);
}
