//! A part of the contract behind PgBouncer in transaction mode with two connections to the server, as case D28 has it: what runs in one
//! statement elsewhere is a transaction here, nothing is prepared, and whoever holds a connection cannot count on a second one.

use std::sync::Arc;

use async_trait::async_trait;
use queuebox_conformance::store::{Capabilities, OpenTransaction, Setup, StoreHarness};
use queuebox_core::ports::Store;
use queuebox_postgres::{PostgresConfig, PostgresStore};
use queuebox_testkit::{PgBouncer, PoolMode, pgbouncer_with};

use crate::harness::PostgresHarness;

/// A database whose stores see it through a pooler; everybody else is connected to the server.
pub struct PooledHarness {
    direct: PostgresHarness,
    pooler: PgBouncer,
}

#[async_trait]
impl StoreHarness for PooledHarness {
    async fn start(setup: Setup) -> Self {
        let direct = PostgresHarness::start(setup).await;
        let pooler = pgbouncer_with(&direct.server, PoolMode::Transaction, 2).await;
        Self { direct, pooler }
    }

    async fn store(&self) -> Arc<dyn Store> {
        let through = PostgresConfig::from_url(&self.pooler.url_of(&self.direct.database)).unwrap();
        Arc::new(PostgresStore::open(PostgresConfig { target: through.target, ..self.direct.config() }).unwrap())
    }

    async fn execute(&self, sql: &str) -> u64 {
        self.direct.execute(sql).await
    }

    async fn query(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        self.direct.query(sql).await
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        self.direct.begin().await
    }

    fn capabilities(&self) -> Capabilities {
        self.direct.capabilities()
    }

    fn now_plus(&self, us: i64) -> String {
        self.direct.now_plus(us)
    }

    fn us_until(&self, expression: &str) -> String {
        self.direct.us_until(expression)
    }

    fn text(&self, expression: &str) -> String {
        self.direct.text(expression)
    }

    fn table(&self, name: &str) -> String {
        self.direct.table(name)
    }

    fn column(&self, table: &str, name: &str) -> String {
        self.direct.column(table, name)
    }

    fn drop_identity(&self) -> String {
        self.direct.drop_identity()
    }
}

queuebox_conformance::store_tests!(@module schema, PooledHarness;
    migrate_twice
    migrators_wait_for_each_other
);
queuebox_conformance::store_tests!(@module lanes, PooledHarness;
    a_foreign_token_is_fenced
    lanes_of_a_dead_owner_move
    a_take_needs_the_term_as_seen
    two_relays_never_share_a_table
    renewal_covers_marked_rows
    a_takeover_waits_for_the_old_owners_statement
);
queuebox_conformance::store_tests!(@module outbox, PooledHarness;
    rows_come_in_order_and_whole
    keys_are_read_from_a_sequence_on
    a_late_commit_is_read
    failed_rows_are_settled
    marked_rows_are_settled_by_token
    a_row_changed_in_between_is_left_alone
    a_thousand_settles_in_one_call
    abandoned_rows_are_recovered
);
queuebox_conformance::store_tests!(@module inbox, PooledHarness;
    more_than_a_thousand_in_one_batch
    an_uncommitted_conflict_is_waited_for
    one_of_many_at_once_is_new
    a_refused_row_harms_nobody
    two_forwards_at_once
    a_refused_forward_fails_alone
);
queuebox_conformance::store_tests!(@module ledger, PooledHarness;
    pages_cover_all_rows_once
    requeue_moves_finished_rows_only
    prune_by_age
    prune_by_count
);
