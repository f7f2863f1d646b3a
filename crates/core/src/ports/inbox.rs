//! The inbox: admit each message once, forward push rows.

use async_trait::async_trait;
use uuid::Uuid;

use super::lanes::Fence;
use crate::{
    Fault, LaneSet,
    message::{Consumption, Forward, NewInboxRow, PushRow},
};

/// What the unique constraint said about one message of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admitted {
    /// Stored under this id; the row is committed.
    New(Uuid),
    /// `(source, idempotency_key)` is stored already, byte for byte, and committed.
    Duplicate,
    /// This row alone cannot be stored, ever (a value that the database refuses). The others of the batch are.
    Refused(Fault),
    /// The constraint reports a conflict, but the stored key differs from ours: the column's collation merges keys
    /// (contract 2.4). Never a duplicate.
    Collision(Fault),
}

/// What became of forwards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// Inbox rows whose mark changed nothing: somebody else moved them. Rolled back, no outbox row.
    pub lost: Vec<Uuid>,
    /// Rows that wait, because an earlier row of their aggregate outside the batch is pending: only where several workers forward from the
    /// same rows (below schema version 14). Untouched; nothing was lost.
    pub held: Vec<Uuid>,
    /// Rows whose outbox insert the database refused, each tried alone, with the reason.
    pub refused: Vec<(Uuid, Fault)>,
}

/// Pending rows of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceBacklog {
    /// Name in the table; it may not be configured any more.
    pub source: String,
    /// Push or pull.
    pub consumption: Consumption,
    /// Pending rows, up to the bound.
    pub pending: u64,
    /// Dead rows, up to the bound.
    pub dead: u64,
    /// Age of the oldest pending row in microseconds; 0 = none.
    pub oldest_pending_age_us: i64,
}

/// The inbox of one database.
///
/// Laws (tested by `queuebox_conformance::store`):
/// - `admit` is one statement (sorted by key inside, so that two flushes cannot deadlock); row i of the batch gets now + i
///   microseconds as its receipt. It returns only after the commit. Two equal messages in one batch: the first is new.
/// - An insert that meets another transaction's uncommitted row with the same key waits for its outcome.
/// - `forward` inserts the outbox row and marks the inbox row in one transaction, in the order given.
#[async_trait]
pub trait Inbox: Send + Sync + 'static {
    /// Stores a batch; one answer per message, in order. A fault means that nothing of the batch is known to be stored:
    /// sending it again is safe.
    async fn admit(&self, batch: &[NewInboxRow]) -> Result<Vec<Admitted>, Fault>;

    /// Due pending push rows of `lanes` in the order `scheduled_at, created_at, id`, without those in `exclude`.
    async fn waiting(&self, fence: &Fence, lanes: LaneSet, limit: u32, exclude: &[Uuid])
    -> Result<Vec<PushRow>, Fault>;

    /// Forwards a batch under the fence, `max_attempts` stamped on each new outbox row. When the database refuses the batch,
    /// each row is tried alone.
    async fn forward(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Fault>;

    /// [`PushRow::crashes`] says how often the row was set aside. Below version 12 there is no such column.
    fn counts_refusals(&self) -> bool {
        true
    }

    /// Marks a push row that cannot be forwarded: dead with `error`; or, with `error` = `None`, adds one to `crashes` and
    /// puts it off by `delay_us`.
    async fn set_aside(&self, fence: &Fence, id: Uuid, error: Option<&str>, delay_us: i64) -> Result<bool, Fault>;

    /// Backlog per source and consumption, each count up to `bound`.
    async fn inbox_backlog(&self, bound: u64) -> Result<Vec<SourceBacklog>, Fault>;

    /// Microseconds until the nearest pending push row of `lanes` comes due; `Some(0)` = now; `None` = there is none.
    async fn next_push_due_in_us(&self, lanes: LaneSet) -> Result<Option<i64>, Fault>;
}
