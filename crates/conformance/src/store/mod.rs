//! What every database must do behind the store ports (laws in `queuebox_core::ports`, contract sections 2 to 5, 7.2, 11).
//!
//! Invariants of the suite: a test sees the database only through the ports and through SQL that the harness can run; it
//! owns a database of its own; it never waits for time to pass, but moves leases and due times by SQL instead.

pub mod inbox;
pub mod lanes;
pub mod ledger;
pub mod outbox;
pub mod schema;

mod world;

use std::sync::Arc;

use async_trait::async_trait;
use queuebox_core::ports::Store;

pub use world::{Insert, RowState, World, everything};

/// What a backend can do. Tests that need more than it can do return at once.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities {
    /// Two transactions may write at the same time, so that a lower `sequence` can commit after a higher one.
    pub concurrent_writers: bool,
    /// Numbers keep all of their digits (contract 2.4; false on MySQL 8).
    pub keeps_digits: bool,
}

/// How the database of one test is set up.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup {
    /// `outbox.onSent: Delete`.
    pub on_sent_delete: bool,
    /// No tables at all: the test migrates by itself.
    pub empty: bool,
}

/// A transaction of an application that stays open until it is told.
#[async_trait]
pub trait OpenTransaction: Send {
    /// Runs one statement.
    async fn execute(&mut self, sql: &str) -> u64;
    /// Commits.
    async fn commit(self: Box<Self>);
    /// Rolls back.
    async fn rollback(self: Box<Self>);
}

/// One database of one test, and how its SQL is written. Dropping it may remove the database.
#[async_trait]
pub trait StoreHarness: Sized + Send + Sync + 'static {
    /// Makes a new database, with tables of the newest version unless `setup.empty`.
    async fn start(setup: Setup) -> Self;

    /// Opens another handle with connections of its own, as another process would. `check` was not called yet.
    async fn store(&self) -> Arc<dyn Store>;

    /// Runs one statement in a transaction of its own; returns the number of changed rows.
    async fn execute(&self, sql: &str) -> u64;

    /// Runs one query whose columns are all of the type that [`StoreHarness::text`] gives.
    async fn query(&self, sql: &str) -> Vec<Vec<Option<String>>>;

    /// Begins a transaction that will write.
    async fn begin(&self) -> Box<dyn OpenTransaction>;

    /// What the backend can do.
    fn capabilities(&self) -> Capabilities;

    /// SQL: the database's now and `us` microseconds (may be negative), in the type of `scheduled_at`.
    fn now_plus(&self, us: i64) -> String;

    /// SQL: whole microseconds from now until the time `expression`, as an integer.
    fn us_until(&self, expression: &str) -> String;

    /// SQL: `expression` as text.
    fn text(&self, expression: &str) -> String;

    /// SQL: the quoted name of the table `outbox`, `inbox` or one of QueueBox's own.
    fn table(&self, name: &str) -> String;

    /// SQL: the quoted name of a column of `table`, both by their standard names.
    fn column(&self, table: &str, name: &str) -> String;

    /// SQL: drops the unique constraint of `(source, idempotency_key)`.
    fn drop_identity(&self) -> String;
}

/// Expands the whole suite into tests for one harness type.
///
/// ```ignore
/// mod contract {
///     use super::SqliteHarness; // the expansion needs the type by its plain name
///     queuebox_conformance::store_tests!(SqliteHarness);
/// }
/// ```
/// `store_tests!(RenamedHarness, renamed)` runs it over renamed tables and columns, which the harness makes by hand.
#[macro_export]
macro_rules! store_tests {
    ($harness:ty) => {
        $crate::store_tests!($harness, without schema);
        $crate::store_tests!(@module schema, $harness;
            migrate_twice
            migrators_wait_for_each_other
            a_migrated_database_passes_the_check
            tables_without_history_need_a_baseline
            a_baseline_is_recorded_once
            a_baseline_needs_its_tables
            a_changed_migration_is_an_error
            a_database_of_a_later_release
            a_missing_column_is_named
            the_identity_of_a_message_is_required
        );
    };
    // Renamed tables exclude migrations (contract 2.6); all else holds for them as well.
    ($harness:ty, renamed) => {
        $crate::store_tests!($harness, without schema);
        $crate::store_tests!(@module schema, $harness;
            renames_exclude_migrations
            a_missing_column_is_named
            the_identity_of_a_message_is_required
        );
    };
    ($harness:ty, without schema) => {
        $crate::store_tests!(@module lanes, $harness;
            registration_is_seen
            lanes_are_numbered_and_named
            an_ended_lease_is_never_renewed
            a_foreign_token_is_fenced
            nothing_is_written_after_the_lease_ended
            free_lanes_are_taken_once
            lanes_of_a_live_owner_stay
            lanes_of_a_dead_owner_move
            lanes_of_a_vanished_owner_move
            a_take_needs_the_term_as_seen
            scopes_do_not_collide
            lanes_are_given_to_a_joining_worker
            lanes_are_given_back
            a_retired_worker_leaves_nothing_behind
            careful_lanes_keep_the_name_of_a_retired_worker
            registration_sweeps_dead_workers
            another_relay_stands_by
            another_lane_hash_stands_by
            two_relays_never_share_a_table
            renewal_covers_marked_rows
            a_takeover_waits_for_the_old_owners_statement
        );
        $crate::store_tests!(@module outbox, $harness;
            rows_come_in_order_and_whole
            null_and_empty_keys_are_no_key
            the_walk_goes_on_behind_a_position
            rows_of_one_sequence_are_ordered_by_id
            only_pending_rows_are_read
            rows_in_memory_are_not_returned
            rows_settled_in_the_call_are_not_returned
            only_rows_of_the_lanes_are_read
            a_read_stops_at_its_bytes
            a_huge_payload_is_never_loaded
            held_rows_come_without_payload
            keys_are_read_from_a_sequence_on
            keys_stop_at_their_limit_and_bytes
            later_rows_come_when_due
            the_nearest_later_row_is_told
            rows_not_due_are_walked
            the_lap_ends_at_the_walk
            a_lap_ends_between_children
            a_destination_is_read_alone
            a_late_commit_is_read
            sent_rows_are_settled
            failed_rows_are_settled
            dead_rows_are_settled
            marked_rows_are_settled_by_token
            a_release_counts_nothing
            a_row_changed_in_between_is_left_alone
            a_thousand_settles_in_one_call
            sent_rows_can_be_deleted
            a_deleted_parent_waits_for_its_children
            a_deleted_parent_goes_with_a_dead_child
            rows_are_marked_under_their_stamp
            abandoned_rows_are_recovered
            crashing_rows_end_dead
            a_parent_is_expanded_once
            a_changed_parent_is_not_expanded
            outbox_keys_never_merge
            outbox_payloads_keep_their_digits
            the_outbox_backlog_is_bounded
            every_part_stops_at_its_bytes
            every_write_is_dated
            odd_headers_and_payloads_are_handed_on
            large_exclusions_and_settles_without_lanes
            nothing_is_skipped_under_load
            two_expansions_at_once
            an_open_insert_blocks_nobody
        );
        $crate::store_tests!(@module inbox, $harness;
            a_message_is_admitted_whole
            a_repeat_is_a_duplicate
            a_batch_sent_again_is_duplicate
            receipts_rise_with_the_batch
            more_than_a_thousand_in_one_batch
            delay_and_publish_time
            an_unusable_message_is_stored_dead
            an_uncommitted_conflict_is_waited_for
            one_of_many_at_once_is_new
            inbox_keys_never_merge
            a_refused_row_harms_nobody
            long_values_are_refused_not_cut
            inbox_payloads_keep_their_digits
            push_rows_wait_in_order
            only_due_push_rows_wait
            a_forward_is_whole
            forwards_keep_their_order
            a_moved_row_is_not_forwarded
            two_forwards_at_once
            a_refused_forward_fails_alone
            a_row_is_set_aside
            the_inbox_backlog_is_bounded
            the_nearest_push_row_is_told
            strange_texts_survive
            a_dropped_call_leaves_nothing_half_done
        );
        $crate::store_tests!(@module ledger, $harness;
            pages_cover_all_rows_once
            filters_are_combined
            inbox_filters_are_combined
            an_entry_is_whole
            requeue_moves_finished_rows_only
            requeue_spares_expanded_parents
            inbox_requeue
            discard_takes_dead_rows_only
            prune_by_age
            prune_by_count
            prune_by_count_is_exact
            prune_of_the_inbox_is_by_receipt
            prune_keeps_parents_with_open_children
            the_end_of_a_row_ends_its_deduplication
        );
    };
    (@module $module:ident, $harness:ty; $($name:ident)*) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test]
                async fn $name() {
                    $crate::store::$module::$name::<$harness>().await;
                }
            )*
        }
    };
}
